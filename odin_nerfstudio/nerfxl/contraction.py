"""Scene contraction: the whole of a tile, open sides included, as the unit cube of its hash grid (design §4)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from odin_nerfstudio.nerfxl.tiles import Tiles


class Contraction(NamedTuple):
    """Maps one tile onto [0, 1]³, each axis by itself.

    The core of the tile is mapped linearly. Beyond it, on open sides, distances contract as mip-NeRF 360's (eq. 10) do,
    here along one axis: a point y core half-widths from the core's centre goes to 2 − 1/y, with a continuous
    slope. Only positions are mapped; rays stay straight.
    """

    centre: Tensor
    """(3,) of the core."""
    half: Tensor
    """(3,) half the width of the core."""
    low: Tensor
    """(3,) contracted coordinate of the tile's lower side: −1 at a face, −2 at infinity."""
    high: Tensor
    """(3,) of its upper side: 1 at a face, 2 at infinity."""

    @staticmethod
    def of(tiles: Tiles, tile: int) -> Contraction:
        """That of one tile, on the device of the tiles."""
        (lower, upper), (below, above) = tiles.core[tile], tiles.bounds[tile]
        # Two faces that are one number in float32 enclose nothing, but must not divide by zero.
        half = ((upper - lower) / 2).clamp_min(torch.finfo(torch.float32).tiny)
        low, high = -1 - below.isinf().float(), 1 + above.isinf().float()
        return Contraction(lower + (upper - lower) / 2, half, low, high)

    def __call__(self, positions: Tensor) -> Tensor:
        """(..., 3) world positions in the tile → (..., 3) in [0, 1], differentiable; outside it, the nearest side."""
        centre, half, low, high = (part.to(positions.dtype) for part in self)
        y = (positions - centre) / half
        z = torch.where(y.abs() <= 1, y, y.sign() * (2 - 1 / y.abs().clamp_min(1)))
        return ((z - low) / (high - low)).clamp(0, 1)

    def inverse(self, unit: Tensor) -> Tensor:
        """(..., 3) in [0, 1] → (..., 3) world positions; the outer side of an open tile is ±inf."""
        centre, half, low, high = (part.to(unit.dtype) for part in self)
        z = low + unit * (high - low)
        y = torch.where(z.abs() <= 1, z, z.sign() / (2 - z.abs()))
        return centre + half * y
