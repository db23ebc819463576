"""Losses over all primitives, as sums over one rank's rows: the ranks' sums add up to the mean over the whole scene.

Each is divided by the number of primitives of all ranks and uses arithmetic that does not depend on a row's place, so
on the CPU the gradient of a row is the same to the last bit whichever rank owns it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from odin_nerfstudio.splat.densify.rowwise import sigmoid


def anisotropy(scales: Tensor, bound: float, total: int) -> Tensor:
    """Splatfacto's bound on the ratio of the axes of a primitive (Xie et al. 2024, PhysGaussian).

    Args:
        scales: (N, 3) logarithms of the axes of this rank's primitives.
        bound: ratio of the longest to the shortest axis up to which nothing is lost.
        total: number of primitives of all ranks.

    Returns:
        () this rank's share of the mean excess.
    """
    axes = torch.exp(scales)
    ratio = axes.amax(dim=-1) / axes.amin(dim=-1)
    return (torch.maximum(ratio, ratio.new_tensor(bound)) - bound).sum() / total


def mean_opacity(opacities: Tensor, total: int) -> Tensor:
    """This rank's share of the mean opacity (Kheradmand et al. 2024, §3, to need fewer primitives).

    Args:
        opacities: (N, 1) logits of this rank's primitives.
        total: number of primitives of all ranks.

    Returns:
        ().
    """
    # Below −80 the gradient is zero in float32, but would be computed as 0 · ∞.
    return sigmoid(opacities.clamp_min(-80)).sum() / total


def mean_scale(scales: Tensor, total: int) -> Tensor:
    """This rank's share of the mean length of the axes (Kheradmand et al. 2024, §3, to need fewer primitives).

    Args:
        scales: (N, 3) logarithms of the axes of this rank's primitives.
        total: number of primitives of all ranks.

    Returns:
        (), world units.
    """
    return torch.exp(scales).sum() / (3 * total)
