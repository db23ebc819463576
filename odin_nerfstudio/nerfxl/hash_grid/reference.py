"""Multiresolution hash encoding in plain torch: any dtype, any device, gradients of any order.

What the kernels are compared with, and what runs where none of them can. It keeps eight features per level and
position for the backward pass, so it needs several times the memory of the kernels.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from odin_nerfstudio.nerfxl.hash_grid.layout import HashGridLayout, Level

_PRIMES = (1, 2654435761, 805459861)


def encode(positions: Tensor, table: Tensor, layout: HashGridLayout) -> Tensor:
    """Interpolates the features of all levels (Müller et al. 2022, §3).

    Args:
        positions: (N, 3) in [0, 1].
        table: (entries, features) of the same dtype.
        layout: of the table.

    Returns:
        (N, levels · features), differentiable with respect to ``positions`` and ``table``.
    """
    return torch.cat([_level(positions, table, level) for level in layout.levels], dim=-1)


def _level(positions: Tensor, table: Tensor, level: Level) -> Tensor:
    """(N, F) features of one level."""
    scaled = positions * level.scale + 0.5
    lower_vertex = scaled.detach().floor()
    above = scaled - lower_vertex
    weights = (1 - above, above)  # of the lower and the upper vertex along each axis
    x, y, z = lower_vertex.long().unbind(-1)
    features = positions.new_zeros(len(positions), table.shape[1])
    for i, j, k in itertools.product((0, 1), repeat=3):
        weight = weights[i][:, 0] * weights[j][:, 1] * weights[k][:, 2]
        features = features + weight[:, None] * table[level.offset + _entry(x + i, y + j, z + k, level)]
    return features


def _entry(x: Tensor, y: Tensor, z: Tensor, level: Level) -> Tensor:
    """(N,) int64 entries within the level of the vertices (x, y, z), int64 (equation 4 for hashed levels)."""
    if level.hashed:
        index = (x * _PRIMES[0]) ^ (y * _PRIMES[1]) ^ (z * _PRIMES[2])
    else:
        index = x + level.resolution * (y + level.resolution * z)
    return index % level.entries
