"""What each rank did when: compute, communication, exposed wait, and what overlap hid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

import plotly.graph_objects as go

from odin_nerfstudio.viewer.colors import HATCHES, SPANS
from odin_nerfstudio.viewer.recording import Recording
from odin_nerfstudio.viewer.style import AXIS, BACKGROUND, INK, MUTED, SMALL, colored, empty_figure, figure, heading

NAMES = {"compute": "compute", "communication": "communication", "wait": "exposed wait", "hidden": "hidden"}
COUNTS = ("scope", "early", "late", "delayed", "fallback", "bytes")
LABELS = 6
"""Unit numbers that fit side by side in the panel."""
PAUSE = 10
"""Units that would have fitted into a pause, evaluation or checkpoint from which on it is cut short."""
PLACES = {"compute": 0.32, "communication": 0.52, "wait": 0.72, "hidden": 0.92}
"""Middle of each kind's lane within the lane of a rank, which is 1 high; the unit numbers stand above."""
_KEYS = {kind: colored(f"{'▨' if HATCHES[kind] else '■'} {name}", SPANS[kind]) for kind, name in NAMES.items()}
LEGEND = "{compute}  {communication}<br>{wait}  {hidden}".format(**_KEYS)
HOVER = (
    "<b>%{customdata[0]}</b>, unit %{customdata[1]}<br>%{customdata[2]:.3f} ms<br>scope %{customdata[3]:,d}<br>"
    "early %{customdata[4]:,d}, late %{customdata[5]:,d}<br>delayed %{customdata[6]:,d}, "
    "fallback %{customdata[7]:,d}<br>sent %{customdata[8]:.4~s}B<extra></extra>"
)


class _Span(NamedTuple):
    """A bar."""

    begin: int
    """ns."""
    end: int
    """ns."""
    rank: int
    step: int
    kind: str
    name: str


@dataclass(frozen=True)
class _Pause:
    """A time in which no rank did anything."""

    begin: int
    """ns."""
    idle: int
    """ns."""
    cut: int
    """How much of it is not shown, ns."""


