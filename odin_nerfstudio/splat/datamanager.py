"""Hands the trainer the planned groups of views, decoded ahead of their turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from typing import Annotated, Any, Literal

import torch
import tyro
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.configs.dataparser_configs import AnnotatedDataParserUnion
from nerfstudio.data.datamanagers.full_images_datamanager import FullImageDatamanager, FullImageDatamanagerConfig
from nerfstudio.data.dataparsers.nerfstudio_dataparser import NerfstudioDataParserConfig
from nerfstudio.utils.rich_utils import CONSOLE

from odin_nerfstudio.data.capture import plan_cameras
from odin_nerfstudio.data.dataset import UndistortedDataset
from odin_nerfstudio.data.loader import ViewLoader
from odin_nerfstudio.data.manager import CaptureManager
from odin_nerfstudio.data.upload import DeviceViews
from odin_nerfstudio.draws import keyed_generator
from odin_nerfstudio.plan.capture import Capture
from odin_nerfstudio.plan.plan import Plan
from odin_nerfstudio.plan.schedule import Group, ScheduleConfig

GIB = 1 << 30
KEPT_CAMERAS = 4096
"""The most cameras of training views that are kept one by one."""
KEPT_GROUPS = 64
"""More than are read ahead."""
Batch = dict[str, Any]


@dataclass
class OdinDataManagerConfig(FullImageDatamanagerConfig):
    """Configuration of :class:`OdinDataManager`."""

    _target: type = field(default_factory=lambda: OdinDataManager)
    dataparser: AnnotatedDataParserUnion = field(
        default_factory=lambda: NerfstudioDataParserConfig(load_3D_points=True)
    )
    """What kind of capture this is."""
    batch_per_rank: int = 1
    """Views that each rank renders in one step."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """In which order views are trained on."""
    cache_gib: float = 4.0
    """Memory for decoded training images, in GiB. What does not fit is read again from disk, ahead of its turn."""
    gpu_cache_gib: float = 1.0
    """Memory of the GPU for training images, in GiB. What does not fit is copied there again, ahead of its turn."""
    prefetch_groups: int = 3
    """Groups whose images are decoded, and copied to the GPU, ahead."""
    # What FullImageDatamanager decides by these, the schedule and the loader decide here.
    cache_images: Annotated[Literal["cpu", "gpu"], tyro.conf.Suppress] = "cpu"
    cache_images_type: Annotated[Literal["uint8", "float32"], tyro.conf.Suppress] = "uint8"
    max_thread_workers: Annotated[int | None, tyro.conf.Suppress] = None
    train_cameras_sampling_strategy: Annotated[Literal["random", "fps"], tyro.conf.Suppress] = "random"
    train_cameras_sampling_seed: Annotated[int, tyro.conf.Suppress] = 42
    fps_reset_every: Annotated[int, tyro.conf.Suppress] = 100


class OdinDataManager(CaptureManager, FullImageDatamanager[UndistortedDataset]):
    """Yields the groups of the plan (design §2) as decoded views on this rank's device.

    Raises:
        UserError: when the capture is missing, empty or malformed.
    """

    config: OdinDataManagerConfig
    rank: int = 0
    """This process among ``world_size``; set by the pipeline."""

    @property
    def group_size(self) -> int:
        """Views of one optimizer step."""
        return self.config.batch_per_rank * self.world_size

    def prepare_training(self) -> None:
        """Plans the schedule and decodes what fits in memory; whatever is wrong with either shows here.

        Raises:
            UserError: a group needs more views than there are, or an image cannot be decoded.
        """
        self.plan.schedule.group(0)
        self.train_views.fill("Decoding training images")

    @cached_property
    def plan(self) -> Plan:
        """The plan of the training views. Evaluation needs none."""
        dataset = self.train_dataset
        points = dataset.metadata.get("points3D_xyz")
        capture = Capture(
            name=self.get_datapath().name,
            image_names=[str(path) for path in dataset.image_filenames],
            cameras=plan_cameras(dataset.cameras),
            points=None if points is None else points.cpu().numpy(),
            colmap_dir=self.colmap_model(),
        )
        plan = Plan.build(capture, self.world_size, self.config.batch_per_rank, self.config.schedule)
        CONSOLE.log(f"Plan: {plan.visibility.reason}")
        return plan

    @cached_property
    def train_views(self) -> ViewLoader | DeviceViews:
        """Training views, decoded and, if they are used on a GPU, copied there ahead of their turn."""
        views, device = ViewLoader(self.train_dataset, int(self.config.cache_gib * GIB)), torch.device(self.device)
        if device.type != "cuda":
            return views
        return DeviceViews(views, device, int(self.config.gpu_cache_gib * GIB))

    @cached_property
    def eval_views(self) -> ViewLoader:
        """Evaluation views, decoded when they are asked for."""
        return ViewLoader(self.eval_dataset, int(self.config.cache_gib * GIB))

    def group(self, step: int) -> Group:
        """The group of a step, after the plan."""
        return self._group(step)

    def next_group(self, step: int) -> list[tuple[Cameras, Batch]]:
        """This rank's views of the group of ``step``.

        Returns:
            ``batch_per_rank`` pairs of a camera of shape (1,) on the CPU, whose metadata holds ``cam_idx``, and its
            ``image`` ((H, W, C) uint8) and ``mask`` on this rank's device.
        """
        views = self._views_of(step)
        for ahead in range(self.config.prefetch_groups + 1):
            self.train_views.prefetch(self._views_of(step + ahead))
        return [(self.train_camera(view), self._on_device(self.train_views, view)) for view in views]

    def train_camera(self, view: int) -> Cameras:
        """The camera of a training view: shape (1,), on the CPU, its index in ``metadata["cam_idx"]``. Not to be
        changed: the next one to ask gets the same."""
        return self._train_camera(view)

    def next_train(self, step: int) -> tuple[Cameras, Batch]:
        """The first view of the group; nerfstudio's interface knows no groups."""
        return self.next_group(step)[0]

    def next_eval_image(self, step: int) -> tuple[Cameras, Batch]:
        """One evaluation view, drawn for this step."""
        generator = keyed_generator(self.seed, "eval", step)
        view = int(torch.randint(len(self.eval_dataset), (), generator=generator))
        return self.eval_view(view)

    @property
    def fixed_indices_eval_dataloader(self) -> EvalViews:
        """Every evaluation view in order, decoded one ahead."""
        return EvalViews(self)

    def get_train_rays_per_batch(self) -> int:
        """Pixels of an average group on this rank."""
        cameras = self.train_dataset.cameras
        return int((cameras.width * cameras.height).float().mean() * self.config.batch_per_rank)

    @cached_property
    def _train_camera(self) -> Callable[[int], Cameras]:
        # To take a camera out of nerfstudio's costs a quarter of a millisecond, and a step asks twice.
        return lru_cache(KEPT_CAMERAS)(partial(_indexed, self.train_dataset.cameras))

    @cached_property
    def _group(self) -> Callable[[int], Group]:
        # Asked for as often as there are groups to read ahead, by the planning of units and by reading them.
        return lru_cache(KEPT_GROUPS)(self.plan.schedule.group)

    def _views_of(self, step: int) -> list[int]:
        return self.group(step).of_rank(self.rank).tolist()

    def eval_view(self, index: int) -> tuple[Cameras, Batch]:
        """An evaluation view, its tensors on this rank's device."""
        return _indexed(self.eval_dataset.cameras, index), self._on_device(self.eval_views, index)

    def _on_device(self, views: ViewLoader | DeviceViews, index: int) -> Batch:
        batch = views.get(index)
        return {k: v.to(self.device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}


class EvalViews:
    """A sized iterable over the evaluation views that holds one in memory beyond the loader's budget."""

    def __init__(self, manager: OdinDataManager) -> None:
        self._manager = manager

    def __len__(self) -> int:
        return len(self._manager.eval_dataset)

    def __iter__(self) -> Iterator[tuple[Cameras, Batch]]:
        manager = self._manager
        for index in range(len(self)):
            manager.eval_views.prefetch(range(index + 1, min(index + 2, len(self))))
            yield manager.eval_view(index)


def _indexed(cameras: Cameras, index: int) -> Cameras:
    camera = cameras[index : index + 1]  # stays on the CPU: reading its size must not wait for a GPU
    camera.metadata = {**(camera.metadata or {}), "cam_idx": index}
    return camera
