"""How well it went, over the units: what was read early, what was hidden, who waited, and what each rank bears."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import plotly.graph_objects as go

from odin_nerfstudio.viewer.colors import PARTS, SPANS, rank_hex
from odin_nerfstudio.viewer.recording import Recording, UnitFigures
from odin_nerfstudio.viewer.style import AXIS, INK, colored, empty_figure, figure, heading

GAP = 0.13
"""Of the height, between two plots: room for a heading."""
Traces = list[dict[str, Any]]


def shares_figure(recording: Recording, steps: Sequence[int]) -> go.Figure:
    """Draws how units read their scopes, which share of the communication was hidden, and who waited how long.

    Args:
        recording: of the run.
        steps: S units, ascending.

    Returns:
        Over the units: four parts of the scope that add up to 1 (late ones are those that waited, without
        ``fallback``); the hidden fraction; the exposed wait of each rank, ms.
    """
    units = [recording.unit(step) for step in steps]
    names = " ".join(colored(name, PARTS[name]) for name in PARTS)
    return _stacked(
        steps,
        [
            (f"Read {names}", ".0%", _parts(units)),
            (f"Communication {colored('hidden', SPANS['hidden'])}", ".0%", _hidden(units)),
            (f"Exposed wait, ms{_ranks(recording)}", "~g", _by_rank(units, lambda unit: [1e3 * s for s in unit.wait])),
        ],
        ranges={0: [0, 1], 1: [0, 1.02]},
    )


def load_figure(recording: Recording, steps: Sequence[int]) -> go.Figure:
    """Draws what was sent, and what each rank bears.

    Args:
        recording: of the run.
        steps: S units, ascending.

    Returns:
        Over the units: bytes sent by all ranks together; primitives and bytes of memory of each rank.
    """
    units = [recording.unit(step) for step in steps]
    sent = [_line("sent", [unit.bytes for unit in units], INK, "%{y:.4~s}B")]
    return _stacked(
        steps,
        [
            ("Sent per unit, bytes", "~s", sent),
            (f"Primitives{_ranks(recording)}", "~s", _by_rank(units, lambda unit: unit.primitives)),
            (f"Memory, bytes{_ranks(recording)}", "~s", _by_rank(units, lambda unit: unit.memory)),
        ],
    )


def _stacked(
    steps: Sequence[int],
    plots: list[tuple[str, str, Traces]],
    ranges: dict[int, list[float]] | None = None,
) -> go.Figure:
    """Plots (heading, tick format, traces), one above the other, over the same units."""
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
        traces += [line | {"x": list(steps), "yaxis": f"y{suffix}"} for line in lines]
    last = f"y{len(plots)}"
    horizontal = AXIS | {"anchor": last, "nticks": 5, "tickformat": "d", "title": AXIS["title"] | {"text": "unit"}}
    margin = {"l": 46, "r": 12, "t": 26, "b": 36}
    return figure(traces, 380, annotations=headings, margin=margin, xaxis=horizontal, **axes)


def _line(name: str, values: Sequence[float], color: str, shown: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "y": list(values),
        "line": {"color": color, "width": 1.5},
        "hovertemplate": f"unit %{{x}}<br>{name}: {shown}<extra></extra>",
    }


def _parts(units: Sequence[UnitFigures]) -> Traces:
    """Early, late, fallback and delayed, as areas one on the other."""
    amounts = {
        "early": [unit.early for unit in units],
        "late": [unit.late - unit.delayed - unit.fallback for unit in units],
        "fallback": [unit.fallback for unit in units],
        "delayed": [unit.delayed for unit in units],
    }
    shares = {
        name: [value / unit.scope if unit.scope else 0.0 for value, unit in zip(values, units, strict=True)]
        for name, values in amounts.items()
    }
    return [
        _line(name, values, PARTS[name], "%{y:.2%}")
        | {"stackgroup": "scope", "fillcolor": PARTS[name], "line": {"width": 0}}
        for name, values in shares.items()
    ]


def _hidden(units: Sequence[UnitFigures]) -> Traces:
    return [_line("hidden", [unit.hidden for unit in units], SPANS["hidden"], "%{y:.2%}")]


def _by_rank(units: Sequence[UnitFigures], values: Callable[[UnitFigures], Sequence[float]]) -> Traces:
    """One line for each rank."""
    lines = zip(*(values(unit) for unit in units), strict=True)
    return [_line(f"rank {rank}", line, rank_hex(rank), "%{y:,.4~f}") for rank, line in enumerate(lines)]


def _ranks(recording: Recording) -> str:
    """The legend of ranks; none for one."""
    ranks = range(recording.world_size)
    return "" if len(ranks) == 1 else ", rank " + " ".join(colored(f"<b>{rank}</b>", rank_hex(rank)) for rank in ranks)
