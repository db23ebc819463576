"""One group of views from the DataManager, through the model, to losses."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch
import tyro
from nerfstudio.pipelines.base_pipeline import VanillaPipeline, VanillaPipelineConfig
from torch.cuda.amp.grad_scaler import GradScaler

from odin_nerfstudio.comm.placement import Placement
from odin_nerfstudio.comm.world import World
from odin_nerfstudio.errors import UserError, exit_with_sentence
from odin_nerfstudio.shadow.policy import Barrier, Quality, Throughput
from odin_nerfstudio.splat.datamanager import OdinDataManager, OdinDataManagerConfig
from odin_nerfstudio.splat.model import OdinSplatfactoModel, OdinSplatfactoModelConfig
from odin_nerfstudio.splat.rows import collect, install
from odin_nerfstudio.splat.runner import UnitRunner

POLICIES: dict[str, Quality] = {"barrier": Barrier(), "quality": Quality(), "throughput": Throughput()}


@dataclass
class OdinPipelineConfig(VanillaPipelineConfig):
    """Configuration of :class:`OdinPipeline`."""

    _target: type = field(default_factory=lambda: OdinPipeline)
    datamanager: OdinDataManagerConfig = field(default_factory=OdinDataManagerConfig)
    """Which views, in which groups."""
    model: OdinSplatfactoModelConfig = field(default_factory=OdinSplatfactoModelConfig)
    """How they are rendered and what is learned."""
    policy: Literal["barrier", "quality", "throughput"] = "quality"
    """When a step may read what the step before it has not published yet: never; if it cannot change any more; or also
    if little of it changes, by little, and not too often."""
    seed: Annotated[int, tyro.conf.Suppress] = 0
    """Set by the trainer from ``--machine.seed``."""


class OdinPipeline(VanillaPipeline):
    """A pipeline whose training step is a group of views. No DDP: ranks meet at primitives.

    Raises:
        SystemExit: with a sentence, when the capture cannot be used.
    """

    config: OdinPipelineConfig
    datamanager: OdinDataManager
    model: OdinSplatfactoModel

    def __init__(
        self,
        config: OdinPipelineConfig,
        device: str,
        test_mode: Literal["test", "val", "inference"] = "val",
        world_size: int = 1,
        local_rank: int = 0,
        grad_scaler: GradScaler | None = None,
    ) -> None:
        self.world = World.current(device, local_rank)
        with exit_with_sentence():
            torch.manual_seed(config.seed)  # the ranks begin with the same scene
            # One rank as far as nerfstudio knows: no DDP, whose hooks are lost when parameters are replaced.
            super().__init__(config, device, test_mode, 1, local_rank, grad_scaler)
            self.model.set_seed(config.seed)
            self.model.gather = self.world.all_gather_rows
            self.datamanager.seed = config.seed
            self.datamanager.world_size, self.datamanager.rank = self.world.size, self.world.rank
            if test_mode == "val":  # what nerfstudio calls a pipeline that is going to be trained
                self.datamanager.prepare_training()
                self.world.check_same(self.datamanager.plan.schedule.fingerprint(), "the order of views")
            everything = collect(self.model)
            self.placement = Placement(self.world, everything.rows["means"])
            install(self.model, self.placement.shard(everything))
            self.runner = UnitRunner(self.model, self.datamanager, self.world, POLICIES[config.policy])

    def place(self, means: torch.Tensor) -> torch.Tensor:
        """Splits space anew by the positions ((N, 3)) of a whole scene.

        Returns:
            (N,) bool: which of its primitives belong to this rank.
        """
        self.placement = Placement(self.world, means)
        return self.placement.owner(means) == self.world.rank

    def get_train_loss_dict(self, step: int) -> tuple[Any, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Renders this rank's views of the group of ``step``.

        Returns:
            Outputs of each view; losses, whose sum over all ranks is the mean over the group; metrics, means over this
            rank's views.
        """
        views, leaves = self.datamanager.next_group(step), self.runner.receive(step)
        outputs = []
        losses, metrics = defaultdict(list), defaultdict(list)
        for (camera, batch), splats in zip(views, leaves, strict=True):
            output = self.model.render(camera, self.model.pinhole(camera, step), splats)
            view_metrics = self.model.get_metrics_dict(output, batch)
            for name, value in view_metrics.items():
                metrics[name].append(torch.as_tensor(value, dtype=torch.float32))
            for name, value in self.model.get_loss_dict(output, batch, view_metrics).items():
                losses[name].append(value)
            outputs.append(output)
        size = self.datamanager.group_size
        mean_metrics = {name: torch.stack(each).mean() for name, each in metrics.items()}
        return outputs, {name: torch.stack(each).sum() / size for name, each in losses.items()}, mean_metrics

    def get_average_eval_image_metrics(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Average metrics over the evaluation images.

        Raises:
            SystemExit: with a sentence, when there are none.
        """
        with exit_with_sentence():
            if not len(self.datamanager.eval_dataset):
                raise UserError(
                    f"{self.datamanager.get_datapath()}: no images are left for evaluation. "
                    "Choose another --eval-mode of the dataparser."
                )
            return super().get_average_eval_image_metrics(*args, **kwargs)
