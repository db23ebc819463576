"""Renderers of Gaussians behind one protocol: numba on the CPU, gsplat on CUDA, plain torch as the reference."""

from __future__ import annotations

import torch

from odin_nerfstudio.errors import UserError
from odin_nerfstudio.splat.raster.protocol import (
    Image,
    PinholeCamera,
    RasterizeMode,
    Rasterizer,
    RasterSettings,
    Rows,
    Splats,
)

__all__ = [
    "Image",
    "PinholeCamera",
    "RasterSettings",
    "RasterizeMode",
    "Rasterizer",
    "Rows",
    "Splats",
    "select_rasterizer",
]


def select_rasterizer(device: torch.device | str) -> Rasterizer:
    """The backend for tensors on ``device``; nothing is imported or compiled for the others.

    Raises:
        UserError: if there is none.
    """
    kind = torch.device(device).type
    if kind == "cpu":
        from odin_nerfstudio.splat.raster.numba import NumbaRasterizer

        return NumbaRasterizer()
    if kind == "cuda":
        from odin_nerfstudio.splat.raster.gsplat import GsplatRasterizer

        return GsplatRasterizer()
    raise UserError(f"Gaussians can be rendered on the devices 'cpu' and 'cuda', not on {kind!r}.")
