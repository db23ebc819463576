"""Rows to splats and back by any renderer, view by view.

What the kernels are compared with, and what runs without them. Any float type that the renderer takes. Unlike the
kernels it waits for the device: for the views' sizes, and for how many rows each view sees.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from odin_nerfstudio.comm.splat_block import GRADIENTS, SplatBlock, SplatGradBlock
from odin_nerfstudio.shadow.bitmap import Index
from odin_nerfstudio.splat.raster.camera_table import camera_of
from odin_nerfstudio.splat.raster.protocol import Rasterizer, RasterSettings, Rows, Splats

PARAMETERS = Rows._fields[1:]
"""Fields of a row that have a gradient, in the order of ``Rows``."""


class Sums(NamedTuple):
    """Where the gradients of pairs are added up, row by row."""

    values: dict[str, Tensor]
    """(R, ...) contiguous for each parameter."""
    active: Tensor
    """(R,) bool, set where a pair's splat has any gradient that is not zero, whether or not its view sees the row."""
    places: Index
    """Where each row is in them."""


def project_rows(
    params: Rows, rows: Tensor, offsets: Sequence[int], table: Tensor, settings: RasterSettings, rasterizer: Rasterizer
) -> tuple[Tensor, Rows]:
    """The block (P, 13) float32 and the copies of the rows; see the package's ``project_rows``."""
    with torch.no_grad():
        values = Rows(*(field.index_select(0, rows) for field in params))
        block = torch.zeros(len(rows), 13, device=rows.device)
        block[:, :2] = values.ids.view(-1, 1).view(torch.float32)
        for first, _, splats in project_views(values, offsets, table, settings, rasterizer):
            fields = {name: getattr(splats, name) for name in SplatBlock._fields}
            block[first + splats.index] = SplatBlock(**fields).pack()
    return block, values


def pull_back_rows(
    values: Rows,
    offsets: Sequence[int],
    table: Tensor,
    settings: RasterSettings,
    grads: Tensor,
    chosen: Tensor | None,
    rows: Tensor | None,
    into: Sums | None,
    rasterizer: Rasterizer,
) -> dict[str, Tensor]:
    """Gradients of the rows by autograd; see the package's ``pull_back_rows``."""
    if chosen is not None:
        values = Rows(*(field.index_select(0, chosen) for field in values))
        offsets = torch.searchsorted(chosen, torch.tensor(offsets, device=chosen.device)).tolist()
    pieces: dict[str, list[Tensor]] = {name: [getattr(values, name)[:0]] for name in PARAMETERS}
    with torch.enable_grad():
        for first, leaves, splats in project_views(values, offsets, table, settings, rasterizer):
            if len(splats.ids):
                upstream = SplatGradBlock.unpack(grads[first + splats.index])
                names = SplatGradBlock._fields[:-1]
                torch.autograd.backward(
                    [getattr(splats, name) for name in names], [getattr(upstream, name) for name in names]
                )
            for name, piece in pieces.items():
                leaf = getattr(leaves, name)
                piece.append(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)
    gradients = {name: torch.cat(piece) for name, piece in pieces.items()}
    if into is None:
        return gradients
    assert rows is not None
    place = into.places.place(rows if chosen is None else rows.index_select(0, chosen))
    for name, gradient in gradients.items():
        into.values[name].index_add_(0, place, gradient)
    into.active[place[(grads[:, :GRADIENTS] != 0).any(1)]] = True
    return into.values


def project_views(
    values: Rows, offsets: Sequence[int], table: Tensor, settings: RasterSettings, rasterizer: Rasterizer
) -> Iterator[tuple[int, Rows, Splats]]:
    """For each view that has pairs: the first of them, their rows as leaves, and its splats."""
    for (first, last), camera in zip(pairwise(offsets), table, strict=True):
        if last > first:
            ids, *fields = (field.detach()[first:last] for field in values)
            leaves = Rows(ids, *(field.requires_grad_(torch.is_grad_enabled()) for field in fields))
            yield first, leaves, rasterizer.project(leaves, camera_of(camera), settings)
