"""One group of views from the DataManager, through the model, to losses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
import torch
import tyro
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.pipelines.base_pipeline import VanillaPipeline, VanillaPipelineConfig
from numpy.typing import NDArray
from torch.cuda.amp.grad_scaler import GradScaler

from odin_nerfstudio.comm.exchange import Link
from odin_nerfstudio.comm.placement import Placement
from odin_nerfstudio.comm.replicas import Replicas
from odin_nerfstudio.comm.world import World
from odin_nerfstudio.cpu import threads
from odin_nerfstudio.errors import UserError, exit_with_sentence
from odin_nerfstudio.splat.datamanager import Batch, OdinDataManager, OdinDataManagerConfig
from odin_nerfstudio.splat.display import gather_display, own_history
from odin_nerfstudio.splat.model import OdinSplatfactoModel, OdinSplatfactoModelConfig
from odin_nerfstudio.splat.outputs import Outputs
from odin_nerfstudio.splat.raster import Splats
from odin_nerfstudio.splat.rows import collect, install
from odin_nerfstudio.splat.runner import UnitRunner
from odin_nerfstudio.viewer.controls import Controls, PolicyName
from odin_nerfstudio.viewer.heatmap import History
from odin_nerfstudio.viewer.monitor import Monitor, Sketch
from odin_nerfstudio.viewer.odin_panel import OdinPanel
from odin_nerfstudio.viewer.recording import Recording


@dataclass
class OdinPipelineConfig(VanillaPipelineConfig):
    """Configuration of :class:`OdinPipeline`."""

    _target: type = field(default_factory=lambda: OdinPipeline)
    datamanager: OdinDataManagerConfig = field(default_factory=OdinDataManagerConfig)
    """Which views, in which groups."""
    model: OdinSplatfactoModelConfig = field(default_factory=OdinSplatfactoModelConfig)
    """How they are rendered and what is learned."""
    placement: Literal["sharded", "replicated"] = "sharded"
    """With several ranks: whether each has the primitives of a part of space, or all of them, which takes as much
    memory as one rank alone needs."""
    policy: PolicyName = "quality"
    """When a step may read what the step before it has not published yet: never; if it cannot change any more; or also
    if little of it changes, by little, and not too often."""
    delay_ratio: float = 0.2
    """Policy throughput: how much of a step's primitives, and how large a gradient relative to the mean, may be read
    before publication."""
    max_delay: int = 4
    """Policy throughput: for how many steps in a row a primitive may be read before publication."""
    viewer_max_primitives: int = 1_000_000
    """With several ranks, the viewer shows a copy of at most so many primitives, those that cover most."""
    link: Annotated[Link, tyro.conf.Suppress] = field(default_factory=Link)
    """A slower network between ranks to imitate; set by ``odin-bench``."""
    seed: Annotated[int, tyro.conf.Suppress] = 0
    """Set by the trainer from ``--machine.seed``."""

    @property
    def controls(self) -> Controls:
        """What the flags say of that which can be changed later."""
        return Controls(self.policy, self.delay_ratio, self.max_delay)


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
        if self.world.device.index is not None:
            torch.cuda.set_device(self.world.device)  # ns-train leaves every process on the first GPU
        elif self.world.device.type == "cpu":
            threads.claim()
        with exit_with_sentence():
            torch.manual_seed(config.seed)  # the ranks begin with the same scene
            # One rank as far as nerfstudio knows: no DDP, whose hooks are lost when parameters are replaced.
            super().__init__(config, device, test_mode, 1, local_rank, grad_scaler)
            self.model.set_seed(config.seed)
            replicated = config.placement == "replicated"
            if not replicated:
                self.model.gather = self.world.all_gather_rows
            self.datamanager.seed = config.seed
            self.datamanager.world_size, self.datamanager.rank = self.world.size, self.world.rank
            if test_mode == "val":  # what nerfstudio calls a pipeline that is going to be trained
                self.datamanager.prepare_training()
                self.world.check_same(self.datamanager.plan.schedule.fingerprint(), "the order of views")
            self.place(self.model.means)
            install(self.model, self.placement.shard(collect(self.model)))
            self.model.strategy.verbose = self.world.rank == 0
            policy = config.controls.shadow_policy
            self.runner = UnitRunner(self.model, self.datamanager, self.world, policy, replicated, config.link)
        recording = Recording.around(self.runner.timeline, self.world.size, self._predicted_share)
        self._boxes = np.stack([_box(self.model.means)] * self.world.size)
        self.monitor = Monitor(recording, config.controls, self._sketch)
        """What rank 0 knows of the run."""
        self.panel = OdinPanel(self.monitor)
        """The viewer's tab; nerfstudio finds it here."""

    def place(self, means: torch.Tensor) -> torch.Tensor:
        """Splits space anew by the positions ((N, 3)) of a whole scene.

        Returns:
            (N,) bool: which of its primitives belong to this rank.
        """
        sharded = self.config.placement == "sharded"
        self.placement: Placement | Replicas = Placement(self.world, means) if sharded else Replicas(self.world)
        return self.placement.keeps(means)

    def get_train_loss_dict(self, step: int) -> tuple[Any, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Renders this rank's views of the group of ``step``, which the runner has received.

        Returns:
            Outputs of each view; losses, whose sum over all ranks is the mean over the group plus the regularisers;
            metrics, means over this rank's views.
        """
        views, leaves = self.datamanager.next_group(step), self.runner.leaves(step)
        with self.runner.timeline.span("compute", step, "render"):
            return self._render_group(step, views, leaves)

    def _render_group(
        self, step: int, views: list[tuple[Cameras, Batch]], leaves: list[Splats]
    ) -> tuple[list[Outputs], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
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
        mean_metrics = {name: total(each) / len(each) for name, each in metrics.items()}
        mean_losses = {name: total(each) / size for name, each in losses.items()}
        return outputs, mean_losses | self.model.regularisers(step), mean_metrics

    def meet(self, step: int, show: bool = False) -> list[int]:
        """Rank 0 hears what the others recorded, and all take up new controls. All ranks, with no unit in flight.

        Args:
            step: the unit that all have finished.
            show: whether rank 0 wants to give its viewer the scene as it is now; the other ranks' does not count.

        Returns:
            On rank 0, the units that are known in full since the last meeting; nothing on the others.
        """
        wish, show = self.world.broadcast_object((self.monitor.take_wish(), show))
        if wish is not None:
            self._take_up(wish)
        if show:
            self._show(step)
        return self.monitor.hear(self.world, self.runner.timeline, step)

    def _take_up(self, controls: Controls) -> None:
        self.monitor.controls = controls
        self.runner.graph.policy = controls.shadow_policy
        self.runner.contention.window = controls.window
        self.runner.timeline.recording = controls.recording

    def _show(self, step: int) -> None:
        """Gives the viewer of rank 0 the scene as it is now."""
        boxes = self.world.gather_objects(_box(self.model.means))
        if boxes is not None:
            self._boxes = np.stack(boxes)
        history = self.history(step)
        if self.world.size == 1:
            self.model.history = history
            return
        shown = gather_display(self.model, self.placement, history, self.config.viewer_max_primitives)
        if shown is not None:
            self.model.display, self.model.history = shown

    def history(self, step: int) -> History:
        """What was recorded of this rank's primitives by the end of unit ``step``."""
        return own_history(self.model, self.runner, self.world.rank, step)

    def _predicted_share(self, step: int, earlier: int) -> float:
        return self.datamanager.plan.predicted_share(step, earlier)

    def _sketch(self) -> Sketch:
        plan, cells = self.datamanager.plan, np.array([[[-np.inf] * 3, [np.inf] * 3]])
        if isinstance(self.placement, Placement):
            cells = self.placement.partition.bounds
        cameras = self.datamanager.train_dataset.cameras.camera_to_worlds[:, :3, 3].cpu().double().numpy()
        return Sketch(cells, self._boxes, cameras, lambda step: plan.schedule.group(step).views, plan.rlg)

    def rebalance(self) -> None:
        """Moves primitives between ranks if the shards have become too unequal. All ranks, with no unit in flight."""
        if self.world.size > 1:
            shard = collect(self.model)
            balanced = self.placement.rebalance(shard)
            if balanced is not shard:
                install(self.model, balanced)

    def get_eval_loss_dict(self, step: int) -> tuple[Any, dict[str, torch.Tensor], dict[str, Any]]:
        """Losses and metrics of one evaluation image, the same on every rank; its outputs on rank 0."""
        if self.world.size == 1:
            return super().get_eval_loss_dict(step)
        self.eval()
        camera, batch = self.datamanager.next_eval(step)
        outputs, found = self._render_one_each([(camera, batch)]), None
        if outputs is not None:
            metrics = self.model.get_metrics_dict(outputs, batch)
            found = self.model.get_loss_dict(outputs, batch, metrics), metrics
        self.train()
        return outputs, *self.world.broadcast_object(found)

    def get_eval_image_metrics_and_images(self, step: int) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        """Metrics of one evaluation image, on every rank; its picture on rank 0."""
        if self.world.size == 1:
            return super().get_eval_image_metrics_and_images(step)
        self.eval()
        camera, batch = self.datamanager.next_eval_image(step)
        metrics, images = self._evaluate([(camera, batch)])
        self.train()
        pixels = int(camera.width * camera.height)
        return {**self.world.broadcast_object(metrics[0] if metrics else None), "num_rays": pixels}, images

    def _evaluate(self, views: list[tuple[Cameras, Batch]]) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
        """Renders one view on each rank, as far as there are views; metrics of this rank's, and its picture."""
        outputs = self._render_one_each(views)
        if outputs is None:
            return [], {}
        metrics, images = self.model.get_image_metrics_and_images(outputs, views[self.world.rank][1])
        return [metrics], images

    def _render_one_each(self, views: list[tuple[Cameras, Batch]]) -> Outputs | None:
        """What this rank has to render of one view for each rank; None where there are fewer views."""
        cameras = [self.model.pinhole(camera, self.model.step) for camera, _ in views]
        splats = self.runner.look(cameras, range(len(views)))
        rank = self.world.rank
        return self.model.render(views[rank][0], cameras[rank], splats[0]) if splats else None

    def _average_over_ranks(self) -> dict[str, float]:
        """Mean metrics of all evaluation images, which the ranks share out among themselves."""
        self.eval()
        metrics: list[dict[str, float]] = []
        views = list(self.datamanager.fixed_indices_eval_dataloader)
        for first in range(0, len(views), self.world.size):
            metrics += self._evaluate(views[first : first + self.world.size])[0]
        self.train()
        everyone = [one for share in self.world.all_gather_objects(metrics) for one in share]
        return {name: sum(one[name] for one in everyone) / len(everyone) for name in everyone[0]}

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
            if self.world.size > 1:
                return self._average_over_ranks()
            return super().get_average_eval_image_metrics(*args, **kwargs)


def total(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of one scalar or more; of one it is no operation, here and in the backward."""
    return values[0] if len(values) == 1 else torch.stack(list(values)).sum()


def _box(means: torch.Tensor) -> NDArray[np.float64]:
    """(2, 3) the corners of the box around (N, 3) positions; NaN without any."""
    if not len(means):
        return np.full((2, 3), np.nan)
    return torch.stack([means.min(0).values, means.max(0).values]).detach().cpu().double().numpy()
