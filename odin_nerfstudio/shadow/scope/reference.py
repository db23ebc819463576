"""Scopes in plain torch, on any device. The twin of the kernel of cuda/cull.cu."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from odin_nerfstudio.shadow.bitmap.backend import select_backend


class Drift(NamedTuple):
    """What bounds the move of each of N rows, by the step that the row is up to date with."""

    row_step: Tensor
    """(N,) float32, whole numbers."""
    table: Tensor
    """(T,) float64 contiguous, T > 0: the bound by step, the last one also for later steps."""
    factor: float = 1.0
    """Of the whole table."""

    def bounds(self, dtype: torch.dtype) -> Tensor:
        """(N,) in another type, never less than what they are in float64."""
        bounds = self.factor * self.table[self.row_step.long().clamp(0, len(self.table) - 1)]
        near = bounds.to(dtype)
        return torch.where(near < bounds, near.nextafter(torch.full_like(near, math.inf)), near)


_ROUNDING = 1e-4
"""Relative slack for the float32 rounding of projections that are computed elsewhere in another order."""


def in_scope(
    means: Tensor,
    scales: Tensor,
    viewmat: Tensor,
    K: Tensor,
    width: int | Tensor,
    height: int | Tensor,
    *,
    near: float,
    far: float,
    eps2d: float,
    means_drift: Tensor | None = None,
    scales_drift: Tensor | None = None,
) -> Tensor:
    """Rows that one camera may touch, whatever their rotation and wherever in the guard band they end up.

    Each primitive is replaced by the ball of its largest axis; the ball's centre ranges over the guard band. Interval
    arithmetic over camera space then bounds the splat's centre, and ‖J‖² = (f/z)²(1 + u² + v²) its EWA radius, with
    u, v limited as in the projection (Zwicker et al. 2001; gsplat's ``fully_fused_projection``).

    Args:
        means: (N, 3) world positions, as stored, possibly late.
        scales: (N, 3) logarithms of the axes, as stored, possibly late.
        viewmat: (4, 4) world → camera.
        K: (3, 3) intrinsics.
        width: image width in pixels.
        height: image height in pixels.
        near: nearest camera z that is rendered.
        far: farthest camera z that is rendered.
        eps2d: added to the diagonal of the projected covariance, pixels².
        means_drift: (N,) bound on the move of any coordinate of ``means`` before it is read; None: rows are current.
        scales_drift: (N,) the same for ``scales``.

    Returns:
        (N,) bool.
    """
    x, y, z = (means @ viewmat[:3, :3].T + viewmat[:3, 3]).unbind(-1)
    band = _ROUNDING * (x.abs() + y.abs() + z.abs())
    if means_drift is not None:
        band = band + math.sqrt(3) * means_drift
    nearest, farthest = (z - band).clamp_min(near), (z + band).clamp_min(near)
    largest = scales.amax(dim=-1)
    axis = torch.exp(largest if scales_drift is None else largest + scales_drift)

    centres, slopes = [], []
    for coordinate, focal, centre, size in ((x, K[0, 0], K[0, 2], width), (y, K[1, 1], K[1, 2], height)):
        low, high = coordinate - band, coordinate + band
        low = low / torch.where(low < 0, nearest, farthest)
        high = high / torch.where(high > 0, nearest, farthest)
        limit = torch.maximum(centre, size - centre) / focal + 0.15 * size / focal
        slopes.append(torch.minimum(torch.maximum(low.abs(), high.abs()), limit))
        centres.append((low * focal + centre, high * focal + centre, size))
    stretch = torch.maximum(K[0, 0], K[1, 1]) / nearest
    variance = (axis * stretch) ** 2 * (1 + slopes[0] ** 2 + slopes[1] ** 2) + eps2d
    # gsplat takes λ_max as b + √max(0.1, b² − det), up to √0.1 more than the eigenvalue, and rounds the radius up.
    radius = 3 * torch.sqrt(variance + math.sqrt(0.1)) * (1 + _ROUNDING) + 1

    inside = (z + band >= near) & (z - band <= far)
    for low, high, size in centres:
        inside &= (high + radius > 0) & (low - radius < size)
    return inside


def views_in_scope(
    means: Tensor,
    scales: Tensor,
    cameras: Tensor,
    *,
    near: float,
    far: float,
    eps2d: float,
    means_drift: Drift | None = None,
    scales_drift: Drift | None = None,
) -> Tensor:
    """See :func:`odin_nerfstudio.shadow.scope.views_in_scope`."""
    pose = cameras.new_zeros(len(cameras), 4, 4)
    pose[:, :3] = cameras[:, :12].unflatten(1, (3, 4))
    K = torch.diag_embed(torch.nn.functional.pad(cameras[:, 12:14], (0, 1)))
    K[:, :2, 2] = cameras[:, 14:16]
    drifts = {
        name: drift and drift.bounds(means.dtype)
        for name, drift in (("means_drift", means_drift), ("scales_drift", scales_drift))
    }
    inside = [
        in_scope(
            means,
            scales,
            viewmat,
            intrinsics,
            width,
            height,
            near=near,
            far=far,
            eps2d=eps2d,
            **drifts,
        )
        for viewmat, intrinsics, (width, height) in zip(pose, K, cameras[:, 16:], strict=True)
    ]
    mask = torch.stack(inside) if inside else means.new_zeros(0, len(means), dtype=torch.bool)
    return select_backend(mask.device).pack(mask)
