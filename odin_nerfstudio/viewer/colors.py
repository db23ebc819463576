"""The colours of ranks, of spans and of heat: the same in every figure, in the scene and in render outputs."""

from __future__ import annotations

from functools import cache

import matplotlib
import numpy as np
import torch
from matplotlib.colors import to_hex, to_rgb
from torch import Tensor

from odin_nerfstudio.plan.picture import CELLS

RGB = tuple[float, float, float]
"""Red, green and blue in [0, 1]."""
HEAT = "cividis"
"""Dark is little, bright is much, and no hue matters."""
SPANS = {"compute": "#56b4e9", "communication": "#e69f00", "wait": "#d55e00", "hidden": "#009e73"}
"""By what a span is; from Okabe and Ito's colours, which colour-blind people can tell apart."""
HATCHES = {"compute": "", "communication": "", "wait": "/", "hidden": "x"}
"""Plotly's pattern shapes, for who sees no colour at all."""
PARTS = {"early": "#56b4e9", "late": "#e69f00", "fallback": "#cc79a7", "delayed": "#d55e00"}
"""By how a primitive of a scope was read."""

_SHADES = (0.0, 0.5, -0.45)
"""Per round through the palette: share of white, or of black where negative."""


def rank_color(rank: int) -> RGB:
    """The colour of a rank, as in the plan's picture; ranks beyond its palette get the colours paler, then darker."""
    rounds, place = divmod(rank, len(CELLS))
    shade = _SHADES[rounds % len(_SHADES)]
    target = float(shade > 0)
    red, green, blue = (value + abs(shade) * (target - value) for value in to_rgb(CELLS[place]))
    return red, green, blue


def rank_hex(rank: int) -> str:
    """:func:`rank_color` as ``#rrggbb``."""
    return to_hex(rank_color(rank))


def heat(values: Tensor) -> Tensor:
    """Colours of values in [0, 1]; those outside are clamped, and NaN is 0.

    Args:
        values: (...,)

    Returns:
        (..., 3) float32 RGB.
    """
    table = _heat_table().to(values.device)
    return table[(values.nan_to_num().clamp(0, 1) * (len(table) - 1)).round().long()]


@cache
def _heat_table() -> Tensor:
    """(256, 3) float32"""
    return torch.from_numpy(matplotlib.colormaps[HEAT](np.linspace(0, 1, 256))[:, :3].astype(np.float32))
