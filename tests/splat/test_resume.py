"""A run that was interrupted and resumed ends as one that was not."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from training import assert_equal, learned, make_config, run

from odin_nerfstudio.comm.checkpoint import checkpoint_path, checkpoint_steps, read_checkpoint, write_checkpoint
from odin_nerfstudio.runs import trainer
from odin_nerfstudio.splat.trainer import OdinTrainerConfig


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
    unbroken, resumed = learned(whole), learned(second)
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


@pytest.mark.parametrize(("steps", "saved"), [(20, [4]), (3, [2])])
def test_interruption_while_saving_keeps_what_is_saved(
    demo_capture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int, saved: list[int]
) -> None:
    """At a save on the way, and at the last one."""
    interruptions = iter([signal.SIGINT])

    def interrupted(path: Path, state: dict[str, Any]) -> None:
        for number in interruptions:
            signal.raise_signal(number)
        write_checkpoint(path, state)

    monkeypatch.setattr(trainer, "write_checkpoint", interrupted)
    config = make_config(demo_capture, tmp_path, max_num_iterations=steps, steps_per_save=4)
    with pytest.raises(KeyboardInterrupt):
        run(config)
    assert checkpoint_steps(config.get_checkpoint_dir()) == saved
    read_checkpoint(checkpoint_path(config.get_checkpoint_dir()))
