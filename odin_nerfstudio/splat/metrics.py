"""Metrics of a training step, which nothing waits for."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


@torch.no_grad()
def psnr(prediction: Tensor, truth: Tensor) -> Tensor:
    """Peak signal-to-noise ratio, −10 log₁₀ of the mean squared error, in dB.

    Args:
        prediction: any shape, in [0, 1].
        truth: of the same shape and type, or uint8, of which 255 is 1.

    Returns:
        A scalar on the same device; ∞ where the two are equal.
    """
    if truth.dtype == torch.uint8:
        truth = truth.to(prediction.dtype) / 255
    return -10 * functional.mse_loss(prediction, truth).log10()
