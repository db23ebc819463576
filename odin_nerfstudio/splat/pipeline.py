"""One group of views from the DataManager, through the model, to losses."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch
import tyro
from nerfstudio.pipelines.base_pipeline import VanillaPipeline, VanillaPipelineConfig
from torch.cuda.amp.grad_scaler import GradScaler

from odin_nerfstudio.errors import UserError, exit_with_sentence
from odin_nerfstudio.splat.datamanager import OdinDataManager, OdinDataManagerConfig
from odin_nerfstudio.splat.model import OdinSplatfactoModel, OdinSplatfactoModelConfig


@dataclass
class OdinPipelineConfig(VanillaPipelineConfig):
    """Configuration of :class:`OdinPipeline`."""

    _target: type = field(default_factory=lambda: OdinPipeline)
    datamanager: OdinDataManagerConfig = field(default_factory=OdinDataManagerConfig)
    """Which views, in which groups."""
    model: OdinSplatfactoModelConfig = field(default_factory=OdinSplatfactoModelConfig)
    """How they are rendered and what is learned."""
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
        with exit_with_sentence():
            super().__init__(config, device, test_mode, world_size, local_rank, grad_scaler)
            self.model.set_seed(config.seed)
            self.datamanager.seed = config.seed
            if test_mode == "val":  # what nerfstudio calls a pipeline that is going to be trained
                self.datamanager.prepare_training()

    def get_train_loss_dict(self, step: int) -> tuple[Any, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Renders the group of ``step``; losses and metrics are means over its views."""
        views = self.datamanager.next_group(step)
        outputs = self.model.render_group([camera for camera, _ in views])
        losses, metrics = defaultdict(list), defaultdict(list)
        for output, (_, batch) in zip(outputs, views, strict=True):
            view_metrics = self.model.get_metrics_dict(output, batch)
            for name, value in view_metrics.items():
                metrics[name].append(torch.as_tensor(value, dtype=torch.float32))
            for name, value in self.model.get_loss_dict(output, batch, view_metrics).items():
                losses[name].append(value)
        return outputs, _means(losses), _means(metrics)

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


def _means(values: dict[str, list[torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack(each).mean() for name, each in values.items()}
