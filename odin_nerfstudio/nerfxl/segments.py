"""What one tile contributes to each ray: the six numbers that ranks exchange (NeRF-XL §3.2; design §4)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from odin_nerfstudio.nerfxl.lattice import Samples

WIDTH = 6
"""Numbers per ray and tile."""
_OPAQUE = 750.0
"""Optical depth behind which float64 sees nothing: exp(−750) is 0. More of it changes neither values nor gradients."""


def integrate(samples: Samples, sigma: Tensor, rgb: Tensor, reference: Tensor) -> Tensor:
    """Volume rendering of one tile's samples alone, differentiable in ``sigma`` and ``rgb``.

    With the transmittance Tⱼ from the first sample of the tile to sample j and the weight wⱼ = Tⱼ (1 − exp(−σⱼδⱼ)):

    - optical depth Σσδ. It stands for both T = exp(−·) and A = 1 − T, of which one alone would lose the other's
      small values to rounding.
    - colour C = Σ w c
    - depth D = Σ w (m − reference), m the midpoint of the interval
    - distortion L = Σᵢⱼ wᵢwⱼ|mᵢ − mⱼ| + ⅓ Σ w²δ (mip-NeRF 360, eq. 15). A stretch between neighbouring midpoints
      counts in |mᵢ − mⱼ| of every pair it lies between, so the double sum is 2 Σ stretch · (weight before) ·
      (weight after): linear cost, and positive terms that do not cancel.

    A ray without samples has zeros.

    Args:
        samples: S packed samples.
        sigma: (S,) density ≥ 0 per unit of t.
        rgb: (S, 3).
        reference: (R,) distance along each ray that depths are counted from, near the samples (float32 cancels
            badly otherwise), such as the tile's column of :attr:`~.rays.Crossings.enter`.

    Returns:
        (R, 6) optical depth, C, D, L.
    """
    ray, start, end = samples
    delta = end - start
    optical = (sigma * delta).clamp(max=_OPAQUE)
    before, total = running_sum(optical, ray, len(reference))
    reached = torch.exp(-before)
    weight = reached * -torch.expm1(-optical)
    offset = ((start - reference[ray]) + (end - reference[ray])) / 2
    stretch = F.pad((start[1:] - start[:-1]) + (end[1:] - end[:-1]), (1, 0))[: len(ray)] / 2
    # Before a ray's first sample there is no weight, so the step from one ray to the next does not count.
    pairs = stretch * -torch.expm1(-before) * reached * -torch.expm1(before - total[ray])
    moments = torch.stack([weight * offset, weight**2 * delta / 3 + 2 * pairs], dim=1)
    summed = weight.new_zeros(len(reference), WIDTH - 1)
    summed = summed.index_add(0, ray, torch.cat([weight[:, None] * rgb, moments], dim=1))
    return torch.cat([total[:, None], summed], dim=1)


def running_sum(values: Tensor, ray: Tensor, rays: int) -> tuple[Tensor, Tensor]:
    """(S,) sum over the earlier samples of the same ray, and (R,) over all of them.

    One running sum over the whole packed array would give each ray the rounding of all rays before it; so rays are
    laid out as rows, which is at most the size of the lattice.
    """
    counts = torch.bincount(ray, minlength=rays)
    width = int(counts.max()) + 1 if rays else 1
    place = torch.arange(len(ray), device=ray.device) - (counts.cumsum(0) - counts)[ray]
    # A zero in front of every row: what stands at a sample's place is then the sum before it.
    cells = ray * width + place
    rows = values.new_zeros(rays * width).index_copy(0, cells + 1, values).view(rays, width).cumsum(dim=1)
    return rows.reshape(-1)[cells], rows[:, -1]
