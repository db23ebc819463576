"""LPIPS that can be absent."""

from __future__ import annotations

import math

import torch
from nerfstudio.utils.rich_utils import CONSOLE
from torch import Tensor


class LazyLPIPS:
    """Learned perceptual image patch similarity (Zhang et al. 2018), built at its first use.

    Its AlexNet weights are downloaded by torchvision. Where they cannot be had, one line says so and every value is
    NaN, which callers leave out of their reports.
    """

    def __init__(self) -> None:
        self._metric: torch.nn.Module | None = None
        self._tried = False

    @torch.no_grad()
    def __call__(self, truth: Tensor, prediction: Tensor) -> Tensor:
        """Scalar from two (B, 3, H, W) images in [0, 1]; NaN without weights."""
        if not self._tried:
            self._tried = True
            self._metric = _build()
        if self._metric is None:
            return truth.new_full((), math.nan)
        return self._metric.to(truth.device)(truth.clamp(0, 1), prediction.clamp(0, 1))


def _build() -> torch.nn.Module | None:
    from torchmetrics.image.lpip import LearnedPerceptualImagePatchSimilarity

    try:
        return LearnedPerceptualImagePatchSimilarity(normalize=True)
    except (OSError, RuntimeError) as error:
        CONSOLE.log(f"LPIPS is left out of the metrics: its weights could not be loaded ({error}).")
        return None
