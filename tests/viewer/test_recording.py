"""What is read off all ranks' timelines, the cheap way, against the timelines themselves."""

from __future__ import annotations

import pytest
from handmade import add_unit, handmade_recording


def test_units_around_one_are_enough_for_its_numbers() -> None:
    recording = handmade_recording(ranks=3, units=20)
    for step in recording.steps():
        unit = recording.unit(step)
        assert unit.hidden == pytest.approx(sum(each.hidden_fraction(step) for each in recording.timelines) / 3)
        assert unit.wait == [each.seconds("wait", step) for each in recording.timelines]
        assert (unit.scope, unit.bytes, unit.primitives) == (300, 6000 + 3 * step, [500, 501, 502])


def test_numbers_are_final_only_once_the_units_that_were_in_flight_are_known() -> None:
    recording = handmade_recording(units=6)
    assert recording.unit(5).hidden == pytest.approx(0.4)
    add_unit(recording, 6)
    assert recording.unit(5).hidden == pytest.approx(0.6)
    assert recording.unit(3) is recording.unit(3)  # not counted again


def test_an_excerpt_keeps_what_the_run_forgets() -> None:
    recording = handmade_recording(units=20)
    excerpt = recording.excerpt([10])
    hidden = recording.timelines[1].hidden(10)
    for step in range(20, 1100):
        add_unit(recording, step)
    assert not recording.timelines[1].hidden(10)
    assert excerpt.steps() == [8, 9, 10, 11, 12] and excerpt.timelines[1].hidden(10) == hidden
    assert excerpt.predicted_conflicts([10, 12])[1, 0] == 0.5


def test_a_plan_is_asked_once_for_a_pair() -> None:
    recording = handmade_recording(units=0)
    asked: list[tuple[int, int]] = []
    recording = type(recording)(recording.timelines, lambda *pair: asked.append(pair) or 0.0)
    recording.predicted_conflicts([1, 2, 3])
    recording.predicted_conflicts([2, 3, 4])
    assert sorted(asked) == [(2, 1), (3, 1), (3, 2), (4, 2), (4, 3)]
