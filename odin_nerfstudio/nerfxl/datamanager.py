"""Rays of random pixels, the same on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, Literal

import torch
import tyro
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.cameras.rays import RayBundle
from nerfstudio.configs.dataparser_configs import AnnotatedDataParserUnion
from nerfstudio.data.datamanagers.base_datamanager import VanillaDataManager, VanillaDataManagerConfig
from nerfstudio.data.dataparsers.nerfstudio_dataparser import NerfstudioDataParserConfig
from nerfstudio.data.pixel_samplers import PixelSamplerConfig
from nerfstudio.model_components.ray_generators import RayGenerator
from torch import Tensor

from odin_nerfstudio.data.capture import plan_cameras
from odin_nerfstudio.data.dataset import UndistortedDataset
from odin_nerfstudio.data.manager import CaptureManager
from odin_nerfstudio.draws import keyed_generator
from odin_nerfstudio.nerfxl.pixels import KeyedPixelSampler, PixelStore
from odin_nerfstudio.nerfxl.scene import Scene

Batch = dict[str, Any]


@dataclass
class NerfXLDataManagerConfig(VanillaDataManagerConfig):
    """Configuration of :class:`NerfXLDataManager`."""

    _target: type = field(default_factory=lambda: NerfXLDataManager)
    dataparser: AnnotatedDataParserUnion = field(
        default_factory=lambda: NerfstudioDataParserConfig(load_3D_points=True)
    )
    """What kind of capture this is."""
    train_num_rays_per_batch: int = 4096
    """Rays of one step: all ranks take the same ones, whatever their number."""
    eval_num_rays_per_batch: int = 4096
    """Rays of an evaluation batch."""
    # VanillaDataManager collects images in batches of its own; here all pixels stay in memory, as bytes.
    train_num_images_to_sample_from: Annotated[int, tyro.conf.Suppress] = -1
    train_num_times_to_repeat_images: Annotated[int, tyro.conf.Suppress] = -1
    eval_num_images_to_sample_from: Annotated[int, tyro.conf.Suppress] = -1
    eval_num_times_to_repeat_images: Annotated[int, tyro.conf.Suppress] = -1
    patch_size: Annotated[int, tyro.conf.Suppress] = 1
    pixel_sampler: Annotated[PixelSamplerConfig, tyro.conf.Suppress] = field(default_factory=PixelSamplerConfig)
    images_on_gpu: bool = True
    """Whether the pixels lie beside the model, or else in main memory; 3 bytes each."""
    masks_on_gpu: Annotated[bool, tyro.conf.Suppress] = False


class NerfXLDataManager(CaptureManager, VanillaDataManager[UndistortedDataset]):
    """Draws pixels by seed and step alone, and reads a capture as ``odin-splatfacto`` does: undistorted, as bytes.

    Raises:
        UserError: when the capture is missing, empty or malformed.
    """

    config: NerfXLDataManagerConfig
    train_pixel_sampler: KeyedPixelSampler
    eval_pixel_sampler: KeyedPixelSampler

    def __init__(
        self,
        config: NerfXLDataManagerConfig,
        device: torch.device | str = "cpu",
        test_mode: Literal["test", "val", "inference"] = "val",
        world_size: int = 1,
        local_rank: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(config, device, test_mode, world_size, local_rank, **kwargs)
        data, dataset = self.get_datapath(), self.train_dataset
        points = dataset.metadata.get("points3D_xyz")
        dataset.metadata["scene"] = Scene.measure(
            (data if data.is_dir() else data.parent).resolve().name,
            dataset.image_filenames,
            plan_cameras(dataset.cameras),
            None if points is None else points.cpu().numpy(),
        )

    def create_train_dataset(self) -> UndistortedDataset:
        """The training images."""
        return _pinhole(super().create_train_dataset())

    def create_eval_dataset(self) -> UndistortedDataset:
        """The evaluation images."""
        return _pinhole(super().create_eval_dataset())

    def setup_train(self) -> None:
        """Nothing is decoded yet: most tools look at cameras only."""
        self.train_pixel_sampler = KeyedPixelSampler(self.config.train_num_rays_per_batch, "rays")

    def setup_eval(self) -> None:
        """As :meth:`setup_train`."""
        self.eval_pixel_sampler = KeyedPixelSampler(self.config.eval_num_rays_per_batch, "eval rays")

    def prepare_training(self) -> None:
        """Decodes the training images.

        Raises:
            UserError: when one cannot be decoded, or masks leave no pixel.
        """
        _ = self.train_pixels

    @cached_property
    def train_pixels(self) -> PixelStore:
        """All training pixels."""
        return PixelStore.read(self.train_dataset, self._pixel_device, "Decoding training images")

    @cached_property
    def eval_pixels(self) -> PixelStore:
        """All evaluation pixels, for the loss between evaluations."""
        return PixelStore.read(self.eval_dataset, self._pixel_device, "Decoding evaluation images")

    @cached_property
    def train_ray_generator(self) -> RayGenerator:
        """Rays of training pixels."""
        return RayGenerator(self.train_dataset.cameras.to(self.device)).to(self.device)

    @cached_property
    def eval_ray_generator(self) -> RayGenerator:
        """Rays of evaluation pixels."""
        return RayGenerator(self.eval_dataset.cameras.to(self.device)).to(self.device)

    def next_train(self, step: int) -> tuple[RayBundle, Batch]:
        """Rays of a step, and their pixels.

        Returns:
            A bundle of R rays; ``image`` (R, 3 or 4) float32 in [0, 1] and ``indices`` (R, 3) int64 image, row and
            column, all on this rank's device.
        """
        self.train_count += 1
        return self._rays(step, self.train_pixel_sampler, self.train_pixels, self.train_ray_generator)

    def next_eval(self, step: int) -> tuple[RayBundle, Batch]:
        """As :meth:`next_train`, of evaluation images."""
        self.eval_count += 1
        return self._rays(step, self.eval_pixel_sampler, self.eval_pixels, self.eval_ray_generator)

    def next_eval_image(self, step: int) -> tuple[Cameras, Batch]:
        """One evaluation view, drawn for this step."""
        generator = keyed_generator(self.seed, "eval", step)
        return self.eval_view(int(torch.randint(len(self.eval_dataset), (), generator=generator)))

    @property
    def fixed_indices_eval_dataloader(self) -> EvalImages:
        """Every evaluation view in order."""
        return EvalImages(self)

    def eval_view(self, index: int) -> tuple[Cameras, Batch]:
        """The camera of an evaluation view, of shape (1,), and its image (H, W, C), in [0, 1], on this device."""
        batch = {k: v.to(self.device) if isinstance(v, Tensor) else v for k, v in self.eval_dataset[index].items()}
        return self.eval_dataset.cameras[index : index + 1].to(self.device), batch

    def _rays(
        self, step: int, sampler: KeyedPixelSampler, pixels: PixelStore, generator: RayGenerator
    ) -> tuple[RayBundle, Batch]:
        indices, values = pixels.take(sampler.sample(self.seed, step, pixels.count))
        indices = indices.to(self.device)
        return generator(indices), {"image": values.to(self.device).float() / 255, "indices": indices}

    @property
    def _pixel_device(self) -> torch.device:
        return torch.device(self.device if self.config.images_on_gpu else "cpu")


class EvalImages:
    """A sized iterable over the evaluation views, decoded when it is their turn."""

    def __init__(self, manager: NerfXLDataManager) -> None:
        self._manager = manager

    def __len__(self) -> int:
        return len(self._manager.eval_dataset)

    def __iter__(self) -> Iterator[tuple[Cameras, Batch]]:
        return (self._manager.eval_view(index) for index in range(len(self)))


def _pinhole(dataset: UndistortedDataset) -> UndistortedDataset:
    """The dataset, its cameras without the distortion that its images have no more: rays would be bent by it."""
    dataset.cameras.distortion_params = None
    return dataset
