"""Which backend encodes positions on which device."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from odin_nerfstudio.kernels import KernelUnavailable
from odin_nerfstudio.nerfxl.hash_grid import reference
from odin_nerfstudio.nerfxl.hash_grid.layout import HashGridLayout


class Encoder(Protocol):
    """A backend's ``encode``."""

    def __call__(self, positions: Tensor, table: Tensor, layout: HashGridLayout) -> Tensor:
        """Features of (N, 3) positions; see :func:`reference.encode`.

        All backends give gradients with respect to the table and to the positions.
        """


def select_encoder(device: torch.device, dtype: torch.dtype) -> Encoder:
    """The backend for tables on ``device``; nothing is imported or compiled for the others.

    float32 on the CPU: numba. float32 on CUDA: tiny-cuda-nn if it can be imported, else our kernel, else plain torch,
    with one warning. Other types and devices: plain torch.
    """
    if dtype != torch.float32 or device.type not in ("cpu", "cuda"):
        return reference.encode
    if device.type == "cpu":
        from odin_nerfstudio.nerfxl.hash_grid import numba

        return numba.encode
    return _on_cuda(device)


@cache
def _on_cuda(device: torch.device) -> Encoder:
    try:
        from odin_nerfstudio.nerfxl.hash_grid import tiny_cuda_nn

        return tiny_cuda_nn.encode
    except (ImportError, OSError):  # OSError: it was built for another compute capability
        pass
    try:
        from odin_nerfstudio.nerfxl.hash_grid import cuda

        cuda.prepare(device)
        return cuda.encode
    except KernelUnavailable as reason:
        warnings.warn(f"Hash grids on {device} use plain torch, which is several times slower. {reason}", stacklevel=2)
        return reference.encode
