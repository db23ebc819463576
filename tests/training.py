"""Short runs in this process, and what they are compared by."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from nerfstudio.data.dataparsers.colmap_dataparser import ColmapDataParserConfig
from nerfstudio.scripts.train import train_loop

from odin_nerfstudio.comm.checkpoint import checkpoint_path, read_checkpoint
from odin_nerfstudio.comm.device_exchange import DeviceExchange
from odin_nerfstudio.comm.world import World
from odin_nerfstudio.methods import odin_splatfacto
from odin_nerfstudio.splat.fused import FusedSparseExchange, FusedSplatExchange
from odin_nerfstudio.splat.runner import UnitRunner
from odin_nerfstudio.splat.trainer import OdinTrainerConfig
from odin_nerfstudio.splat.unit import UnitExchange
from odin_nerfstudio.viewer.heatmap import History


def make_config(capture: Path, output_dir: Path, **changes: Any) -> OdinTrainerConfig:
    """A run of a few steps that densifies on the way and saves every ten."""
    config = copy.deepcopy(odin_splatfacto.config)
    assert isinstance(config, OdinTrainerConfig)
    config.pipeline.datamanager.data = capture
    config.pipeline.datamanager.dataparser = ColmapDataParserConfig(colmap_path=Path("sparse/0"), downscale_factor=1)
    config.pipeline.model.num_downscales = 0
    config.pipeline.model.warmup_length = 6
    config.pipeline.model.refine_every = 4
    config.pipeline.model.reset_alpha_every = 4
    config.pipeline.model.pause_after_reset = 2
    config.pipeline.model.sh_degree_interval = 8
    config.output_dir, config.experiment_name, config.timestamp = output_dir, "demo", "run"
    config.vis = "tensorboard"
    config.viewer.quit_on_train_completion = True
    config.machine.device_type = "cpu"
    config.steps_per_save, config.save_only_latest_checkpoint = 10, False
    config.logging.local_writer.enable = False
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def between_gpus() -> None:
    """From here on runs of this process exchange as GPUs do, with the kernels' twins."""

    def make(runner: UnitRunner, replicated: bool, link: Any) -> UnitExchange:
        timeline = runner.timeline
        moved = DeviceExchange(runner._world, runner._record_marked, timeline.records, timeline.stopwatch)
        return (FusedSparseExchange if replicated else FusedSplatExchange)(runner._model, moved, timeline)

    UnitRunner._make_exchange = make  # type: ignore[method-assign]


def run(config: OdinTrainerConfig, world: World | None = None) -> Path:
    """Trains, as one of ``world``'s ranks, and returns the folder of checkpoints."""
    world = world or World.current()
    train_loop(world.rank, world.size, config, world.rank)
    return config.get_base_dir() / config.relative_model_dir  # the last one may still be on its way there


def learned(folder: Path) -> dict[str, Any]:
    """The last checkpoint, without what was recorded on the way: that depends on who ran with whom."""
    checkpoint = read_checkpoint(checkpoint_path(folder))
    recorded = f"_model.{History.PREFIX}"
    kept = {name: value for name, value in checkpoint["pipeline"].items() if not name.startswith(recorded)}
    return {**checkpoint, "pipeline": kept}


def assert_equal(a: Any, b: Any, where: str = "") -> None:
    """Equal to the last bit, at any depth."""
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_equal(a[key], b[key], f"{where}/{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_equal(x, y, f"{where}[{i}]")
    else:
        assert a == b, where
