"""What each rank did when: compute, communication, exposed wait, and what overlap hid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import plotly.graph_objects as go

from odin_nerfstudio.viewer.colors import HATCHES, SPANS
from odin_nerfstudio.viewer.recording import Recording
from odin_nerfstudio.viewer.style import AXIS, MUTED, SMALL, empty_figure, figure

NAMES = {"compute": "compute", "communication": "communication", "wait": "exposed wait", "hidden": "hidden"}
COUNTS = ("scope", "early", "late", "delayed", "fallback", "bytes")
LABELS = 6
"""Unit numbers that fit side by side in the panel."""
PLACES = {"compute": 0.32, "communication": 0.52, "wait": 0.72, "hidden": 0.92}
"""Middle of each kind's lane within the lane of a rank, which is 1 high; the unit numbers stand above."""
HOVER = (
    "<b>%{customdata[0]}</b>, unit %{customdata[1]}<br>%{customdata[2]:.3f} ms<br>scope %{customdata[3]:,d}<br>"
    "early %{customdata[4]:,d}, late %{customdata[5]:,d}<br>delayed %{customdata[6]:,d}, "
    "fallback %{customdata[7]:,d}<br>sent %{customdata[8]:.4~s}B<extra></extra>"
)


@dataclass
class _Bars:
    """Spans of one kind, as columns; one trace draws them all."""

    base: list[float] = field(default_factory=list)
    """Begin, ms after the first moment shown."""
    x: list[float] = field(default_factory=list)
    """Length, ms."""
    y: list[float] = field(default_factory=list)
    opacity: list[float] = field(default_factory=list)
    customdata: list[list[Any]] = field(default_factory=list)
    """Name, unit, ms and counts, for ``HOVER``."""


def timeline_figure(recording: Recording, steps: Sequence[int]) -> go.Figure:
    """Draws some units of all ranks, one lane per rank.

    With one rank there is only who was in flight together to tell apart: its lanes are the even and the odd units,
    since at most two are in flight.

    Args:
        recording: of the run.
        steps: units to show.

    Returns:
        Times in ms after the first moment shown. A bar's base is where its span begins, its x how long it is.
    """
    excerpt = recording.excerpt(steps)
    spans = [
        (rank, step, *span)
        for rank, timeline in enumerate(excerpt.timelines)
        for step in steps
        for span in (
            *((span.kind, span.name, span.begin, span.end) for span in timeline.spans(step)),
            *(("hidden", "hidden", begin, end) for begin, end in timeline.hidden(step)),
        )
    ]
    if not spans:
        return empty_figure("no unit recorded yet")
    lanes = [f"rank {rank}" for rank in range(recording.world_size)] if recording.world_size > 1 else ["even", "odd"]
    counts = {
        (rank, step): [found.get(name, 0) for name in COUNTS]
        for rank, timeline in enumerate(excerpt.timelines)
        for step in steps
        for found in [timeline.counts(step)]
    }
    start, end = min(begin for *_, begin, _ in spans), max(end for *_, end in spans)
    bars = {kind: _Bars() for kind in NAMES}
    extents: dict[tuple[int, int], tuple[float, float]] = {}
    for rank, step, kind, name, begin, until in spans:
        lane = rank if recording.world_size > 1 else step % 2
        bar, base, length = bars[kind], (begin - start) / 1e6, (until - begin) / 1e6
        bar.base.append(base)
        bar.x.append(length)
        bar.y.append(lane + PLACES[kind])
        bar.opacity.append(0.65 if step % 2 else 1.0)
        bar.customdata.append([name, step, length, *counts[rank, step]])
        if kind == "compute":
            first, last = extents.get((lane, step), (base, base + length))
            extents[lane, step] = min(first, base), max(last, base + length)
    line = {"color": MUTED, "width": 1}
    height = 84 + round(len(lanes) * (46 + 80 / len(lanes)))
    return figure(
        [*(_trace(kind, columns) for kind, columns in bars.items()), _numbers(extents, steps)],
        height,
        barmode="overlay",
        showlegend=True,
        legend={
            "orientation": "h", "x": 0, "y": 1, "yanchor": "bottom", "traceorder": "normal",
            "entrywidth": 0.48, "entrywidthmode": "fraction", "itemwidth": 30,
        },
        margin={"l": 50, "r": 12, "t": 46, "b": 36},
        xaxis=AXIS | {"range": [0, (end - start) / 1e6], "ticksuffix": " ms", "nticks": 5},
        yaxis=AXIS | {
            "range": [len(lanes) + 0.05, 0], "tickvals": [lane + 0.6 for lane in range(len(lanes))],
            "ticktext": lanes, "showgrid": False,
        },
        shapes=[
            {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": lane, "y1": lane, "line": line}
            for lane in range(1, len(lanes))
        ],
    )  # fmt: skip


def _trace(kind: str, columns: _Bars) -> dict[str, Any]:
    color = {"color": SPANS[kind], "opacity": columns.opacity, "line": {"width": 0}}
    pattern = {"shape": HATCHES[kind], "size": 5, "solidity": 0.35, "fillmode": "replace", "fgcolor": SPANS[kind]}
    return {
        "type": "bar",
        "orientation": "h",
        "name": NAMES[kind],
        "width": 0.19,
        "marker": color | ({"pattern": pattern} if HATCHES[kind] else {}),
        "hovertemplate": HOVER,
        "base": columns.base,
        "x": columns.x,
        "y": columns.y,
        "customdata": columns.customdata,
    }


def _numbers(extents: dict[tuple[int, int], tuple[float, float]], steps: Sequence[int]) -> dict[str, Any]:
    """Unit numbers above the computation of each unit, as many as fit."""
    every = -(-len(steps) // LABELS)
    shown = {key: extent for key, extent in extents.items() if key[1] % every == 0}
    return {
        "type": "scatter",
        "mode": "text",
        "x": [(first + last) / 2 for first, last in shown.values()],
        "y": [lane + 0.12 for lane, _ in shown],
        "text": [str(step) for _, step in shown],
        "textfont": {"size": SMALL, "color": MUTED},
        "hoverinfo": "skip",
        "showlegend": False,
        "cliponaxis": False,
    }