@dataclass
class _Columns:
    """Bars of one kind: one trace draws them all."""

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
    since at most two are in flight. Long pauses are cut short, and a line says how long they were.

    Args:
        recording: of the run.
        steps: units to show.

    Returns:
        Times in ms after the first moment shown. A bar's base is where its span begins, its x how long it is.
    """
    excerpt = recording.excerpt(steps)
    spans = _spans(excerpt, steps)
    if not spans:
        return empty_figure("no unit recorded yet")
    pauses, start = _pauses(spans), spans[0].begin
    counts = {
        (rank, step): [found.get(name, 0) for name in COUNTS]
        for rank, timeline in enumerate(excerpt.timelines)
        for step in steps
        for found in [timeline.counts(step)]
    }

    def shown_at(moment: int) -> float:
        return (moment - start - sum(pause.cut for pause in pauses if moment > pause.begin)) / 1e6

    columns = {kind: _Columns() for kind in NAMES}
    computing: dict[tuple[int, int], tuple[float, float]] = {}
    for span in spans:
        lane = span.rank if recording.world_size > 1 else span.step % 2
        bar, base, length = columns[span.kind], shown_at(span.begin), (span.end - span.begin) / 1e6
        bar.base.append(base)
        bar.x.append(length)
        bar.y.append(lane + PLACES[span.kind])
        bar.opacity.append(0.65 if span.step % 2 else 1.0)
        bar.customdata.append([span.name, span.step, length, *counts[span.rank, span.step]])
        if span.kind == "compute":
            first, last = computing.get((lane, span.step), (base, base + length))
            computing[lane, span.step] = min(first, base), max(last, base + length)
    end = shown_at(max(span.end for span in spans))
    traces = [*(_trace(kind, bars) for kind, bars in columns.items()), _numbers(computing, steps)]
    lanes = [f"rank {rank}" for rank in range(recording.world_size)] if recording.world_size > 1 else ["even", "odd"]
    return _laid_out(traces, lanes, end, [(shown_at(pause.begin), pause) for pause in pauses])


def _spans(excerpt: Recording, steps: Sequence[int]) -> list[_Span]:
    """What the figure shows, ascending by begin."""
    spans = [
        _Span(begin, end, rank, step, kind, name)
        for rank, timeline in enumerate(excerpt.timelines)
        for step in steps
        for kind, name, begin, end in (
            *((span.kind, span.name, span.begin, span.end) for span in timeline.spans(step)),
            *(("hidden", "hidden", *interval) for interval in timeline.hidden(step)),
        )
    ]
    return sorted(spans)


def _pauses(spans: Sequence[_Span]) -> list[_Pause]:
    """Pauses so long that the units between them could not be seen."""
    extents: dict[int, tuple[int, int]] = {}
    for span in spans:
        begin, end = extents.get(span.step, (span.begin, span.end))
        extents[span.step] = min(begin, span.begin), max(end, span.end)
    usual = round(median(end - begin for begin, end in extents.values()))
    pauses, busy_until = [], spans[0].end
    for span in spans:
        idle = span.begin - busy_until
        if idle > PAUSE * usual:
            pauses.append(_Pause(busy_until, idle, idle - usual))
        busy_until = max(busy_until, span.end)
    return pauses


def _trace(kind: str, columns: _Columns) -> dict[str, Any]:
    marker = {"color": SPANS[kind], "opacity": columns.opacity, "line": {"width": 0}}
    pattern = {"shape": HATCHES[kind], "size": 4, "solidity": 0.3, "fillmode": "overlay", "fgcolor": BACKGROUND}
    return {
        "type": "bar",
        "orientation": "h",
        "name": NAMES[kind],
        "width": 0.19,
        "marker": marker | ({"pattern": pattern} if HATCHES[kind] else {}),
        "hovertemplate": HOVER,
        "base": columns.base,
        "x": columns.x,
        "y": columns.y,
        "customdata": columns.customdata,
    }


def _numbers(computing: dict[tuple[int, int], tuple[float, float]], steps: Sequence[int]) -> dict[str, Any]:
    """Unit numbers above the computation (lane, unit → ms) of each unit, as many as fit."""
    every = -(-len(steps) // LABELS)
    shown = {key: extent for key, extent in computing.items() if key[1] % every == 0}
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


def _laid_out(traces: list[Any], lanes: list[str], end: float, pauses: list[tuple[float, _Pause]]) -> go.Figure:
    """Lanes one below the other, times up to ``end`` ms, a line at each pause."""
    between = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "line": {"color": MUTED, "width": 1}}
    cut = {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "line": {"color": INK, "width": 1, "dash": "dot"}}
    note = {"y": 0, "yref": "paper", "yanchor": "bottom", "showarrow": False, "bgcolor": "#000000"}
    middles = [(moment + (pause.idle - pause.cut) / 2e6, pause.idle / 1e9) for moment, pause in pauses]
    return figure(
        traces,
        134 + 46 * len(lanes),
        barmode="overlay",
        margin={"l": 50, "r": 12, "t": 40, "b": 36},
        xaxis=AXIS | {"range": [0, end], "ticksuffix": " ms", "nticks": 5},
        yaxis=AXIS | {
            "range": [len(lanes) + 0.05, 0], "tickvals": [lane + 0.6 for lane in range(len(lanes))],
            "ticktext": lanes, "showgrid": False,
        },
        shapes=[
            *(between | {"y0": lane, "y1": lane} for lane in range(1, len(lanes))),
            *(cut | {"x0": moment, "x1": moment} for moment, _ in middles),
        ],
        annotations=[
            heading(LEGEND, 1.0),
            *(note | {"x": moment, "text": f"{seconds:.1f} s later"} for moment, seconds in middles),
        ],
    )  # fmt: skip
