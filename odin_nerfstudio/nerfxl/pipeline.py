"""Rays from the DataManager, through the tiles of all ranks, to losses."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch
import tyro
from nerfstudio.pipelines.base_pipeline import VanillaPipeline, VanillaPipelineConfig
from torch.cuda.amp.grad_scaler import GradScaler

from odin_nerfstudio.comm.world import World
from odin_nerfstudio.errors import UserError, exit_with_sentence
from odin_nerfstudio.nerfxl.datamanager import NerfXLDataManager, NerfXLDataManagerConfig
from odin_nerfstudio.nerfxl.model import NerfXLModel, NerfXLModelConfig
from odin_nerfstudio.shadow.timeline import Timeline
from odin_nerfstudio.viewer.controls import Controls
from odin_nerfstudio.viewer.monitor import Monitor
from odin_nerfstudio.viewer.recording import Recording
from odin_nerfstudio.viewer.tile_panel import TilePanel

GIB = 1 << 30
SHOW_COST = 20
"""Copying tiles to the viewer takes at most one part in so many of the time."""


@dataclass
class NerfXLPipelineConfig(VanillaPipelineConfig):
    """Configuration of :class:`NerfXLPipeline`."""

    _target: type = field(default_factory=lambda: NerfXLPipeline)
    datamanager: NerfXLDataManagerConfig = field(default_factory=NerfXLDataManagerConfig)
    """Which rays."""
    model: NerfXLModelConfig = field(default_factory=NerfXLModelConfig)
    """How they are rendered and what is learned."""
    viewer_max_gib: float = 1.0
    """With several ranks, the viewer gets a copy of all tiles if the other ranks' take no more memory than this;
    otherwise it shows those of rank 0 only."""
    seed: Annotated[int, tyro.conf.Suppress] = 0
    """Set by the trainer from ``--machine.seed``."""


class NerfXLPipeline(VanillaPipeline):
    """A pipeline in which every rank renders every ray through its own tiles. No DDP: an average of gradients would be
    wrong, and private parameters have nobody to share with.

    Raises:
        SystemExit: with a sentence, when the capture cannot be used.
    """

    config: NerfXLPipelineConfig
    datamanager: NerfXLDataManager
    model: NerfXLModel

    def __init__(
        self,
        config: NerfXLPipelineConfig,
        device: str,
        test_mode: Literal["test", "val", "inference"] = "val",
        world_size: int = 1,
        local_rank: int = 0,
        grad_scaler: GradScaler | None = None,
    ) -> None:
        self.world = World.current(device, local_rank)
        if self.world.device.type == "cuda" and self.world.device.index is not None:
            torch.cuda.set_device(self.world.device)  # ns-train leaves every process on the first GPU
        config.model.seed = config.seed
        if config.model.tiles is None:  # kept in config.yml, for tools that run in one process
            config.model.tiles = self.world.size
        with exit_with_sentence():
            super().__init__(config, device, test_mode, 1, local_rank, grad_scaler)
            # World.current() in the model does not know the device that this rank was given.
            self.model.world = self.world
            self.datamanager.seed = config.seed
            if test_mode == "val":  # what nerfstudio calls a pipeline that is going to be trained
                self.datamanager.prepare_training()
                self.world.check_same(self.datamanager.train_dataset.metadata["scene"].images, "the list of images")
                # Faces that differ in the last bit, as processors round, would leave gaps between tiles.
                self.model.set_extra_state(self.world.broadcast_object(self.model.get_extra_state()))
        self.timeline = self.model.timeline = Timeline(self.world.rank)
        self.monitor = Monitor(Recording.around(self.timeline, self.world.size), Controls())
        """What rank 0 knows of the run."""
        self.panel = TilePanel(self.monitor, lambda: self.model.tiles.core.cpu().double().numpy())
        """The viewer's tab; nerfstudio finds it here."""
        self._next_show = 0.0

    def shared_parameters(self) -> list[torch.nn.Parameter]:
        """Those that every rank holds, and whose gradients are summed over the ranks."""
        groups = self.get_param_groups()
        return [param for name, group in groups.items() if name != "fields" for param in group]

    def meet(self, step: int, show: bool = False) -> list[int]:
        """Rank 0 hears what the others recorded. All ranks together, between steps.

        Args:
            step: which all have finished.
            show: whether rank 0 wants to give its viewer all tiles as they are now; the other ranks' does not count.

        Returns:
            On rank 0, the steps that are known in full since the last meeting; nothing on the others.
        """
        begin = time.monotonic()
        wish, show = self.world.broadcast_object((self.monitor.take_wish(), show and begin >= self._next_show))
        if wish is not None:
            self.monitor.controls, self.timeline.recording = wish, wish.recording
        if show:
            self._show()
            self._next_show = time.monotonic() + SHOW_COST * (time.monotonic() - begin)
        return self.monitor.hear(self.world, self.timeline, step)

    def _show(self) -> None:
        """Gives rank 0 copies of the other ranks' tiles, if they are not too large for it."""
        model, world = self.model, self.world
        tensors = [*model.fields.parameters(), *model.fields.buffers()] if world.rank > 0 else []
        sizes = world.all_gather_objects(sum(tensor.nbytes for tensor in tensors))
        if world.size == 1 or sum(sizes) > self.config.viewer_max_gib * GIB:
            return
        own = {tile: model.fields[str(tile)].state_dict() for tile in model.held} if world.rank > 0 else {}
        gathered = world.gather_objects(own)
        for states in gathered or []:
            for tile, state in states.items():
                model.others[tile] = model.copy_of(tile, state)

    def get_train_loss_dict(self, step: int) -> tuple[Any, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Renders the rays of ``step``; all ranks together. The backward needs no other rank."""
        with self.model.together():
            return super().get_train_loss_dict(step)

    def get_eval_loss_dict(self, step: int) -> tuple[Any, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Loss of a batch of evaluation rays; all ranks together."""
        with self.model.together():
            return super().get_eval_loss_dict(step)

    def get_eval_image_metrics_and_images(self, step: int) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        """Metrics and pictures of one evaluation image; all ranks together."""
        with self.model.together():
            return super().get_eval_image_metrics_and_images(step)

    def get_average_eval_image_metrics(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Average metrics over the evaluation images; all ranks together.

        Raises:
            SystemExit: with a sentence, when there are none.
        """
        with exit_with_sentence(), self.model.together():
            if not len(self.datamanager.eval_dataset):
                raise UserError(
                    f"{self.datamanager.get_datapath()}: no images are left for evaluation. "
                    "Choose another --eval-mode of the dataparser."
                )
            return super().get_average_eval_image_metrics(*args, **kwargs)

    def load_pipeline(self, loaded_state: Mapping[str, Any], step: int) -> None:
        """Loads a checkpoint of any number of ranks.

        Raises:
            SystemExit: with a sentence, when it is of another capture, method or number of tiles.
        """
        with exit_with_sentence():
            super().load_pipeline(dict(loaded_state), step)
