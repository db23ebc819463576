"""odin-train on several ranks as a user runs it: training, tools, resuming, a dead rank, Ctrl-C, mistakes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from plyfile import PlyData
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from odin_nerfstudio.comm.checkpoint import checkpoint_path, read_checkpoint

BIN = Path(sys.executable).parent
LAST_STEP = 29


def command(capture: Path, output: Path, *flags: object) -> list[str]:
    """A run of the demo capture that densifies on the way; its folder is ``folder(output)``."""
    model = "--pipeline.model.num-downscales 0 --pipeline.model.warmup-length 10 --pipeline.model.refine-every 10"
    fixed = "--vis tensorboard --machine.device-type cpu --timestamp run --experiment-name demo"
    line = [BIN / "odin-train", "odin-splatfacto", *f"{fixed} {model}".split(), "--output-dir", output, *flags]
    parser = ["colmap", "--data", capture, "--colmap-path", "sparse/0", "--downscale-factor", "1"]
    return [str(word) for word in [*line, *parser]]


def folder(output: Path) -> Path:
    return output / "demo" / "odin-splatfacto" / "run"


@contextmanager
def started(line: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The command in a process group of its own, so that nothing of it outlives the test."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            line, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            for pid in [*ranks_of(process), process.pid]:
                os.kill(pid, signal.SIGKILL)
            process.wait(30)


def finish(line: list[str], log: Path) -> tuple[int, str]:
    """Exit status and output."""
    with started(line, log) as process:
        status = process.wait(300)
    return status, log.read_text(errors="replace")


def ranks_of(launcher: subprocess.Popen[bytes]) -> list[int]:
    """Process ids of the ranks, in their order."""
    ranks = {}
    for pid in Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split():
        environment = dict(
            entry.split(b"=", 1) for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") if b"=" in entry
        )
        if b"LOCAL_RANK" in environment:
            ranks[int(environment[b"LOCAL_RANK"])] = int(pid)
    return [ranks[rank] for rank in sorted(ranks)]


def wait_for(condition: Callable[[], object], process: subprocess.Popen[bytes]) -> None:
    for _ in range(2400):
        if condition():
            return
        assert process.poll() is None
        time.sleep(0.1)
    raise AssertionError("nothing happened for 4 minutes")


@pytest.fixture(scope="module")
def trained(demo_capture: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks; its folder."""
    output = tmp_path_factory.mktemp("trained")
    flags = ("--nproc-per-node", 2, "--max-num-iterations", LAST_STEP + 1, "--steps-per-eval-all-images", LAST_STEP)
    status, text = finish(command(demo_capture, output, *flags), output / "log")
    assert status == 0, text[-3000:]
    assert text.count("Plan: COLMAP tracks") == 1  # only rank 0 prints
    return folder(output)


def last_evaluation(run: Path) -> float:
    """PSNR over all evaluation images when the run looked last."""
    events = EventAccumulator(str(run))
    events.Reload()
    return events.Scalars("Eval Images Metrics Dict (all images)/psnr")[-1].value


def test_tools_read_the_checkpoint_of_several_ranks(trained: Path, tmp_path: Path) -> None:
    config = trained / "config.yml"
    for line in (
        ["ns-eval", "--load-config", config, "--output-path", tmp_path / "eval.json"],
        ["ns-export", "gaussian-splat", "--load-config", config, "--output-dir", tmp_path],
    ):
        status, text = finish([str(BIN / str(line[0])), *map(str, line[1:])], tmp_path / "log")
        assert status == 0, text[-3000:]
    psnr = json.loads((tmp_path / "eval.json").read_text())["results"]["psnr"]
    assert psnr > 12
    assert psnr == pytest.approx(last_evaluation(trained), abs=1e-3)  # shared out over two ranks, at the last step
    means = read_checkpoint(checkpoint_path(trained / "nerfstudio_models"))["pipeline"]["_model.gauss_params.means"]
    assert 0 < PlyData.read(tmp_path / "splat.ply")["vertex"].count <= len(means)


def test_a_killed_rank_ends_the_run_it_resumed(trained: Path, demo_capture: Path, tmp_path: Path) -> None:
    """Three ranks resume what two have saved."""
    flags = ("--nproc-per-node", 3, "--load-dir", trained / "nerfstudio_models", "--steps-per-save", 5)
    checkpoints = folder(tmp_path) / "nerfstudio_models"
    with started(command(demo_capture, tmp_path, *flags), tmp_path / "log") as process:
        wait_for(lambda: list(checkpoints.glob("*.ckpt")), process)
        ranks = ranks_of(process)
        os.kill(ranks[1], signal.SIGKILL)
        assert process.wait(60) == 1
        assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    text = (tmp_path / "log").read_text(errors="replace")
    assert f"Resuming after step {LAST_STEP}." in text
    assert text.splitlines()[-1].startswith("error: rank 1 was killed by SIGKILL.")
    assert read_checkpoint(checkpoint_path(checkpoints))["step"] > LAST_STEP


def test_ctrl_c_saves_and_ends_all_ranks(demo_capture: Path, tmp_path: Path) -> None:
    checkpoints = folder(tmp_path) / "nerfstudio_models"
    flags = ("--nproc-per-node", 2, "--steps-per-save", 1000)
    with started(command(demo_capture, tmp_path, *flags), tmp_path / "log") as process:
        wait_for(lambda: "10 (0." in (tmp_path / "log").read_text(errors="replace"), process)
        ranks = ranks_of(process)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    text = (tmp_path / "log").read_text(errors="replace")
    assert text.count("Stopping: saving step") == 1 and "Traceback" not in text
    assert text.splitlines()[-1] == "interrupted on all ranks."
    assert read_checkpoint(checkpoint_path(checkpoints))["step"] >= 9


def test_more_views_a_step_than_there_are(demo_capture: Path, tmp_path: Path) -> None:
    flags = ("--nproc-per-node", 2, "--pipeline.datamanager.batch-per-rank", 6)
    status, text = finish(command(demo_capture, tmp_path, *flags), tmp_path / "log")
    assert status == 1
    assert "needs 12 views per step, but the capture has 10 training views." in text.splitlines()[-1]
    assert "Traceback" not in text and not folder(tmp_path).exists()


def test_an_image_that_goes_bad_on_the_way(demo_capture: Path, tmp_path: Path) -> None:
    """One rank meets it while the other one works on another view."""
    capture = Path(shutil.copytree(demo_capture, tmp_path / "capture"))
    image = sorted((capture / "images").iterdir())[5]
    flags = ("--nproc-per-node", 2, "--steps-per-save", 5, "--pipeline.datamanager.cache-gib", 0)
    checkpoints = folder(tmp_path) / "nerfstudio_models"
    with started(command(capture, tmp_path, *flags), tmp_path / "log") as process:
        wait_for(lambda: list(checkpoints.glob("*.ckpt")), process)
        image.write_bytes(image.read_bytes()[:1000])
        ranks = ranks_of(process)
        assert process.wait(120) == 1
        assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    last = (tmp_path / "log").read_text(errors="replace").splitlines()[-1]
    assert re.match(rf"error: rank [01]: .*{image.name}: cannot be decoded", last), last
    read_checkpoint(checkpoint_path(checkpoints))
