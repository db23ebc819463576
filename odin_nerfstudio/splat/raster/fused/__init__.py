"""What an owner does with its rows, for all views at once.

From the model's rows to the block of splats that travels, and from gradients of splats back to those of rows.

A *pair* is a row as seen in one view. The pairs of view v are numbers ``offsets[v]`` to ``offsets[v + 1]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from odin_nerfstudio import kernels
from odin_nerfstudio.splat.raster import select_rasterizer
from odin_nerfstudio.splat.raster.fused import reference
from odin_nerfstudio.splat.raster.fused.reference import Sums
from odin_nerfstudio.splat.raster.protocol import RasterSettings, Rows

__all__ = ["Projected", "Sums", "project_rows", "pull_back_rows"]


class Projected(NamedTuple):
    """P pairs after projection and shading."""

    block: Tensor
    """(P, 13) float32, packed as :meth:`~odin_nerfstudio.comm.splat_block.SplatBlock.pack` does. Of a row that the view
    does not see the id is there, and the rest is 0, also the radius."""
    values: Rows
    """Copies of the rows of the pairs, P each: what the way back is computed from, whatever is published meanwhile."""


@torch.no_grad()
def project_rows(
    params: Rows, rows: Tensor, offsets: Sequence[int], table: Tensor, settings: RasterSettings
) -> Projected:
    """Gathers, projects, shades and packs rows for each view that wants them.

    On CUDA it is one launch, and nothing waits for the device.

    Args:
        params: all rows of the model, contiguous float32.
        rows: (P,) int64 rows of the pairs, ascending within a view.
        offsets: V + 1 of them, from 0 to P; on CUDA V ≤ 64.
        table: (V, 18) float32; see :func:`~odin_nerfstudio.splat.raster.camera_table.camera_table`.
        settings: of the renderer.

    Raises:
        ValueError: on CUDA with more views, or with fewer SH coefficients than ``settings.sh_degree`` needs.
    """
    if _has_kernels(params.means):
        from odin_nerfstudio.splat.raster.fused import cuda

        return Projected(*cuda.project_rows(params, rows, offsets, table, settings))
    rasterizer = select_rasterizer(rows.device)
    return Projected(*reference.project_rows(params, rows, offsets, table, settings, rasterizer))


@torch.no_grad()
def pull_back_rows(
    values: Rows,
    offsets: Sequence[int],
    table: Tensor,
    settings: RasterSettings,
    grads: Tensor,
    chosen: Tensor | None = None,
    rows: Tensor | None = None,
    into: Sums | None = None,
) -> dict[str, Tensor]:
    """Takes gradients of splats through the projection, which is computed again, to the raw parameters.

    A pair that its view does not see has the gradient 0. The cameras get none. On CUDA it is one launch, and nothing
    waits for the device; sums of three or more pairs in one place vary in their last bits from run to run.

    Args:
        values, offsets, table, settings: of :func:`project_rows`.
        grads: (S, 12) or (S, 10) float32, packed as :meth:`~odin_nerfstudio.comm.splat_block.SplatGradBlock.pack` does;
            absgrad is ignored.
        chosen: (S,) int64 ascending numbers of the pairs that the gradients are of; None: of all pairs.
        rows: (P,) int64 of all pairs, as ``project_rows`` had them. Goes with ``into``.
        into: what the gradients are added to; it has all of these rows.

    Returns:
        The values of ``into``, or (S, ...) for each parameter.

    Raises:
        ValueError: see :func:`project_rows`.
    """
    assert (into is None) == (rows is None)
    if _has_kernels(values.means):
        from odin_nerfstudio.splat.raster.fused import cuda

        return cuda.pull_back_rows(values, offsets, table, settings, grads, chosen, rows, into)
    rasterizer = select_rasterizer(grads.device)
    return reference.pull_back_rows(values, offsets, table, settings, grads, chosen, rows, into, rasterizer)


def _has_kernels(tensor: Tensor) -> bool:
    return tensor.is_cuda and tensor.dtype == torch.float32 and kernels.available("splat_rows", tensor.device)
