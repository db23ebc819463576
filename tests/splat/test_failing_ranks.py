"""What one of several ranks cannot write: the others neither hang nor lose what was saved before."""

from __future__ import annotations

import io
import resource
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks
from training import make_config, run

from odin_nerfstudio.comm.checkpoint import checkpoint_path, checkpoint_steps, read_checkpoint, write_checkpoint
from odin_nerfstudio.comm.world import World
from odin_nerfstudio.runs import trainer


def train(world: World, capture: Path, output: Path, failing: list[int], how: str) -> tuple[str, str]:
    """One rank of a run of six steps that saves every two; what it printed, and the sentence with which it ended."""

    def write(path: Path, state: dict[str, Any]) -> None:
        if state["step"] not in failing:
            write_checkpoint(path, state)
        elif how == "full disk":
            limit = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limit[1]))
            try:
                write_checkpoint(path, state)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        else:
            moved = path.parent.rename(path.parent.with_name("moved"))
            path.parent.touch()
            try:
                write_checkpoint(path, state)
            finally:
                path.parent.unlink()
                moved.rename(path.parent)

    trainer.write_checkpoint = write
    config = make_config(capture, output, max_num_iterations=6, steps_per_save=2, save_only_latest_checkpoint=True)
    printed = io.StringIO()
    with redirect_stdout(printed):
        try:
            run(config, world)
        except SystemExit as ending:
            return printed.getvalue(), str(ending.code)
    return printed.getvalue(), ""


@pytest.mark.parametrize(("failing", "how", "saved"), [([4], "no folder", 5), ([4, 5], "full disk", 2)])
def test_a_save_that_fails(demo_capture: Path, tmp_path: Path, failing: list[int], how: str, saved: int) -> None:
    reports = run_ranks(2, train, demo_capture, tmp_path, failing, how, timeout=300)
    printed = "".join(reports[0][0].split())
    assert "step-000000004.ckpt:couldnotbewritten" in printed and "Earliercheckpointswerekept." in printed
    for _, sentence in reports:
        assert (sentence == "") == (5 not in failing)
        assert 5 not in failing or "step-000000005.ckpt: could not be written" in sentence
    folder = tmp_path / "demo" / "odin-splatfacto" / "run" / "nerfstudio_models"
    assert checkpoint_steps(folder) == [saved] and len(list(folder.iterdir())) == 1
    assert read_checkpoint(checkpoint_path(folder))["step"] == saved
