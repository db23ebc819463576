"""Merging splats and ordering their gradients in plain torch, on any device: the twin of cuda/arrival.cu."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from odin_nerfstudio.comm.splat_block import SplatBlock
from odin_nerfstudio.splat.arrival import pack_gradients
from odin_nerfstudio.splat.raster import Splats


class Merged(NamedTuple):
    """Splats of several pieces in ascending order of id."""

    splats: Splats
    """M of them, each field contiguous; ``index`` is where a splat lay in the pieces, one after the other."""
    place: Tensor | None
    """(M,) int64 the inverse of ``index``: where each splat of the pieces is now; None: where it was."""


def merge(pieces: Sequence[Tensor]) -> Merged:
    """See :func:`odin_nerfstudio.splat.fused.leaves.merge`."""
    block = pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))
    index, place = torch.arange(len(block), device=block.device), None
    if len(pieces) > 1:
        order = block[:, :2].reshape(-1).view(torch.int64).argsort()
        place = torch.empty_like(order).index_copy_(0, order, index)
        block, index = block.index_select(0, order), order
    return Merged(Splats(index=index, **SplatBlock.unpack(block)._asdict()), place)


def gradients_in_order(leaves: Splats, place: Tensor | None) -> Tensor:
    """See :func:`odin_nerfstudio.splat.fused.leaves.gradients_in_order`."""
    gradients = pack_gradients(leaves)
    return gradients if place is None else gradients.index_select(0, place)
