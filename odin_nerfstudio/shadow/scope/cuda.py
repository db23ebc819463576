"""Scopes of several views on CUDA: the kernel of cuda/cull.cu as a torch operator."""

from __future__ import annotations

import torch
from torch import Tensor

from odin_nerfstudio import kernels
from odin_nerfstudio.shadow.scope.reference import Drift


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
    """See :func:`odin_nerfstudio.shadow.scope.views_in_scope`; all tensors float32 on one CUDA device.

    Raises:
        KernelUnavailable: without a CUDA compiler, or where it fails.
    """
    drifts = *(means_drift or (None, None)), *(scales_drift or (None, None))
    return torch.ops.odin_nerfstudio.cull_views.default(means, scales, cameras, *drifts, near, far, eps2d)


def _views_in_scope(
    means: Tensor,
    scales: Tensor,
    cameras: Tensor,
    means_step: Tensor | None,
    means_table: Tensor | None,
    scales_step: Tensor | None,
    scales_table: Tensor | None,
    near: float,
    far: float,
    eps2d: float,
) -> Tensor:
    words = _fake(means, scales, cameras)
    drifts: list[kernels.Argument] = []
    for row_step, table in ((means_step, means_table), (scales_step, scales_table)):
        if row_step is None or table is None:
            drifts += [None, None, 0]
        else:
            drifts += [row_step.contiguous(), table.contiguous(), len(table)]
    rows = means.contiguous(), scales.contiguous()
    numbers = float(near), float(far), float(eps2d)
    sizes = len(means), len(cameras)
    kernels.launch("cull", "cull_views", means.device, *sizes, *rows, cameras.contiguous(), *drifts, *numbers, words)
    return words


def _fake(means: Tensor, scales: Tensor, cameras: Tensor, *others: object) -> Tensor:
    return means.new_empty(cameras.shape[0], (means.shape[0] + 63) // 64, dtype=torch.int64)


_library = torch.library.Library("odin_nerfstudio", "FRAGMENT")
_library.define(
    "cull_views(Tensor means, Tensor scales, Tensor cameras, Tensor? means_step, Tensor? means_table, "
    "Tensor? scales_step, Tensor? scales_table, float near, float far, float eps2d) -> Tensor"
)
_library.impl("cull_views", _views_in_scope, "CUDA")
torch.library.register_fake("odin_nerfstudio::cull_views", _fake, lib=_library)
