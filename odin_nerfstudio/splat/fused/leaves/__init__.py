"""Splats as they arrived, as the leaves of a view; and the gradients of the leaves in that order again.

On CUDA each is one launch, and nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from odin_nerfstudio import kernels
from odin_nerfstudio.splat.fused.leaves import reference
from odin_nerfstudio.splat.fused.leaves.reference import Merged
from odin_nerfstudio.splat.raster import Splats

__all__ = ["Merged", "gradients_in_order", "merge"]


@torch.no_grad()
def merge(pieces: Sequence[Tensor]) -> Merged:
    """Splats that come in several pieces, in ascending order of id.

    Args:
        pieces: at least one of (M_i, 13) contiguous float32, packed as
            :meth:`~odin_nerfstudio.comm.splat_block.SplatBlock.pack` does; each ascends in id, and no id is in two.
    """
    filled = [piece for piece in pieces if len(piece)] or [pieces[0]]
    if _has_kernels(filled[0]):
        from odin_nerfstudio.splat.fused.leaves import cuda

        if len(filled) <= cuda.MOST_PIECES:
            return cuda.merge(filled)
    return reference.merge(filled)


@torch.no_grad()
def gradients_in_order(leaves: Splats, place: Tensor | None) -> Tensor:
    """The gradients of merged splats, zero where the image does not depend on them, in the order of their pieces.

    Args:
        leaves: of :func:`merge`, after the backward; their gradients are float32.
        place: of :func:`merge`.

    Returns:
        (M, 12), packed as :meth:`~odin_nerfstudio.comm.splat_block.SplatGradBlock.pack` does.
    """
    if _has_kernels(leaves.means2d):
        from odin_nerfstudio.splat.fused.leaves import cuda

        return cuda.gradients_in_order(leaves, place)
    return reference.gradients_in_order(leaves, place)


def _has_kernels(tensor: Tensor) -> bool:
    return tensor.is_cuda and tensor.dtype == torch.float32 and kernels.available("arrival", tensor.device)
