"""The curves over the units against the numbers of each unit."""

from __future__ import annotations

from itertools import pairwise

import pytest
from handmade import handmade_recording

from odin_nerfstudio.viewer.shares_plot import load_figure, shares_figure
from odin_nerfstudio.viewer.style import WIDTH


def test_parts_of_a_scope_add_up() -> None:
    figure = shares_figure(handmade_recording(), [1, 2, 3])
    parts = {trace.name: list(trace.y) for trace in figure.data if trace.stackgroup}
    expected = {"early": 0.7, "late": 0.15, "fallback": 0.1, "delayed": 0.05}
    assert parts == {name: pytest.approx([share] * 3) for name, share in expected.items()}
    assert all(list(trace.x) == [1, 2, 3] for trace in figure.data)


def test_hidden_fraction_and_wait() -> None:
    figure = shares_figure(handmade_recording(units=6), [3, 4, 5])
    curves = {trace.name: list(trace.y) for trace in figure.data if not trace.stackgroup}
    assert curves == {
        "hidden": pytest.approx([0.6, 0.6, 0.4]),  # nothing follows the last one that could hide its end
        "rank 0": pytest.approx([0.5] * 3),
        "rank 1": pytest.approx([1.0] * 3),
    }


def test_load_is_that_of_each_rank() -> None:
    sent, *lines = load_figure(handmade_recording(), [2, 3]).data
    assert list(sent.y) == [3000 + 2 * 2, 3000 + 2 * 3]
    assert [(line.name, line.yaxis, *line.y) for line in lines] == [
        ("rank 0", "y2", 500, 500),
        ("rank 1", "y2", 501, 501),
        ("rank 0", "y3", 10**6, 10**6),
        ("rank 1", "y3", 2 * 10**6, 2 * 10**6),
    ]


def test_an_empty_scope_has_no_parts() -> None:
    recording = handmade_recording(ranks=1, units=0)
    recording.timelines[0].count(0, scope=0, bytes=0)
    assert [list(trace.y) for trace in shares_figure(recording, [0]).data if trace.stackgroup] == [[0]] * 4


def test_figures_are_made_for_the_panel() -> None:
    for figure in (shares_figure(handmade_recording(), [0, 1]), load_figure(handmade_recording(), [0, 1])):
        assert figure.layout.width == WIDTH
        domains = [figure.layout[axis].domain for axis in ("yaxis3", "yaxis2", "yaxis")]
        assert all(below[1] < above[0] for below, above in pairwise(domains))
