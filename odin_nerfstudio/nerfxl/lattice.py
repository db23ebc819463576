"""The one sample lattice along each ray, the same on every rank, and each tile's part of it (design §4)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from odin_nerfstudio.nerfxl.tiles import Tiles

Occupied = Callable[[int, Tensor], Tensor]
"""(tile, (S, 3) positions in it) → (S,) bool: whether the tile's occupancy grid keeps a sample there."""


class Samples(NamedTuple):
    """Packed samples of one tile (as nerfacc's), ordered by ray and then along it; intervals of one density each."""

    ray_index: Tensor
    """(S,) int64 ascending."""
    t_start: Tensor
    """(S,) distance along the ray where the interval begins."""
    t_end: Tensor
    """(S,) where it ends."""

    def positions(self, origins: Tensor, directions: Tensor) -> Tensor:
        """(S, 3) midpoints, from the rays' (R, 3) origins and directions; their gradients reach the rays."""
        return along(origins[self.ray_index], directions[self.ray_index], (self.t_start + self.t_end) / 2)


def lattice(
    near: Tensor, far: Tensor, count: int, *, jitter: Tensor | None = None, knee: float | None = None
) -> Tensor:
    """Ends of ``count`` intervals that fill [near, far].

    Up to the distance ``knee`` they have one length, beyond it one length in disparity 1/t, with a continuous slope:
    nerfstudio's ``UniformLinDispPiecewiseSampler``, which has its knee at 1.

    Args:
        near: (R, 1).
        far: (R, 1) ≥ near, finite, however far.
        count: N ≥ 1 intervals per ray.
        jitter: (R, 1) in [0, 1), moves all inner ends of the ray by ``jitter`` − ½ of a step; None: not moved.
        knee: distance > 0; None for one length all the way.

    Returns:
        (R, N + 1) not descending, the first exactly ``near`` and the last exactly ``far``.
    """
    # Counted from the far end, where disparity needs the precision.
    steps_left = torch.arange(count - 1, 0, -1, dtype=near.dtype, device=near.device)
    steps_left = steps_left.expand(len(near), -1) if jitter is None else steps_left + (0.5 - jitter)
    share = steps_left / count
    if knee is None:
        inner = far - share * (far - near)
    else:
        last = _remaining(far, knee)
        inner = _distance(last + share * (_remaining(near, knee) - last), knee)
    return torch.cat([near, torch.minimum(torch.maximum(inner, near), far), far], dim=1)


@torch.no_grad()
def split(
    ends: Tensor,
    origins: Tensor,
    directions: Tensor,
    tiles: Tiles,
    held: Iterable[int],
    occupied: Occupied | None = None,
) -> list[Samples]:
    """Gives each sample of the lattice to the tile that holds its midpoint: over all tiles, each exactly once.

    Rounded midpoints never turn back along a ray, so those of one tile are neighbours and tiles follow each other in
    the order of :func:`~.rays.cross`.

    Args:
        ends: (R, N + 1) from :func:`lattice`.
        origins: (R, 3).
        directions: (R, 3).
        tiles: K tiles.
        held: those whose samples are wanted, such as :func:`~.tiles.tiles_of_rank`.
        occupied: drops samples in empty space; None keeps all.

    Returns:
        The samples of each tile of ``held``, possibly none.
    """
    start, end = ends[:, :-1], ends[:, 1:]
    midpoints = along(origins[:, None], directions[:, None], (start + end) / 2)
    parts = []
    for tile in held:
        ray, step = tiles.contains(tile, midpoints).nonzero(as_tuple=True)
        if occupied is not None:
            kept = occupied(tile, midpoints[ray, step])
            ray, step = ray[kept], step[kept]
        parts.append(Samples(ray, start[ray, step], end[ray, step]))
    return parts


def along(origins: Tensor, directions: Tensor, t: Tensor) -> Tensor:
    """(..., 3) positions at the distances t (...). One formula for owner and field, so that both see the same bits."""
    return origins + t[..., None] * directions


def seeds_along_rays(origins: Tensor, directions: Tensor, ends: Tensor) -> Tensor:
    """(R·N, 3) midpoints of a lattice (R, N + 1): points to build tiles from where a capture has none."""
    return along(origins[:, None], directions[:, None], (ends[:, :-1] + ends[:, 1:]) / 2).reshape(-1, 3)


def _remaining(t: Tensor, knee: float) -> Tensor:
    """What is left of [0, ∞) beyond t when the knee is half of it; falls from 1 to 0."""
    return torch.where(t < knee, 1 - t / (2 * knee), knee / (2 * t.clamp_min(knee)))


def _distance(remaining: Tensor, knee: float) -> Tensor:
    """The inverse of :func:`_remaining`."""
    return torch.where(remaining > 0.5, 2 * knee * (1 - remaining), knee / (2 * remaining.clamp(1e-30, 0.5)))
