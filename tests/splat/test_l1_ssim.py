"""The loss in plain torch against what splatfacto calls."""

from __future__ import annotations

import pytest
import torch
from pytorch_msssim import SSIM

from odin_nerfstudio.splat.l1_ssim import l1_ssim


@pytest.mark.filterwarnings("ignore:Skipping Gaussian Smoothing")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("height", "width"), [(11, 11), (30, 41), (64, 12), (7, 20), (20, 7), (3, 4)])
def test_values_and_gradients_are_splatfactos(height: int, width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(height)
    truth = torch.rand(height, width, 3, generator=generator, dtype=dtype)
    prediction = (truth + 0.1 * torch.randn(height, width, 3, generator=generator, dtype=dtype)).clamp(0, 1)
    prediction.requires_grad_()
    planes = [image.permute(2, 0, 1)[None] for image in (truth, prediction)]
    similarity = SSIM(data_range=1.0, size_average=True, channel=3)(*planes)
    expected = 0.8 * (truth - prediction).abs().mean() + 0.2 * (1 - similarity)
    found = l1_ssim(prediction, truth, 0.2)
    torch.testing.assert_close(found, expected)
    gradient, expected_gradient = (torch.autograd.grad(loss, prediction)[0] for loss in (found, expected))
    torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=1e-5 * float(expected_gradient.abs().max()))


def test_bytes_are_shares_of_255() -> None:
    prediction = torch.rand(20, 30, 3)
    truth = torch.randint(0, 256, (20, 30, 3), dtype=torch.uint8)
    assert torch.equal(l1_ssim(prediction, truth, 0.2), l1_ssim(prediction, truth.float() / 255.0, 0.2))
