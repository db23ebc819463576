"""Splats of many rows and views, in whatever order they arrive, as the leaves of views; and their gradients back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from odin_nerfstudio.comm.splat_block import SplatBlock, SplatGradBlock
from odin_nerfstudio.splat.raster import Splats
from odin_nerfstudio.splat.unit import DIFFERENTIATED


@torch.no_grad()
def pack(splats: Mapping[int, Splats], views: Sequence[int], device: torch.device) -> Tensor:
    """(M, 14): splats of some views of a group, one view after the other; the last column is the view's number."""
    packed = [torch.empty(0, 14, device=device)]
    for view in views:
        block = SplatBlock(**{name: getattr(splats[view], name) for name in SplatBlock._fields}).pack()
        packed.append(torch.nn.functional.pad(block, (0, 1), value=view))
    return torch.cat(packed)


def merge(arrived: Tensor, views: int) -> tuple[list[Splats], Tensor]:
    """What arrived ((M, 14), in any order) as the splats of each view in ascending order of id, and the order taken."""
    block, slots = SplatBlock.unpack(arrived[:, :-1]), arrived[:, -1].long()
    by_id = torch.argsort(block.ids, stable=True)
    order = by_id[torch.argsort(slots[by_id], stable=True)]
    counts = torch.bincount(slots, minlength=views).tolist()
    splats = []
    for chosen in order.split(counts):
        fields = {name: getattr(block, name)[chosen] for name in DIFFERENTIATED}
        splats.append(Splats(ids=block.ids[chosen], index=chosen, radii=block.radii[chosen], **fields))
    return splats, order


def as_leaves(splats: Splats) -> Splats:
    """The same splats as the beginning of a graph."""
    for name in DIFFERENTIATED:
        getattr(splats, name).requires_grad_()
    return splats


def gradients_as_arrived(leaves: Sequence[Splats], order: Tensor) -> Tensor:
    """(M, 12) gradients of the leaves of all views, in the order in which the splats had arrived."""
    gradients = torch.cat([torch.empty(0, 12, device=order.device), *map(pack_gradients, leaves)])
    arrived = torch.empty_like(gradients)
    arrived[order] = gradients
    return arrived


def pack_gradients(leaves: Splats) -> Tensor:
    """(M, 12) gradients of one view's leaves, zero where the image does not depend on them."""
    grads = {
        name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        for name, leaf in ((name, getattr(leaves, name)) for name in DIFFERENTIATED)
    }
    absgrad = torch.zeros_like(leaves.means2d) if leaves.absgrad is None else leaves.absgrad
    return SplatGradBlock(**grads, absgrad=absgrad).pack()
