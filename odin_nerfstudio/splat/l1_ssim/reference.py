"""The loss in plain torch: any float type, any device."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

WINDOW = 11
"""Side of the windows that SSIM compares, in pixels."""
_DEVIATION = 1.5
_C1, _C2 = 0.01**2, 0.03**2


def l1_ssim(prediction: Tensor, truth: Tensor, ssim_lambda: float) -> Tensor:
    """(1 − λ) · mean |prediction − truth| + λ · (1 − SSIM), as splatfacto computes it.

    Args:
        prediction: (H, W, 3) in [0, 1].
        truth: (H, W, 3) of the same type, or uint8, of which 255 is 1.
        ssim_lambda: λ.

    Returns:
        A scalar, differentiable.
    """
    if truth.dtype == torch.uint8:
        truth = truth.to(prediction.dtype) / 255
    difference = torch.abs(prediction - truth).mean()
    return (1 - ssim_lambda) * difference + ssim_lambda * (1 - _ssim(prediction, truth))


def _ssim(x: Tensor, y: Tensor) -> Tensor:
    """Mean structural similarity (Wang et al. 2004, eq. 13) over the windows that lie within two (H, W, 3) images."""
    mean_x, mean_y = _filtered(x), _filtered(y)
    variance_x, variance_y = _filtered(x * x) - mean_x**2, _filtered(y * y) - mean_y**2
    covariance = _filtered(x * y) - mean_x * mean_y
    luminance = (2 * mean_x * mean_y + _C1) / (mean_x**2 + mean_y**2 + _C1)
    contrast_and_structure = (2 * covariance + _C2) / (variance_x + variance_y + _C2)
    return (luminance * contrast_and_structure).mean()


def _filtered(image: Tensor) -> Tensor:
    """(3, 1, H − 10, W − 10) means in Gaussian windows; a side that is shorter than a window is not filtered."""
    # In float32 whatever the image is, as pytorch_msssim does.
    taps = torch.exp(-((torch.arange(WINDOW, device=image.device) - WINDOW // 2) ** 2) / (2 * _DEVIATION**2))
    taps = (taps / taps.sum()).to(image.dtype)
    planes = image.permute(2, 0, 1)[:, None]
    if image.shape[0] >= WINDOW:
        planes = functional.conv2d(planes, taps.view(1, 1, -1, 1))
    if image.shape[1] >= WINDOW:
        planes = functional.conv2d(planes, taps.view(1, 1, 1, -1))
    return planes
