"""A recording whose every number is known."""

from __future__ import annotations

from odin_nerfstudio.shadow.contention import Conflicts
from odin_nerfstudio.shadow.timeline import Timeline
from odin_nerfstudio.viewer.recording import Recording

MS = 1_000_000
START = 7_000 * MS
LOOK_BACK = 3


def add_unit(recording: Recording, step: int) -> None:
    """Every 10 ms a unit. Of its 5 ms of communication its own computation hides 2 and the next unit's 1."""
    ranks = range(recording.world_size)
    for rank, timeline in enumerate(recording.timelines):
        begin = START + 10 * step * MS
        timeline.add("compute", step, begin, begin + 8 * MS, "render")
        timeline.add("communication", step, begin + 6 * MS, begin + 11 * MS, "early splats")
        timeline.add("wait", step, begin + 8 * MS, begin + 8 * MS + (rank + 1) * MS // 2, "late splats")
        timeline.count(step, scope=100, early=70, late=30, delayed=5, fallback=10, bytes=1000 * (rank + 1) + step)
        timeline.count(step, primitives=500 + rank, memory=(rank + 1) * 10**6)
        matrix = [[10 * a + b + rank for b in ranks] for a in ranks]
        earlier = range(max(0, step - LOOK_BACK), step)
        groups = {other: {"raw": 8 - (step - other), "waw": 3, "delayed": other % 2} for other in earlier}
        timeline.finish(step, Conflicts({"raw": matrix, "waw": matrix[::-1], "delayed": matrix}, groups))


def handmade_recording(ranks: int = 2, units: int = 6) -> Recording:
    """A recording of some ranks, and a plan that predicted a share of 1 ÷ units apart."""
    recording = Recording([Timeline(rank) for rank in range(ranks)], lambda step, earlier: 1 / (step - earlier))
    for step in range(units):
        add_unit(recording, step)
    return recording
