"""2D splats and their gradients as blocks of float32 columns, bit by bit (design §3.1, 3 and 6)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

GRADIENTS = 10
"""Columns of a gradient block before those of absgrad."""


class SplatBlock(NamedTuple):
    """Projected, shaded splats on their way from owner to renderer; the fields are those of the renderers' splats."""

    ids: Tensor
    """(M,) int64 global ids."""
    means2d: Tensor
    """(M, 2) float32 centre in pixels."""
    depths: Tensor
    """(M,) float32 camera z."""
    conics: Tensor
    """(M, 3) float32 upper triangle of the inverse 2D covariance."""
    opacities: Tensor
    """(M,) float32."""
    colors: Tensor
    """(M, 3) float32."""
    radii: Tensor
    """(M,) int32 screen radius in pixels."""

    def pack(self) -> Tensor:
        """One block of (M, 13) float32; integers travel as the bits of floats."""
        ids, radii = self.ids.view(-1, 1).view(torch.float32), self.radii.view(-1, 1).view(torch.float32)
        depths, opacities = self.depths[:, None], self.opacities[:, None]
        return torch.cat([ids, self.means2d, depths, self.conics, opacities, self.colors, radii], dim=1)

    @staticmethod
    def unpack(block: Tensor) -> SplatBlock:
        """The inverse of :meth:`pack`, each field in memory of its own."""
        ids, means2d, depths, conics, opacities, colors, radii = _columns(block, [2, 2, 1, 3, 1, 3, 1])
        ids, radii = ids.view(torch.int64)[:, 0], radii.view(torch.int32)[:, 0]
        return SplatBlock(ids, means2d, depths[:, 0], conics, opacities[:, 0], colors, radii)


class SplatGradBlock(NamedTuple):
    """∂loss/∂splat on the way back. No ids: the owner knows which splats it sent, in which order."""

    means2d: Tensor
    """(M, 2) float32."""
    depths: Tensor
    """(M,) float32."""
    conics: Tensor
    """(M, 3) float32."""
    opacities: Tensor
    """(M,) float32."""
    colors: Tensor
    """(M, 3) float32."""
    absgrad: Tensor
    """(M, 2) float32 Σ over pixels of |∂loss/∂means2d|; (M, 0) where the run does not need it."""

    def pack(self) -> Tensor:
        """One block of (M, 12) float32; (M, 10) without absgrad."""
        depths, opacities = self.depths[:, None], self.opacities[:, None]
        return torch.cat([self.means2d, depths, self.conics, opacities, self.colors, self.absgrad], dim=1)

    @staticmethod
    def unpack(block: Tensor) -> SplatGradBlock:
        """The inverse of :meth:`pack`, each field in memory of its own."""
        widths = [2, 1, 3, 1, 3, block.shape[1] - GRADIENTS]
        means2d, depths, conics, opacities, colors, absgrad = _columns(block, widths)
        return SplatGradBlock(means2d, depths[:, 0], conics, opacities[:, 0], colors, absgrad)


def _columns(block: Tensor, widths: list[int]) -> list[Tensor]:
    return [part.clone(memory_format=torch.contiguous_format) for part in block.split(widths, dim=1)]
