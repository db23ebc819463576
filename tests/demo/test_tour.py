"""The tour's handling of the commands it runs; the tour itself is what ``make demo`` is for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from odin_nerfstudio.demo.__main__ import _step, _tool
from odin_nerfstudio.errors import UserError

PYTHON = Path(sys.executable).name


def test_output_goes_to_the_log(tmp_path: Path) -> None:
    _step("Counting", [PYTHON, "-c", "print('half (50.00%)'); print('all (100.00%)')"], tmp_path / "count.log")
    assert (tmp_path / "count.log").read_text() == "half (50.00%)\nall (100.00%)\n"


def test_the_first_failure_stops_with_its_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "bad.log"
    with pytest.raises(UserError, match=rf"{PYTHON} stopped with status 3; see {log}"):
        _step("Failing", [PYTHON, "-c", "print('the reason'); raise SystemExit(3)"], log)
    assert "the reason" in log.read_text()


@pytest.mark.parametrize("name", ["ns-train", "ns-eval", "ns-render", "ns-export", "ns-viewer", "odin-plan"])
def test_the_tools_are_those_of_this_environment(name: str) -> None:
    assert Path(_tool(name)).is_file()
