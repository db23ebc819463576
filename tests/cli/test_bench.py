from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from odin_nerfstudio.cli.bench.rlg import synthetic_capture


def odin_bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "odin_nerfstudio.cli.bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_rlg_reports_its_figures() -> None:
    done = odin_bench("rlg", "--views", "900", "--tracks", "100")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["views"] == 900 and figures["seconds"] < 10 and figures["peak_gib"] < 8
    assert figures["tracks_per_view"] == pytest.approx(100, rel=0.02)
    assert figures["mean_track_length"] == pytest.approx(6, rel=0.02)


@pytest.mark.parametrize("structure", ["survey", "random"])
def test_synthetic_captures_have_the_wanted_size(structure) -> None:
    incidence = synthetic_capture(400, 60, 6, structure, seed=0)
    assert incidence.shape == (400, 4000)
    per_view, per_point = np.diff(incidence.indptr), np.bincount(incidence.indices)
    assert per_view.mean() == pytest.approx(60, rel=0.05) and per_point.mean() == pytest.approx(6, rel=0.05)
    assert per_view.min() > 20


def test_help_lists_the_benches_and_mistakes_get_a_sentence() -> None:
    assert "raster" in odin_bench().stdout and "rlg" in odin_bench("--help").stdout
    for arguments in (["nothing"], ["rlg", "--views", "0"]):
        done = odin_bench(*arguments)
        assert done.returncode != 0 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
