"""The launcher with real processes: who prints, who is named, and that nobody is left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from odin_nerfstudio.comm.launch import Layout
from odin_nerfstudio.errors import UserError


def start(name: str, layout: Layout, *args: object) -> subprocess.Popen[str]:
    """Launches a function of ``launch_targets``."""
    here = Path(__file__).parent
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    environment["PYTHONPATH"] = f"{here}:{here.parents[1]}"
    command = [sys.executable, "-m", "launch_targets", name, json.dumps(asdict(layout)), *map(str, args)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_all_ranks_are_called_and_one_prints(tmp_path: Path) -> None:
    out, err = (process := start("report", Layout(2), tmp_path, "hello")).communicate(timeout=60)
    assert process.returncode == 0, err
    assert out == "rank 0 of 2 prints hello\n"
    assert err == "rank 0 warns\n"
    cores = len(os.sched_getaffinity(0))
    reports = [(tmp_path / f"rank-{rank}").read_text().split() for rank in range(2)]
    assert [report[:4] for report in reports] == [["hello", str(r), "cpu", str(max(1, cores // 2))] for r in range(2)]
    assert reports[0][4] == reports[1][4]


def test_two_nodes(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    nodes = [start("report", Layout(1, 2, node, endpoint), tmp_path, "hello") for node in range(2)]
    outputs = [node.communicate(timeout=60) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    assert outputs == [("rank 0 of 2 prints hello\n", "rank 0 warns\n"), ("", "")]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["rank-0", "rank-1"]


def test_one_rank_needs_no_process_group(tmp_path: Path) -> None:
    out, err = (process := start("report", Layout(), tmp_path, "hello")).communicate(timeout=60)
    assert process.returncode == 0, err
    assert out == "rank 0 of 1 prints hello\n"


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("killed", "rank 1 was killed by SIGKILL. The kernel does that when memory runs out."),
        ("aborted", "rank 1 ended with status 3: about to fail"),
        ("mistake", "rank 1: --data nowhere: does not exist."),
        ("raised", "rank 1 ended with status 1: ValueError: no such thing"),
    ],
)
def test_a_failed_rank_ends_all_and_is_named(how: str, sentence: str, tmp_path: Path) -> None:
    started = time.monotonic()
    out, err = (process := start("fail", Layout(2), tmp_path, how)).communicate(timeout=60)
    assert time.monotonic() - started < 60
    assert process.returncode == 1 and out == ""
    assert err.splitlines()[-1] == f"error: {sentence}"
    assert ("Traceback" in err) == (how == "raised")
    pids = [int(file.read_text()) for file in tmp_path.glob("pid-*")]
    assert len(pids) == 2 and not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_ctrl_c_lets_every_rank_save(tmp_path: Path) -> None:
    process = start("train", Layout(2), tmp_path)
    deadline = time.monotonic() + 50
    while len(list(tmp_path.glob("started-*"))) < 2:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30) == ("", "interrupted on all ranks.\n")
    assert process.returncode == 128 + signal.SIGINT
    assert len(list(tmp_path.glob("saved-*"))) == 2
    assert not any(Path(f"/proc/{file.read_text()}").exists() for file in tmp_path.glob("started-*"))


@pytest.mark.parametrize("late", [False, True])
def test_ctrl_c_that_reaches_a_rank_only_blames_nobody(tmp_path: Path, late: bool) -> None:
    process = start("interrupt", Layout(2), tmp_path, "late" if late else "early")
    assert process.communicate(timeout=60) == ("", "interrupted on all ranks.\n")
    assert process.returncode == 128 + signal.SIGINT


@pytest.mark.parametrize(
    ("layout", "sentence"),
    [
        (Layout(0), "--nproc-per-node 0: at least one process"),
        (Layout(1, 2, 2, "host:1"), "--node-rank 2: with --nnodes 2 it must be 0 … 1"),
        (Layout(1, 2, 0), "--nnodes 2 needs --rdzv-endpoint HOST:PORT"),
        (Layout(1, 2, 0, "host"), "--nnodes 2 needs --rdzv-endpoint HOST:PORT"),
        (Layout(64, device_type="cuda"), "--nproc-per-node 64: torch sees"),
    ],
)
def test_impossible_layouts(layout: Layout, sentence: str) -> None:
    with pytest.raises(UserError, match=re.escape(sentence)):
        layout.check()
