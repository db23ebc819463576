"""Spans, counters and what is derived from them, against moments counted one by one."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odin_nerfstudio.shadow.timeline import Kind, Timeline

spans = st.lists(
    st.tuples(
        st.sampled_from(["compute", "communication", "wait"]), st.integers(0, 3), st.integers(0, 40), st.integers(0, 12)
    ),
    max_size=15,
)


def moments(recorded: list[tuple[Kind, int, int, int]], kind: Kind, step: int | None = None) -> set[int]:
    return {
        moment
        for other, unit, begin, length in recorded
        if other == kind and step in (None, unit)
        for moment in range(begin, begin + length)
    }


@given(recorded=spans)
def test_times_are_those_of_the_moments(recorded: list[tuple[Kind, int, int, int]]) -> None:
    timeline = Timeline()
    for kind, step, begin, length in recorded:
        timeline.add(kind, step, begin, begin + length)
    for step in (None, 0, 1, 2, 3):
        for kind in ("compute", "communication", "wait"):
            assert timeline.seconds(kind, step) * 1e9 == pytest.approx(len(moments(recorded, kind, step)))
        communication = moments(recorded, "communication", step)
        hidden = communication & moments(recorded, "compute")
        expected = len(hidden) / len(communication) if communication else 1.0
        assert timeline.hidden_fraction(step) == pytest.approx(expected)
    steps = len({step for _, step, _, _ in recorded})
    assert timeline.exposed_wait() * 1e9 == pytest.approx(len(moments(recorded, "wait")) / max(1, steps))


@given(recorded=spans)
def test_what_was_hidden_are_moments_of_both(recorded: list[tuple[Kind, int, int, int]]) -> None:
    timeline = Timeline()
    for kind, step, begin, length in recorded:
        timeline.add(kind, step, begin, begin + length)
        timeline.hidden(step)  # what is kept for the next question must follow what is recorded after it
    for step in range(4):
        hidden = [moment for begin, end in timeline.hidden(step) for moment in range(begin, end)]
        assert hidden == sorted(moments(recorded, "communication", step) & moments(recorded, "compute"))


def test_hidden_follows_what_is_absorbed_and_forgotten() -> None:
    timeline, other = Timeline(steps=2), Timeline()
    other.add("compute", 0, 0, 10)
    timeline.add("communication", 1, 5, 15)
    assert timeline.hidden(1) == []
    timeline.absorb(other.take(before=1))
    assert timeline.hidden(1) == [(5, 10)]
    timeline.count(2, bytes=1)
    timeline.count(3, bytes=1)
    assert timeline.steps == [2, 3] and timeline.hidden(1) == []


def test_a_span_lasts_as_long_as_its_block_even_if_that_fails() -> None:
    timeline = Timeline()
    with timeline.span("wait", 5, "late rows"):
        time.sleep(0.02)
    with pytest.raises(KeyError), timeline.span("wait", 6):
        raise KeyError
    assert 0.02 <= timeline.seconds("wait", 5) < 0.5
    assert timeline.steps == [5, 6]
    assert 0 <= timeline.seconds("wait", 6) < 0.02


def test_counters_add_up() -> None:
    timeline = Timeline()
    timeline.count(0, scope=10, early=8, late=2, delayed=0, bytes=100)
    timeline.count(0, bytes=50)
    timeline.count(1, scope=30, early=2, late=28)
    assert timeline.counts(0) == {"scope": 10, "early": 8, "late": 2, "delayed": 0, "bytes": 150}
    assert timeline.counts() == {"scope": 40, "early": 10, "late": 30, "delayed": 0, "bytes": 150}
    assert timeline.early_share(0) == 0.8
    assert timeline.early_share() == 0.25
    assert timeline.early_share(7) == 1.0


def test_only_the_last_steps_are_kept() -> None:
    timeline = Timeline(steps=3)
    for step in range(10):
        timeline.add("compute", step, step, step + 1)
        timeline.count(max(0, step - 1), early=1)
    assert timeline.steps == [7, 8, 9]
    assert timeline.seconds("compute") * 1e9 == pytest.approx(3)


def test_off_records_nothing() -> None:
    timeline = Timeline(steps=0)
    with timeline.span("compute", 0):
        pass
    timeline.add("wait", 0, 0, 5)
    timeline.count(0, early=3)
    assert timeline.steps == []
    assert timeline.counts() == {}


def test_threads_may_record_together() -> None:
    timeline = Timeline(steps=50)

    def record() -> None:
        for step in range(50):
            with timeline.span("compute", step):
                timeline.count(step, bytes=1)

    threads = [threading.Thread(target=record) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert timeline.counts() == {"bytes": 400}
    assert len(timeline.spans()) == 400


def test_recording_costs_little() -> None:
    timeline = Timeline(steps=100)
    begin = time.perf_counter()
    for step in range(2000):
        with timeline.span("compute", step):
            pass
    assert (time.perf_counter() - begin) / 2000 < 1e-4
