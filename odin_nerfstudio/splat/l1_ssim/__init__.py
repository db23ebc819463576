"""The loss between a rendered and a true image: a kernel on CUDA, plain torch elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor

from odin_nerfstudio import kernels
from odin_nerfstudio.splat.l1_ssim import reference

__all__ = ["is_fused", "l1_ssim"]


def is_fused(device: torch.device) -> bool:
    """Whether images on a device are compared by one kernel; if a CUDA device has none, it is said once."""
    return device.type == "cuda" and kernels.available("l1_ssim", device)


def l1_ssim(prediction: Tensor, truth: Tensor, ssim_lambda: float) -> Tensor:
    """(1 − λ) · mean |prediction − truth| + λ · (1 − SSIM), as splatfacto computes it; see :func:`reference.l1_ssim`.

    Args:
        prediction: (H, W, 3) in [0, 1].
        truth: (H, W, 3) of the same type, or uint8, of which 255 is 1.
        ssim_lambda: λ.

    Returns:
        A scalar, differentiable (once, by the kernel) with respect to ``prediction``.
    """
    known = prediction.dtype == torch.float32 and truth.dtype in (torch.float32, torch.uint8)
    if known and min(prediction.shape[:2]) >= reference.WINDOW and is_fused(prediction.device):
        from odin_nerfstudio.splat.l1_ssim import cuda

        return cuda.l1_ssim(prediction, truth, ssim_lambda)
    return reference.l1_ssim(prediction, truth, ssim_lambda)
