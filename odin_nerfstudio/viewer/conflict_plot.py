"""Who met whom on which primitives, rank by rank and group by group, and what the plan had foreseen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from odin_nerfstudio.shadow.contention import KINDS
from odin_nerfstudio.viewer.recording import Recording
from odin_nerfstudio.viewer.style import AXIS, MUTED, SMALL, empty_figure, figure, heading

TITLES = {"raw": "read after write", "waw": "write after write", "delayed": "read before publication"}
READERS = {"raw": ("reader", "writer"), "waw": ("writer", "other writer"), "delayed": ("reader", "writer")}
"""What a row and what a column of a matrix of ranks is."""
COLORS = "Cividis"
PRINTED = 8
"""Up to how many rows the numbers stand in the cells."""


def rank_conflict_figure(recording: Recording, kind: str, steps: Sequence[int]) -> go.Figure:
    """Draws the primitives on which ranks met, summed over units.

    Args:
        recording: of the run.
        kind: one of :data:`~odin_nerfstudio.shadow.contention.KINDS`.
        steps: units to count.

    Returns:
        Heatmap of (G, G) primitives; see :meth:`~.recording.Recording.rank_conflicts`.
    """
    _check(kind)
    if not steps:
        return empty_figure("no unit recorded yet")
    matrix = recording.rank_conflicts(kind, steps)
    row, column = READERS[kind]
    ranks = [str(rank) for rank in range(len(matrix))]
    hover = f"{row} rank %{{y}}, {column} rank %{{x}}<br>%{{z:,d}} primitives"
    heatmap = _heatmap(matrix, ranks, "%{z:.2~s}", hover)
    return figure(
        [heatmap],
        290,
        annotations=[heading(f"Ranks: {TITLES[kind]}", 1.03)],
        margin={"l": 46, "r": 10, "t": 30, "b": 72},
        coloraxis=_color_axis(float(matrix.max()), "~s"),
        xaxis=_categories(ranks, f"{column} rank"),
        yaxis=_categories(ranks, f"{row} rank", downward=True),
    )


def group_conflict_figure(recording: Recording, kind: str, steps: Sequence[int]) -> go.Figure:
    """Draws on which share of its scope each unit met each earlier one, above what the plan predicted.

    Args:
        recording: of the run.
        kind: one of :data:`~odin_nerfstudio.shadow.contention.KINDS`.
        steps: S units, ascending.

    Returns:
        Two heatmaps of (S, S) shares; see :meth:`~.recording.Recording.group_conflicts` and
        :meth:`~.recording.Recording.predicted_conflicts`. The first one's ``customdata`` has the primitives.
    """
    _check(kind)
    if not steps:
        return empty_figure("no unit recorded yet")
    primitives = recording.group_conflicts(kind, steps)
    scope = np.array([recording.unit(step).scope for step in steps], dtype=np.float64)
    measured = primitives / np.where(scope > 0, scope, np.nan)[:, None]
    predicted = recording.predicted_conflicts(steps)
    units = [str(step) for step in steps]
    pair = "unit %{y} met unit %{x}<br>"
    above = _heatmap(measured, units, "%{z:.0%}", pair + "%{z:.2%} of its scope: %{customdata:,d} primitives")
    below = _heatmap(predicted, units, "%{z:.0%}", "unit %{y} and unit %{x}<br>%{z:.2%} shared, after the plan")
    found = [float(np.nanmax(matrix)) for matrix in (measured, predicted) if np.isfinite(matrix).any()]
    return figure(
        [above | {"customdata": _with_gaps(primitives)}, below | {"yaxis": "y2"}],
        500,
        annotations=[
            heading("Groups: share of the row's scope", 1.015),
            heading("… and what the plan predicted", 0.485),
        ],
        margin={"l": 46, "r": 10, "t": 30, "b": 82},
        coloraxis=_color_axis(max(found, default=0.0), ".0%"),
        xaxis=_categories(units, "earlier unit") | {"anchor": "y2"},
        yaxis=_categories(units, downward=True) | {"domain": [0.545, 1]},
        yaxis2=_categories(units, downward=True) | {"domain": [0, 0.455]},
    )


def _check(kind: str) -> None:
    if kind not in KINDS:
        raise ValueError(f"There are conflicts of the kinds {', '.join(KINDS)}, not {kind!r}.")


def _heatmap(matrix: NDArray[Any], labels: list[str], printed: str, hover: str) -> dict[str, Any]:
    numbers = {"texttemplate": printed, "textfont": {"size": SMALL if len(labels) < 6 else 9}}
    return {
        "type": "heatmap",
        "x": labels,
        "y": labels,
        "z": _with_gaps(matrix),
        "coloraxis": "coloraxis",
        "xgap": 1,
        "ygap": 1,
        "hoverongaps": False,
        "hovertemplate": hover + "<extra></extra>",
        **(numbers if len(labels) <= PRINTED else {}),
    }


def _with_gaps(matrix: NDArray[Any]) -> list[list[float | int | None]]:
    """What JSON can say: None for NaN."""
    return [[None if value != value else value for value in row] for row in matrix.tolist()]


def _color_axis(largest: float, tick_format: str) -> dict[str, Any]:
    """From 0 to the largest value, its bar below the figure."""
    ticks = {"tickformat": tick_format, "tickfont": {"color": MUTED, "size": SMALL}, "nticks": 5}
    place = {"x": 0.5, "yref": "container", "y": 0, "yanchor": "bottom"}
    bar = {"orientation": "h", "len": 1, "thickness": 8, "outlinewidth": 0}
    return {"colorscale": COLORS, "cmin": 0, "cmax": largest or 1.0, "colorbar": ticks | place | bar}


def _categories(labels: list[str], title: str = "", downward: bool = False) -> dict[str, Any]:
    # An explicit range, since viser has plotly keep ranges that it chose for the figure before.
    ends = [-0.5, len(labels) - 0.5]
    fitting = 8 if len(labels[-1]) < 3 else 5
    ticks = {"tickangle": 0, "dtick": -(-len(labels) // fitting)}
    named = {"title": AXIS["title"] | {"text": title}, "showgrid": False}
    return AXIS | named | ticks | {"type": "category", "range": ends[::-1] if downward else ends}
