"""Splats in pieces, as they arrive from several owners, and what merging them has to give."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from odin_nerfstudio.comm.splat_block import SplatBlock, SplatGradBlock
from odin_nerfstudio.splat.arrival import as_leaves
from odin_nerfstudio.splat.fused.leaves import Merged
from odin_nerfstudio.splat.raster import Splats
from odin_nerfstudio.splat.unit import DIFFERENTIATED

SIZES = [(0,), (1,), (33,), (0, 0), (5, 0), (1, 1), (0, 7, 0), (257, 300), (4, 1000, 0, 77), tuple(range(64))]
"""Splats of the pieces."""


def make_pieces(sizes: Sequence[int], device: str = "cpu", huge: bool = False) -> list[Tensor]:
    """(M_i, 13) rows of one block, so that they begin anywhere; ``huge``: ids of more than 32 bits."""
    count, random = sum(sizes), torch.Generator().manual_seed(len(sizes) * 1009 + sum(sizes))
    ids = torch.randperm(3 * count + 1, generator=random)[:count]
    if huge:
        ids = ids * (2**40 + 12_345)
    ids = torch.cat([torch.empty(0, dtype=torch.int64), *(piece.sort().values for piece in ids.split(list(sizes)))])
    widths = {"means2d": (2,), "depths": (), "conics": (3,), "opacities": (), "colors": (3,)}
    fields = {name: torch.randn(count, *width, generator=random) for name, width in widths.items()}
    radii = torch.randint(0, 2**31 - 1, (count,), generator=random, dtype=torch.int32)
    return list(SplatBlock(ids, **fields, radii=radii).pack().to(device).split(list(sizes)))


def assert_merges(merge: Callable[[Sequence[Tensor]], Merged], pieces: Sequence[Tensor]) -> Merged:
    """Every splat is where its id belongs, bit by bit."""
    splats, place = merge(pieces)
    arrived = torch.cat(list(pieces))
    ids = SplatBlock.unpack(arrived).ids
    assert torch.equal(splats.ids, ids.sort().values)
    assert splats.index.dtype == torch.int64 and torch.equal(ids[splats.index], splats.ids)
    if place is None:
        assert torch.equal(splats.ids, ids)
    else:
        assert torch.equal(splats.ids[place], ids)
    fields = {name: getattr(splats, name) for name in SplatBlock._fields}
    assert all(field.is_contiguous() for field in fields.values()) and splats.radii.dtype == torch.int32
    packed = SplatBlock(**fields).pack()
    assert torch.equal(packed.view(torch.int32), arrived[splats.index].view(torch.int32))
    return Merged(splats, place)


def assert_returns(
    gradients_in_order: Callable[[Splats, Tensor | None], Tensor], merged: Merged, *without: str
) -> None:
    """Gradients of the leaves are those of the splats as they had arrived; ``without`` have none."""
    leaves, place = as_leaves(merged.splats), merged.place
    random = torch.Generator().manual_seed(len(leaves.ids))
    expected = {}
    for name in (*DIFFERENTIATED, "absgrad"):
        like = leaves.means2d if name == "absgrad" else getattr(leaves, name)
        gradient = torch.randn(like.shape, generator=random).to(like.device)
        expected[name] = torch.zeros_like(gradient) if name in without else gradient
        given = None if name in without else gradient
        if name == "absgrad":
            leaves.absgrad = given
        else:
            getattr(leaves, name).grad = given
    found, packed = gradients_in_order(leaves, place), SplatGradBlock(**expected).pack()
    assert found.shape == (len(leaves.ids), 12) and found.is_contiguous() and not found.requires_grad
    assert torch.equal(found, packed[leaves.index.argsort()])
