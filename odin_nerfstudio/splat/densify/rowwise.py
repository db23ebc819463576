"""Arithmetic whose result for a row does not depend on the rows beside it.

torch's CPU kernels of ``sigmoid`` and ``pow`` round differently in the vectorised body of a tensor and in its tail, and
matrix products depend on their size. What is here, exp, log, sqrt and the four operations do not.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e⁻ˣ), of any shape."""
    return 1 / (1 + torch.exp(-x))


def logit(p: Tensor) -> Tensor:
    """log(p / (1 − p)), of any shape."""
    return torch.log(p) - torch.log(1 - p)


def norm(vectors: Tensor) -> Tensor:
    """(R,) Euclidean lengths of (R, D) vectors."""
    return torch.sqrt(_squares(vectors))


def rotate(quats: Tensor, vectors: Tensor) -> Tensor:
    """Rotates vectors by quaternions q = (w, u): v + 2 (w u×v + u×(u×v)) / |q|².

    Args:
        quats: (R, 4) w, x, y, z of any length but zero.
        vectors: (R, 3).
    """
    w, u = quats[:, :1], quats[:, 1:]
    across = torch.linalg.cross(u, vectors)
    return vectors + 2 * (w * across + torch.linalg.cross(u, across)) / _squares(quats)[:, None]


def conjugate(quats: Tensor) -> Tensor:
    """The (R, 4) inverse rotations."""
    return torch.cat([quats[:, :1], -quats[:, 1:]], dim=1)


def _squares(vectors: Tensor) -> Tensor:
    total = torch.zeros_like(vectors[:, 0])
    for column in (vectors * vectors).unbind(dim=1):
        total = total + column
    return total
