"""Spans, counters and what is derived from them, against moments counted one by one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odin_nerfstudio.shadow.contention import Conflicts
from odin_nerfstudio.shadow.timeline import EVERY_UNIT, SAMPLED, Kind, Sampling, Span, Timeline

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
    for asked in (None, 0, 1, 2, 3):
        for kind in ("compute", "communication", "wait"):
            assert timeline.seconds(kind, asked) * 1e9 == pytest.approx(len(moments(recorded, kind, asked)))
        communication = moments(recorded, "communication", asked)
        hidden = communication & moments(recorded, "compute")
        expected = len(hidden) / len(communication) if communication else 1.0
        assert timeline.hidden_fraction(asked) == pytest.approx(expected)
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


# ------------------------------------------------------------------------------------------- known only later


class LateStopwatch:
    """Whose marks, 10 ns apart, are passed only when somebody waits for them."""

    def __init__(self) -> None:
        self.marks = count(1)
        self.waited: list[int] = []

    def mark(self) -> int:
        return next(self.marks)

    def ns(self, mark: int) -> int:
        self.waited.append(mark)
        return 10 * mark


NOBODY = Conflicts({}, {})
READERS: dict[str, tuple[Callable[[Timeline], Any], Any]] = {
    "steps": (lambda timeline: timeline.steps, [0, 1]),
    "spans": (lambda timeline: timeline.spans(0), [Span("compute", "render", 10, 20)]),
    "spans of all": (lambda timeline: [(span.begin, span.end) for span in timeline.spans()], [(10, 20), (15, 25)]),
    "hidden": (lambda timeline: timeline.hidden(1), [(15, 20)]),
    "is_finished": (lambda timeline: timeline.is_finished(0), True),
    "record": (lambda timeline: len(timeline.record(0).spans), 1),
    "conflicts": (lambda timeline: timeline.conflicts(0), NOBODY),
    "counts": (lambda timeline: timeline.counts(0), {"scope": 4, "early": 3}),
    "counts of all": (lambda timeline: timeline.counts(), {"scope": 4, "early": 3, "bytes": 7}),
    "seconds": (lambda timeline: timeline.seconds("compute"), 1e-8),
    "exposed_wait": (lambda timeline: timeline.exposed_wait(), 0),
    "hidden_fraction": (lambda timeline: timeline.hidden_fraction(1), 0.5),
    "early_share": (lambda timeline: timeline.early_share(), 0.75),
    "take": (
        lambda timeline: [(step, len(record.spans)) for step, record in timeline.take(2).items()],
        [(0, 1), (1, 1)],
    ),
    "take of some": (lambda timeline: [record.finished for record in timeline.take(1).values()], [True]),
}


def deferred() -> Timeline:
    """Two units of which next to nothing is known yet."""
    timeline = Timeline(stopwatch=LateStopwatch())
    with timeline.span("compute", 0, "render"):
        pass

    def record() -> None:
        timeline.count(0, scope=4, early=3)
        timeline.finish(0, NOBODY)

    timeline.defer(1, lambda: timeline.add("communication", 1, 15, 25))
    timeline.defer(0, record)
    timeline.count(1, bytes=7)
    return timeline


@pytest.mark.parametrize("reader", READERS)
def test_what_was_deferred_is_there_when_anybody_reads(reader: str) -> None:
    read, expected = READERS[reader]
    timeline = deferred()
    assert read(timeline) == expected
    if not reader.startswith("take"):
        assert read(timeline) == expected  # recorded once


def test_nobody_waits_for_a_device_before_somebody_reads() -> None:
    watch = LateStopwatch()
    timeline = Timeline(stopwatch=watch)
    for step in range(5):
        with timeline.span("compute", step):
            pass
        with pytest.raises(KeyError), timeline.span("wait", step):
            raise KeyError
    timeline.add_marked("communication", 3, watch.mark(), watch.mark(), "late")
    assert watch.waited == []
    assert [span.name for span in timeline.spans(3)] == ["compute", "wait", "late"]
    assert sorted(watch.waited) == list(range(1, 23))


def test_what_was_deferred_is_recorded_some_units_later_at_last() -> None:
    watch = LateStopwatch()
    timeline = Timeline(stopwatch=watch)
    for step in range(20):
        with timeline.span("compute", step):
            pass
        passed = range(max(0, step - 4))  # of which the device is done for certain
        assert watch.waited == [mark for unit in passed for mark in (2 * unit + 1, 2 * unit + 2)]


def test_it_is_recorded_in_the_order_in_which_it_was_deferred() -> None:
    timeline, done = Timeline(), list[tuple[int, int]]()

    def note(step: int, number: int) -> None:
        timeline.defer(step, lambda: done.append((step, number)))

    asked = [(step + ahead, number) for step in range(10) for ahead, number in ((1, 0), (0, 1), (0, 2), (1, 3))]
    for step, number in asked:
        note(step, number)
    assert done == asked[: len(done)]
    assert timeline.steps == [1, 0, *range(2, 11)]
    assert done == asked


def test_units_are_listed_as_they_began_although_little_is_known_of_them() -> None:
    timeline = Timeline(stopwatch=LateStopwatch())
    with timeline.span("compute", 0):
        pass
    timeline.count(1, bytes=1)
    with timeline.span("compute", 0):
        pass
    assert timeline.steps == [0, 1]


def test_of_what_was_given_out_everything_is_known() -> None:
    """Also when a unit has something behind what a later one has deferred."""
    timeline, other = Timeline(), Timeline()
    timeline.defer(1, lambda: timeline.add("compute", 1, 0, 5))
    timeline.defer(0, lambda: timeline.add("communication", 0, 2, 9))
    other.absorb(timeline.take(before=1))
    assert other.steps == [0]
    other.absorb(timeline.take(before=2))
    assert other.hidden(0) == [(2, 5)]


def test_off_defers_nothing() -> None:
    watch = LateStopwatch()
    timeline = Timeline(steps=0, stopwatch=watch)
    with timeline.span("compute", 0):
        pass
    timeline.add_marked("wait", 0, watch.mark(), watch.mark())
    timeline.defer(0, pytest.fail)
    assert timeline.steps == watch.waited == []


def test_threads_may_defer_together_while_others_read() -> None:
    timeline = Timeline(steps=50)

    def record() -> None:
        for step in range(50):
            timeline.defer(step, lambda step=step: timeline.count(step, bytes=1))  # type: ignore[misc]
            if step % 10 == 0:
                assert timeline.counts(step)["bytes"] > 0

    threads = [threading.Thread(target=record) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert timeline.counts() == {"bytes": 400}


def test_a_sampled_run_records_stretches_whose_edges_are_never_finished() -> None:
    timeline = Timeline(sampling=SAMPLED)
    for step in range(600):
        with timeline.span("compute", step):
            timeline.count(step, early=1)
        timeline.defer(step, lambda step=step: timeline.count(step, scope=1))
        timeline.finish(step)
    stretches = [range(begin, begin + SAMPLED.length) for begin in (146, 346, 546)]
    assert timeline.steps == [step for stretch in stretches for step in stretch]
    finished = [step for step in range(600) if timeline.is_finished(step)]
    assert finished == [step for stretch in stretches for step in stretch[1:-1]]
    assert timeline.last_finished == finished[-1]
    assert timeline.counts() == {"early": 24, "scope": 24}
    absorbed = Timeline()
    absorbed.absorb(timeline.take(600))
    assert absorbed.last_finished == finished[-1]


@given(length=st.integers(1, 12), period=st.integers(1, 30))
def test_of_every_period_as_many_units_are_sampled(length: int, period: int) -> None:
    sampling = Sampling(min(length, period), period)
    for begin in range(2 * period):
        chosen = [step in sampling for step in range(begin, begin + period)]
        assert sum(chosen) == sampling.length


def test_every_unit_is_no_edge() -> None:
    assert all(step in EVERY_UNIT and not EVERY_UNIT.is_edge(step) for step in range(5))
