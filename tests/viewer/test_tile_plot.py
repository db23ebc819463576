"""Curves of tiles, against a recording made by hand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from odin_nerfstudio.shadow.timeline import Timeline
from odin_nerfstudio.viewer.recording import Recording
from odin_nerfstudio.viewer.report import write_report
from odin_nerfstudio.viewer.tile_plot import tile_figure, tile_samples


def make_recording() -> Recording:
    """Two ranks with three tiles; rank 1 waits for a fifth of its second step."""
    timelines = [Timeline(0), Timeline(1)]
    for step in range(2):
        timelines[0].count(step, **{"tile 0": 10 + step}, bytes=24, memory=5)
        timelines[1].count(step, **{"tile 1": 20, "tile 2": 30 * step}, bytes=48, memory=6)
        for timeline in timelines:
            timeline.add("compute", step, 1000 * step, 1000 * step + 80)
            timeline.finish(step)
    timelines[1].add("communication", 1, 1080, 1100)
    timelines[1].add("wait", 1, 1080, 1100)
    return Recording(timelines)


def test_curves_are_what_was_counted() -> None:
    recording = make_recording()
    assert recording.steps() == [0, 1]
    assert tile_samples(recording, [0, 1]) == {0: [10, 11], 1: [20, 20], 2: [0, 30]}
    curves = [(trace.name, list(trace.x), list(trace.y)) for trace in tile_figure(recording, [0, 1]).data]
    assert curves[:3] == [("tile 0", [0, 1], [10, 11]), ("tile 1", [0, 1], [20, 20]), ("tile 2", [0, 1], [0, 30])]
    assert [y for _, _, y in curves[3:5]] == [[0, 0], [0, pytest.approx(0.2)]]
    assert curves[5][2] == [72, 72] and [y for _, _, y in curves[6:]] == [[5, 5], [6, 6]]


def test_there_may_be_nothing_to_draw() -> None:
    assert not tile_figure(Recording([Timeline()]), []).data


def test_a_report_has_tiles_where_nobody_owns_primitives(tmp_path: Path) -> None:
    write_report(make_recording(), tmp_path / "report.html", "tiles")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<h2>Tiles</h2>" in page and "<h2>Timeline</h2>" in page
    assert not {"Ranks that meet", "early share", "primitives at the end"} & set(re.findall(r">([^<>]+)<", page))
