"""Which primitives a view may read: a conservative superset of what its exact render touches, known before reading."""

from __future__ import annotations

import torch
from torch import Tensor

from odin_nerfstudio import kernels
from odin_nerfstudio.shadow.scope import reference
from odin_nerfstudio.shadow.scope.reference import Drift, in_scope

__all__ = ["Drift", "in_scope", "views_in_scope"]


def views_in_scope(
    means: Tensor,
    scales: Tensor,
    cameras: Tensor,
    *,
    near: float,
    far: float,
    eps2d: float,
    means_drift: Drift | None = None,
    scales_drift: Drift | None = None,
) -> Tensor:
    """Rows that each of several cameras may touch, as sets; nothing waits for the device.

    Args:
        means: (N, 3) world positions, as stored, possibly late.
        scales: (N, 3) logarithms of the axes, as stored, possibly late.
        cameras: (V, 18) in the type of ``means``: the first three rows of world → camera, row by row; fx, fy, cx, cy,
            width and height in pixels.
        near: nearest camera z that is rendered.
        far: farthest camera z that is rendered.
        eps2d: added to the diagonal of the projected covariance, pixels².
        means_drift: bound on the move of any coordinate of ``means`` before it is read; None: rows are current.
        scales_drift: the same for ``scales``.

    Returns:
        (V, ⌈N/64⌉) int64: the ``words`` of a :class:`~odin_nerfstudio.shadow.bitmap.Bitmap` of size N for each camera.
    """
    backend = reference.views_in_scope
    if means.is_cuda and means.dtype == torch.float32 and kernels.available("cull", means.device):
        from odin_nerfstudio.shadow.scope import cuda

        backend = cuda.views_in_scope
    return backend(
        means,
        scales,
        cameras,
        near=near,
        far=far,
        eps2d=eps2d,
        means_drift=means_drift,
        scales_drift=scales_drift,
    )
