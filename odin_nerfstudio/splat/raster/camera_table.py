"""Cameras as rows of a table, which is how kernels for many views at once take them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from odin_nerfstudio.splat.raster.protocol import PinholeCamera

COLUMNS = 18
"""World → camera, 3×4 row by row; fx, fy, cx, cy in pixels; width and height in pixels."""


@torch.no_grad()
def camera_table(cameras: Sequence[PinholeCamera]) -> Tensor:
    """Cameras as rows.

    Args:
        cameras: V > 0 of them, on one device.

    Returns:
        (V, 18), of the cameras' type and on their device; see :data:`COLUMNS`. No gradient goes through it.
    """
    return torch.stack([camera.row for camera in cameras])


def camera_of(row: Tensor) -> PinholeCamera:
    """The camera of one row ((18,)) of a table; waits for the device."""
    viewmat = torch.cat([row[:12], row.new_tensor([0, 0, 0, 1])]).view(4, 4)
    fx, fy, cx, cy = row[12:16]
    zero, one = torch.zeros_like(fx), torch.ones_like(fx)
    K = torch.stack([fx, zero, cx, zero, fy, cy, zero, zero, one]).view(3, 3)
    return PinholeCamera(viewmat, K, int(row[16]), int(row[17]))
