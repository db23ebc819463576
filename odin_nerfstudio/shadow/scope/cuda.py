"""Scopes of several views on CUDA: the kernel of cuda/cull.cu as a torch operator."""

from __future__ import annotations

import torch
from torch import Tensor

from odin_nerfstudio import kernels
from odin_nerfstudio.shadow.scope.reference import Drift

_NO_DRIFT = (None, None, 1.0)


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
    """See :func:`odin_nerfstudio.shadow.scope.views_in_scope`; means, scales and cameras float32 on one CUDA device.

    Raises:
        KernelUnavailable: without a CUDA compiler, or where it fails.
    """
    drifts = *(means_drift or _NO_DRIFT), *(scales_drift or _NO_DRIFT)
    return torch.ops.odin_nerfstudio.cull_views.default(means, scales, cameras, *drifts, near, far, eps2d)


def _views_in_scope(
    means: Tensor,
    scales: Tensor,
    cameras: Tensor,
    means_step: Tensor | None,
    means_table: Tensor | None,
    means_factor: float,
    scales_step: Tensor | None,
    scales_table: Tensor | None,
    scales_factor: float,
    near: float,
    far: float,
    eps2d: float,
) -> Tensor:
    words = _fake(means, scales, cameras)
    drifts: list[kernels.Argument] = []
    for row_step, table, factor in (
        (means_step, means_table, means_factor),
        (scales_step, scales_table, scales_factor),
    ):
        assert table is None or table.dtype == torch.float64
        drifts += [row_step, table, 0 if table is None else table.shape[0], factor]
    sizes = means.shape[0], cameras.shape[0]
    rows = means.contiguous(), scales.contiguous(), cameras.contiguous()
    kernels.launch("cull", "cull_views", means.device, *sizes, *rows, *drifts, near, far, eps2d, words)
    return words


def _fake(means: Tensor, scales: Tensor, cameras: Tensor, *others: object) -> Tensor:
    return means.new_empty(cameras.shape[0], (means.shape[0] + 63) // 64, dtype=torch.int64)


_library = torch.library.Library("odin_nerfstudio", "FRAGMENT")
_library.define(
    "cull_views(Tensor means, Tensor scales, Tensor cameras, Tensor? means_step, Tensor? means_table, "
    "float means_factor, Tensor? scales_step, Tensor? scales_table, float scales_factor, float near, float far, "
    "float eps2d) -> Tensor"
)
_library.impl("cull_views", _views_in_scope, "CUDA")
torch.library.register_fake("odin_nerfstudio::cull_views", _fake, lib=_library)
