"""How figures look: for the viewer's dark and narrow panel, where they are drawn about 280 pixels wide.

viser draws a figure as wide as there is room and sets its height by the ratio that the layout has.
"""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

INK, MUTED, GRID, BACKGROUND = "#e6e6e6", "#a8a8a8", "#424242", "#242424"
WIDTH = 280
UNSEEN = {"autosize": False, "width": 100, "height": 100}
"""What a figure falls back on while its tab is hidden: viser gives it no width then, and plotly's own 700 pixels would
push the panel wider for good. Once it is seen it gets the panel's width."""
FONT, SMALL = 12, 11
AXIS: dict[str, Any] = {
    "gridcolor": GRID,
    "zeroline": False,
    "tickfont": {"color": MUTED, "size": SMALL},
    "title": {"font": {"color": MUTED, "size": SMALL}, "standoff": 4},
}
NO_AXIS = {"visible": False, "range": [0, 1]}


def figure(traces: list[Any], height: int, **layout: Any) -> go.Figure:
    """A figure of :data:`WIDTH` × ``height`` pixels, with what all have in common."""
    common = {
        "template": {"layout": UNSEEN},
        "width": WIDTH,
        "height": height,
        "paper_bgcolor": BACKGROUND,
        "plot_bgcolor": BACKGROUND,
        "font": {"color": INK, "size": FONT},
        "margin": {"l": 46, "r": 10, "t": 8, "b": 34},
        "showlegend": False,
    }
    return go.Figure(traces, common | layout)


def empty_figure(text: str) -> go.Figure:
    """A sentence where there is nothing to draw yet."""
    note = {"text": text, "showarrow": False, "x": 0.5, "y": 0.5, "xref": "paper", "yref": "paper"}
    return figure([], 80, annotations=[note], xaxis=NO_AXIS, yaxis=NO_AXIS)


def aspect(shown: go.Figure) -> float:
    """Height ÷ width, which is what viser takes for a figure's aspect."""
    return shown.layout.height / shown.layout.width


def heading(text: str, y: float) -> dict[str, Any]:
    """An annotation that ends at height ``y`` of the figure's plotting area, in [0, 1], at its left."""
    place = {"x": 0, "y": y, "xref": "paper", "yref": "paper", "xanchor": "left", "yanchor": "bottom"}
    return {"text": text, "showarrow": False, "font": {"size": SMALL}, "align": "left", **place}


def colored(text: str, color: str) -> str:
    """Text in a colour, for headings that are legends too."""
    return f"<span style='color:{color}'>{text}</span>"
