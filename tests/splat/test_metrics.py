"""Metrics against torchmetrics, which splatfacto uses."""

from __future__ import annotations

import torch
from torchmetrics.image import PeakSignalNoiseRatio

from odin_nerfstudio.splat.metrics import psnr


def test_psnr_is_torchmetrics() -> None:
    prediction, truth = torch.rand(20, 30, 3), torch.rand(20, 30, 3)
    torch.testing.assert_close(psnr(prediction, truth), PeakSignalNoiseRatio(data_range=1.0)(prediction, truth))


def test_psnr_of_bytes_and_of_equal_images() -> None:
    prediction, truth = torch.rand(20, 30, 3, requires_grad=True), torch.randint(0, 256, (20, 30, 3)).to(torch.uint8)
    assert torch.equal(psnr(prediction, truth), psnr(prediction, truth.float() / 255.0))
    assert not psnr(prediction, truth).requires_grad
    assert psnr(truth / 255, truth) == float("inf")
