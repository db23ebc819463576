"""Curves over units, one plot above the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import plotly.graph_objects as go

from odin_nerfstudio.viewer.colors import rank_hex
from odin_nerfstudio.viewer.recording import Recording, UnitFigures
from odin_nerfstudio.viewer.style import AXIS, colored, empty_figure, figure, heading

GAP = 0.13
"""Of the height, between two plots: room for a heading."""
Traces = list[dict[str, Any]]


def stacked(
    steps: Sequence[int],
    plots: list[tuple[str, str, Traces]],
    ranges: dict[int, list[float]] | None = None,
) -> go.Figure:
    """Draws plots one above the other.

    Args:
        steps: units, ascending, that all have in common.
        plots: heading, format of the ticks, and curves of each, from the top.
        ranges: of the vertical axis of some plots; the others begin at 0.
    """
    if not steps:
        return empty_figure("no unit recorded yet")
    height = (1 - GAP * (len(plots) - 1)) / len(plots)
    traces, axes, headings = [], {}, []
    for number, (text, tick_format, lines) in enumerate(plots):
        top = 1 - number * (height + GAP)
        suffix = "" if number == 0 else str(number + 1)
        vertical = {"range": ranges[number]} if ranges and number in ranges else {"rangemode": "tozero"}
        domain = [max(0.0, top - height), top]
        axes[f"yaxis{suffix}"] = AXIS | {"domain": domain, "nticks": 4, "tickformat": tick_format} | vertical
        headings.append(heading(text, top + 0.005))
        traces += [curve | {"x": list(steps), "yaxis": f"y{suffix}"} for curve in lines]
    last = f"y{len(plots)}"
    horizontal = AXIS | {"anchor": last, "nticks": 5, "tickformat": "d", "title": AXIS["title"] | {"text": "unit"}}
    margin = {"l": 46, "r": 12, "t": 26, "b": 36}
    return figure(traces, 380, annotations=headings, margin=margin, xaxis=horizontal, **axes)


def line(name: str, values: Sequence[float], color: str, shown: str) -> dict[str, Any]:
    """A curve for :func:`stacked`; ``shown`` is what the mouse tells of a value, in plotly's format."""
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "y": list(values),
        "line": {"color": color, "width": 1.5},
        "hovertemplate": f"unit %{{x}}<br>{name}: {shown}<extra></extra>",
    }


def by_rank(units: Sequence[UnitFigures], values: Callable[[UnitFigures], Sequence[float]]) -> Traces:
    """One line for each rank."""
    lines = zip(*(values(unit) for unit in units), strict=True)
    return [line(f"rank {rank}", each, rank_hex(rank), "%{y:,.4~f}") for rank, each in enumerate(lines)]


def ranks_legend(recording: Recording) -> str:
    """The legend of ranks; none for one."""
    ranks = range(recording.world_size)
    return "" if len(ranks) == 1 else ", rank " + " ".join(colored(f"<b>{rank}</b>", rank_hex(rank)) for rank in ranks)
