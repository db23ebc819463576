"""Merging splats and ordering their gradients on CUDA: the kernels of cuda/arrival.cu.

Leaves are the beginning of a graph and gradients its end, so these are plain functions rather than torch operators,
whose dispatch would cost more than the rest of a call. Twin: ``reference``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from odin_nerfstudio import kernels
from odin_nerfstudio.splat.fused.leaves.reference import Merged
from odin_nerfstudio.splat.raster import Splats
from odin_nerfstudio.splat.unit import DIFFERENTIATED

MOST_PIECES = 64
"""Of one launch; kMaxPieces of the source."""
_SPLAT, _GRAD = 13, 12
"""Columns."""


class _Pieces(ctypes.Structure):
    _fields_ = (
        ("count", ctypes.c_int64),
        ("at", ctypes.c_void_p * MOST_PIECES),
        ("start", ctypes.c_int64 * (MOST_PIECES + 1)),
    )


class _Fields(ctypes.Structure):
    _fields_ = (("at", ctypes.c_void_p * 8),)


class _Gradients(ctypes.Structure):
    _fields_ = (("at", ctypes.c_void_p * 6),)


def merge(pieces: Sequence[Tensor]) -> Merged:
    """See :func:`odin_nerfstudio.splat.fused.leaves.merge`; at most ``MOST_PIECES``."""
    addresses = []
    for piece in pieces:
        assert piece.dtype == torch.float32 and piece.shape[1] == _SPLAT and piece.is_contiguous()
        addresses.append(piece.data_ptr())
    starts = list(accumulate((len(piece) for piece in pieces), initial=0))
    block, count = pieces[0], starts[-1]
    ids = block.new_empty(count, dtype=torch.int64)
    place = torch.empty_like(ids) if len(pieces) > 1 else None
    splats = Splats(
        ids=ids,
        index=torch.empty_like(ids),
        means2d=block.new_empty(count, 2),
        depths=block.new_empty(count),
        conics=block.new_empty(count, 3),
        opacities=block.new_empty(count),
        colors=block.new_empty(count, 3),
        radii=block.new_empty(count, dtype=torch.int32),
    )
    merged = (getattr(splats, name).data_ptr() for name in ("ids", "index", *DIFFERENTIATED, "radii"))
    arguments = _Pieces(len(pieces), (*addresses,), (*starts,)), _Fields((*merged,)), place
    kernels.launch("arrival", "arrival_merge", block.device, *arguments)
    return Merged(splats, place)


def gradients_in_order(leaves: Splats, place: Tensor | None) -> Tensor:
    """See :func:`odin_nerfstudio.splat.fused.leaves.gradients_in_order`."""
    fields = [getattr(leaves, name) for name in DIFFERENTIATED]
    given = [*(field.grad for field in fields), leaves.absgrad]
    gradients = [None if gradient is None else gradient.contiguous() for gradient in given]
    assert all(gradient is None or gradient.dtype == torch.float32 for gradient in gradients)
    addresses = (None if gradient is None else gradient.data_ptr() for gradient in gradients)
    block = leaves.means2d.new_empty(len(leaves.means2d), _GRAD)
    kernels.launch("arrival", "arrival_gradients", block.device, len(block), _Gradients((*addresses,)), place, block)
    return block
