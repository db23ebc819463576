from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from handmade import handmade_recording

from odin_nerfstudio.viewer.trace import write_trace


def odin_report(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "odin_nerfstudio.cli.report", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    run_dir = tmp_path / "outputs/fox/odin-splatfacto/today"
    write_trace(handmade_recording(), run_dir / "odin_trace.json")
    (run_dir / "config.yml").touch()
    return run_dir


def test_writes_the_report_beside_the_trace(run_dir: Path, tmp_path: Path) -> None:
    done = odin_report("outputs/fox/odin-splatfacto/today", cwd=tmp_path)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert done.stdout == "wrote outputs/fox/odin-splatfacto/today/odin_report.html\n"
    text = (run_dir / "odin_report.html").read_text(encoding="utf-8")
    assert "<h1>fox/odin-splatfacto/today</h1>" in text and "2 ranks, 6 recorded units" in text


def test_writes_it_elsewhere(run_dir: Path, tmp_path: Path) -> None:
    done = odin_report(".", "--output", tmp_path / "new/page.html", cwd=run_dir)
    assert done.returncode == 0, done.stderr
    assert "<h1>fox/odin-splatfacto/today</h1>" in (tmp_path / "new/page.html").read_text(encoding="utf-8")
    assert not (run_dir / "odin_report.html").exists()


def cut_off(run_dir: Path) -> None:
    trace = run_dir / "odin_trace.json"
    trace.write_bytes(trace.read_bytes()[:-1000])


@pytest.mark.parametrize(
    ("spoil", "arguments", "said"),
    [
        (shutil.rmtree, [], "today: there is no such folder"),
        (
            lambda run_dir: (run_dir / "odin_trace.json").unlink(),
            [],
            "odin_trace.json: there is no such file. Give the",
        ),
        (cut_off, [], "odin_trace.json: is cut off"),
        (
            lambda run_dir: write_trace(handmade_recording(units=0), run_dir / "odin_trace.json"),
            [],
            "no unit was recorded",
        ),
        (lambda run_dir: None, ["--output", "config.yml/page.html"], "config.yml/page.html: cannot be written"),
    ],
)
def test_bad_input_gets_one_sentence_and_no_report(run_dir: Path, tmp_path: Path, spoil, arguments, said: str) -> None:
    spoil(run_dir)
    cwd = run_dir if run_dir.is_dir() else tmp_path
    done = odin_report(run_dir, *arguments, cwd=cwd)
    assert done.returncode != 0 and done.stdout == ""
    assert done.stderr.startswith("error: ") and said in done.stderr and done.stderr.count("\n") == 1
    assert not list(tmp_path.rglob("*.html"))
