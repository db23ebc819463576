"""The timeline's bars against the spans that they show."""

from __future__ import annotations

import json

import pytest
from handmade import MS, START, add_unit, handmade_recording

from odin_nerfstudio.viewer.timeline_plot import HOVER, PLACES, timeline_figure

KINDS = {"compute": "compute", "communication": "communication", "exposed wait": "wait"}


@pytest.mark.parametrize("steps", [[0, 1, 2, 3, 4, 5], [2, 3]])
def test_bars_are_the_spans(steps: list[int]) -> None:
    recording = handmade_recording()
    traces = {trace.name: trace for trace in timeline_figure(recording, steps).data if trace.type == "bar"}
    begin = START + 10 * steps[0] * MS
    for name, kind in KINDS.items():
        shown = zip(traces[name].base, traces[name].x, traces[name].y, strict=True)
        expected = [
            ((span.begin - begin) / MS, (span.end - span.begin) / MS, rank + PLACES[kind])
            for rank, timeline in enumerate(recording.timelines)
            for step in steps
            for span in timeline.spans(step)
            if span.kind == kind
        ]
        assert sorted(shown) == [pytest.approx(bar) for bar in sorted(expected)]


def test_hidden_bars_are_what_computation_overlapped() -> None:
    recording = handmade_recording(units=6)
    figure = timeline_figure(recording, [2, 3])
    hidden = next(trace for trace in figure.data if trace.name == "hidden")
    assert sum(hidden.x) == pytest.approx(2 * 2 * 3)  # ranks × units × ms; unit 4, which is not shown, hides 1 ms
    for step in (2, 3):
        shown = [row[2] for row, y in zip(hidden.customdata, hidden.y, strict=True) if row[1] == step and y < 1]
        exact = [(end - begin) / MS for begin, end in recording.timelines[0].hidden(step)]
        assert shown == pytest.approx(exact)


def test_hovering_tells_counts_and_bytes() -> None:
    figure = timeline_figure(handmade_recording(), [1, 4])
    communication = next(trace for trace in figure.data if trace.name == "communication")
    rows = [list(row) for row in communication.customdata]
    assert rows[0] == ["early splats", 1, 5.0, 100, 70, 30, 5, 10, 1001]
    assert rows[-1] == ["early splats", 4, 5.0, 100, 70, 30, 5, 10, 2004]
    assert HOVER.count("customdata") == len(rows[0])


def test_few_traces_and_unit_numbers_that_fit() -> None:
    figure = timeline_figure(handmade_recording(ranks=4, units=30), range(30))
    assert len(figure.data) == 5
    (numbers,) = (trace for trace in figure.data if trace.type == "scatter")
    assert numbers.text[::4] == ("0", "5", "10", "15", "20", "25")  # on each of four ranks
    assert numbers.x[4] == pytest.approx(54)  # the middle of unit 5's computation
    assert json.loads(figure.to_json())["layout"]["yaxis"]["ticktext"] == ["rank 0", "rank 1", "rank 2", "rank 3"]


def test_units_in_flight_have_a_lane_each_where_there_is_one_rank() -> None:
    figure = timeline_figure(handmade_recording(ranks=1), [2, 3, 4])
    compute = next(trace for trace in figure.data if trace.name == "compute")
    assert [y - PLACES["compute"] for y in compute.y] == pytest.approx([0, 1, 0])


def test_nothing_recorded_is_said() -> None:
    assert timeline_figure(handmade_recording(units=0), []).layout.annotations[0].text == "no unit recorded yet"


def test_a_pause_is_cut_short_and_said() -> None:
    recording = handmade_recording(units=3)
    later = 3 + 9_000  # units of 10 ms: a pause of 90 s
    for step in (later, later + 1):
        add_unit(recording, step)
    figure = timeline_figure(recording, [1, 2, later, later + 1])
    compute = next(trace for trace in figure.data if trace.name == "compute")
    begins = sorted(set(compute.base))
    assert begins == pytest.approx([0, 10, 32, 42])  # unit 2 ends at 21 ms, and a usual unit takes 11 ms
    assert set(compute.x) == {8}
    _, note = figure.layout.annotations
    assert note.text == "90.0 s later" and 21 < note.x < 32
