"""A run that was interrupted and resumed ends as one that was not."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from nerfstudio.data.dataparsers.colmap_dataparser import ColmapDataParserConfig
from nerfstudio.scripts.train import train_loop

from odin_nerfstudio.comm.checkpoint import checkpoint_path, read_checkpoint
from odin_nerfstudio.methods import odin_splatfacto
from odin_nerfstudio.splat.trainer import OdinTrainerConfig


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


def run(config: OdinTrainerConfig) -> Path:
    """Trains and returns the folder of checkpoints."""
    train_loop(0, 1, config)
    return config.get_checkpoint_dir()


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


@pytest.mark.parametrize("batch", [1, 3])
def test_resumed_run_equals_an_unbroken_one(demo_capture: Path, tmp_path: Path, batch: int) -> None:
    """Parameters, moments, schedulers and statistics; over densifications and an opacity reset."""

    def config(name: str, **changes: Any) -> OdinTrainerConfig:
        made = make_config(demo_capture, tmp_path / name, **changes)
        made.pipeline.datamanager.batch_per_rank = batch
        return made

    whole = run(config("whole", max_num_iterations=31))
    first = run(config("first", max_num_iterations=11))
    assert checkpoint_path(first).name == "step-000000010.ckpt"
    second = run(config("second", max_num_iterations=20, load_dir=first))
    unbroken, resumed = read_checkpoint(checkpoint_path(whole)), read_checkpoint(checkpoint_path(second))
    assert unbroken["step"] == resumed["step"] == 30
    count = len(read_checkpoint(checkpoint_path(first))["pipeline"]["_model.gauss_params.means"])
    assert len(unbroken["pipeline"]["_model.gauss_params.means"]) != count  # rows changed after the resume
    assert_equal(unbroken, resumed)
    ids, next_id = unbroken["ids"]["ids"], unbroken["ids"]["next_id"]
    assert (ids.diff() > 0).all() and count < ids[-1] < next_id
    assert "_model.ids" not in unbroken["pipeline"]  # which stays splatfacto's


def test_interruption_saves_what_was_learned(
    demo_capture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from odin_nerfstudio.splat.datamanager import OdinDataManager

    original = OdinDataManager.next_group

    def interrupted(self: OdinDataManager, step: int) -> Any:
        if step == 7:
            raise KeyboardInterrupt
        return original(self, step)

    monkeypatch.setattr(OdinDataManager, "next_group", interrupted)
    config = make_config(demo_capture, tmp_path, max_num_iterations=20)
    with pytest.raises(KeyboardInterrupt):
        run(config)
    assert read_checkpoint(checkpoint_path(config.get_checkpoint_dir()))["step"] == 6
