"""Small runs and scenes of ``nerfxl``."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from nerfstudio.cameras.rays import RayBundle
from nerfstudio.data.dataparsers.colmap_dataparser import ColmapDataParserConfig

from odin_nerfstudio.methods import nerfxl
from odin_nerfstudio.nerfxl.model import NerfXLModel, NerfXLModelConfig
from odin_nerfstudio.nerfxl.scene import Scene
from odin_nerfstudio.nerfxl.trainer import NerfXLTrainerConfig

SMALL: dict[str, Any] = {
    "samples_per_ray": 32,
    "log2_table_size": 10,
    "levels": 4,
    "max_resolution": 64,
    "hidden_dim": 16,
    "occupancy_resolution": 8,
    "occupancy_warmup_steps": 4,
    "near_warmup_steps": 4,
}


def make_config(capture: Path, output_dir: Path, tiles: int | None = None, **changes: Any) -> NerfXLTrainerConfig:
    """A run of steps that take milliseconds."""
    config = copy.deepcopy(nerfxl.config)
    assert isinstance(config, NerfXLTrainerConfig)
    config.pipeline.datamanager.data = capture
    config.pipeline.datamanager.dataparser = ColmapDataParserConfig(colmap_path=Path("sparse/0"), downscale_factor=1)
    config.pipeline.datamanager.train_num_rays_per_batch = 64
    for name, value in {**SMALL, "tiles": tiles}.items():
        setattr(config.pipeline.model, name, value)
    config.output_dir, config.experiment_name, config.timestamp = output_dir, "demo", "run"
    config.vis = "tensorboard"
    config.viewer.quit_on_train_completion = True
    config.machine.device_type = "cpu"
    config.steps_per_save, config.save_only_latest_checkpoint = 1000, False
    config.logging.local_writer.enable = False
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def make_scene(points: int = 100, seed: int = 0) -> Scene:
    """Cameras on a circle around a cloud of points at the origin."""
    angle = torch.arange(6) * torch.pi / 3
    centres = 3 * torch.stack([angle.cos(), angle.sin(), torch.zeros(6)], dim=1)
    seeds = torch.randn(points, 3, generator=torch.Generator().manual_seed(seed))
    return Scene("demo", "hash", centres, near=0.5, unit=3.0, far=20.0, seeds=seeds)


def make_model(scene: Scene, **changes: Any) -> NerfXLModel:
    """A model of four training images; rays begin at the scene's near from the first step on."""
    config = NerfXLModelConfig(**{**SMALL, "near_warmup_steps": 0, **changes})
    return config.setup(scene_box=None, num_train_data=4, metadata={"scene": scene}, device="cpu")


def make_rays(count: int = 50, seed: int = 0) -> RayBundle:
    """Rays from one place in all directions, of training images."""
    generator = torch.Generator().manual_seed(seed)
    directions = torch.nn.functional.normalize(torch.randn(count, 3, generator=generator), dim=1)
    ids = torch.randint(4, (count, 1), generator=generator)
    origins = torch.tensor([[3.0, 0.2, 0.1]]).expand(count, 3)
    return RayBundle(origins, directions, pixel_area=torch.ones(count, 1), camera_indices=ids)
