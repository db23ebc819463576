"""What each tile of ``nerfxl`` costs, and what ranks pay for being several."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from odin_nerfstudio.shadow.timeline import Timeline
from odin_nerfstudio.viewer.colors import rank_hex
from odin_nerfstudio.viewer.curves import by_rank, line, ranks_legend, stacked
from odin_nerfstudio.viewer.recording import Recording
from odin_nerfstudio.viewer.style import INK


def tile_samples(recording: Recording, steps: Sequence[int]) -> dict[int, list[int]]:
    """By tile, the samples that its field was asked for in each of some steps."""
    samples: dict[int, list[int]] = {}
    for place, step in enumerate(steps):
        for timeline in recording.timelines:
            for name, count in timeline.counts(step).items():
                if name.startswith("tile "):
                    samples.setdefault(int(name.removeprefix("tile ")), [0] * len(steps))[place] = count
    return dict(sorted(samples.items()))


def tile_figure(recording: Recording, steps: Sequence[int]) -> go.Figure:
    """Draws how many samples each tile evaluated, and what was waited for and sent.

    Args:
        recording: of the run.
        steps: S steps, ascending.

    Returns:
        Over the steps: samples of each tile; of each rank the share of its step in which it waited, and its memory,
        bytes; bytes sent by all ranks together.
    """
    units = [recording.unit(step) for step in steps]
    samples = tile_samples(recording, steps)
    tiles = [line(f"tile {tile}", counts, rank_hex(tile), "%{y:,}") for tile, counts in samples.items()]
    waits = [
        line(f"rank {timeline.rank}", [_waiting(timeline, step) for step in steps], rank_hex(timeline.rank), "%{y:.1%}")
        for timeline in recording.timelines
    ]
    sent = [line("sent", [unit.bytes for unit in units], INK, "%{y:.4~s}B")]
    return stacked(
        steps,
        [
            ("Samples per step, by tile", "~s", tiles),
            (f"Waiting for others{ranks_legend(recording)}", ".0%", waits),
            ("Sent per step, bytes", "~s", sent),
            (f"Memory, bytes{ranks_legend(recording)}", "~s", by_rank(units, lambda unit: unit.memory)),
        ],
    )


def _waiting(timeline: Timeline, step: int) -> float:
    """The share of a step in which a rank waited for others."""
    busy, wait = timeline.seconds("compute", step), timeline.seconds("wait", step)
    return wait / (busy + wait) if busy + wait else 0.0
