"""Whole rays from the segments of their tiles (NeRF-XL §3.2 and §3.3; design §4)."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Rendered(NamedTuple):
    """What R rays see through K tiles."""

    rgb: Tensor
    """(R, 3) colour, background included."""
    accumulation: Tensor
    """(R, 1) opacity A of the whole ray."""
    depth: Tensor
    """(R, 1) ∫ T σ t dt, not divided by the accumulation."""
    distortion: Tensor
    """(R, 1) mip-NeRF 360's distortion of the whole ray, in units of t."""
    tile_weights: Tensor
    """(R, K) what each tile contributes to the accumulation; they sum to it."""


def compose(segments: Tensor, order: Tensor, enter: Tensor, background: Tensor | None = None) -> Rendered:
    """Lines the tiles up along each ray; exact, and differentiable in ``segments`` and ``background``.

    With P_k the transmittance of all tiles before k, the weight and moments of a tile are scaled by P_k, and the pairs
    of samples in two tiles add 2 P_k (D_k Â_k − A_k D̂_k) to the distortion (design §4), where Â and D̂ sum over the
    tiles before. D_k is counted from the tile's own entry, and the same holds for D̂_k here: then every term is
    positive, and rounding is relative to lengths within tiles, not to the distance from the camera.

    Args:
        segments: (R, K, 6) from :func:`~.segments.integrate`, depths counted from ``enter``. An absent tile is zeros.
        order: (R, K) int64 tiles in entry order, as in :class:`~.rays.Crossings`.
        enter: (R, K) where the rays enter the tiles, the reference of their depths.
        background: (R, 3) or (3,) colour behind everything; None for black.
    """
    optical, rgb, depth, distortion = segments.gather(1, order[..., None].expand_as(segments)).split([1, 3, 1, 1], -1)
    optical, depth, distortion = optical[..., 0], depth[..., 0], distortion[..., 0]
    entry = enter.gather(1, order)
    through = optical.cumsum(dim=1)
    prefix = torch.exp(-_shift(through))
    weight = prefix * -torch.expm1(-optical)
    moment = prefix * depth

    passed = weight.cumsum(dim=1)[:, :-1]
    # Weight of the earlier tiles times its distance to this tile's entry: −D̂_k, counted from there.
    behind = F.pad((passed * entry.diff(dim=1) - moment[:, :-1]).cumsum(dim=1), (1, 0))
    pairs = moment * F.pad(passed, (1, 0)) + weight * behind

    colour = (prefix[..., None] * rgb).sum(dim=1)
    if background is not None:
        colour = colour + torch.exp(-through[:, -1:]) * background
    return Rendered(
        rgb=colour,
        accumulation=-torch.expm1(-through[:, -1:]),
        depth=(moment + weight * entry).sum(dim=1, keepdim=True),
        distortion=(2 * pairs + prefix**2 * distortion).sum(dim=1, keepdim=True),
        tile_weights=torch.zeros_like(weight).scatter(1, order, weight),
    )


def _shift(sums: Tensor) -> Tensor:
    """(R, K) inclusive running sums → exclusive ones."""
    return F.pad(sums[:, :-1], (1, 0))
