"""A recording of two ranks whose every number is known."""

from __future__ import annotations

import numpy as np

from odin_nerfstudio.shadow.contention import Conflicts
from odin_nerfstudio.shadow.timeline import Timeline
from odin_nerfstudio.viewer.recording import Recording

UNITS = range(7, 11)
"""Finished on both ranks; rank 0 has begun unit 11."""
START = 9_000_000_000_000_001
"""ns: more than a float holds to the ns, in µs."""
MS = 1_000_000
UNIT_MS = 10
GIB = 2**30


def predicted(step: int, earlier: int) -> float:
    return round(0.5 ** (step - earlier) + step / 1000, 6)


def conflicts(rank: int, step: int) -> Conflicts:
    """Between the ranks: 10 + rank rows read after rank 1 wrote them, 4 written by both, one of them read stale."""
    ranks = {
        "raw": [[step, 10 + rank], [0, 2]],
        "waw": [[0, 4], [4, 0]],
        "delayed": [[0, 1], [0, 0]],
    }
    groups = {
        earlier: {"raw": 100 // (step - earlier) + rank, "waw": step - earlier, "delayed": int(earlier == step - 1)}
        for earlier in UNITS
        if earlier < step
    }
    return Conflicts(ranks, groups)


def known_recording() -> Recording:
    """Of each unit on each rank: 6 ms of compute, 4 ms of communication of which 2 ms are hidden, 1 + rank ms of wait.

    A unit has the second of its two overlapping transfers behind the computation of the next one.
    """
    timelines = [Timeline(rank) for rank in range(2)]
    for timeline in timelines:
        rank = timeline.rank
        for place, step in enumerate(UNITS):
            begin = START + place * UNIT_MS * MS
            timeline.add("compute", step, begin, begin + 6 * MS, "render")
            timeline.add("communication", step, begin + 6 * MS, begin + 8 * MS, "gradients")
            timeline.add("wait", step, begin + 9 * MS, begin + (10 + rank) * MS, "splats")
            timeline.add("communication", step, begin + 7 * MS, begin + 8 * MS, "statistics")
            timeline.add("communication", step, begin + 4 * MS, begin + 6 * MS, "early splats")
            timeline.count(step, scope=1000, early=700 + step, late=300 - step, delayed=20, fallback=50)
            timeline.count(step, bytes=(1 + rank) * 1_000_000, busier=1_000_000)
            timeline.count(step, primitives=5000 + 100 * rank + step, memory=(2 + rank) * GIB)
            timeline.finish(step, conflicts(rank, step))
    timelines[0].add("compute", 11, START + 40 * MS, START + 41 * MS, "scope")
    return Recording(timelines, predicted)


def assert_equal_recordings(read: Recording, written: Recording) -> None:
    """Everything that figures are made of is the same."""
    assert [timeline.rank for timeline in read.timelines] == [timeline.rank for timeline in written.timelines]
    for one, other in zip(read.timelines, written.timelines, strict=True):
        assert one.steps == other.steps
        for step in other.steps:
            assert one.spans(step) == other.spans(step)
            assert one.counts(step) == other.counts(step)
            assert one.conflicts(step) == other.conflicts(step)
    steps = written.steps()
    assert read.steps() == steps
    for step in steps:
        assert read.unit(step) == written.unit(step)
        assert read.conflicts(step) == written.conflicts(step)
    for kind in ("raw", "waw", "delayed"):
        np.testing.assert_array_equal(read.rank_conflicts(kind, steps), written.rank_conflicts(kind, steps))
        np.testing.assert_array_equal(read.group_conflicts(kind, steps), written.group_conflicts(kind, steps))
    np.testing.assert_array_equal(read.predicted_conflicts(steps), written.predicted_conflicts(steps))
