"""The CUDA kernels of the loss against the float64 twin."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import Tensor

from odin_nerfstudio import kernels
from odin_nerfstudio.splat.l1_ssim import l1_ssim, reference

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICE = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def cuda():
    kernels.load("l1_ssim", torch.cuda.get_device_capability(DEVICE))
    from odin_nerfstudio.splat.l1_ssim import cuda

    return cuda


def images(height: int, width: int, uint8: bool, device: torch.device = DEVICE) -> tuple[Tensor, Tensor]:
    """A smooth truth with edges, and a prediction of it with noise; both are exact here and there."""
    generator = torch.Generator().manual_seed(height * 1000 + width)
    y, x = torch.meshgrid(torch.linspace(0, 3, height), torch.linspace(0, 5, width), indexing="ij")
    truth = torch.stack((torch.sin(x * y).abs(), (x + y) % 1, (x > 2 * y).float()), dim=-1)
    truth = (255 * truth).round().to(torch.uint8)
    exact = truth / 255
    noise = 0.2 * torch.randn(height, width, 3, generator=generator)
    noise[torch.rand(height, width, 3, generator=generator) < 0.2] = 0
    return (exact + noise).clamp(0, 1).to(device), (truth if uint8 else exact).to(device)


def divided(truth: Tensor) -> Tensor:
    """v / 255 rounded correctly; on a GPU torch multiplies by the reciprocal instead."""
    return (truth.cpu() / 255).to(truth.device)


def derivatives(function, prediction: Tensor, truth: Tensor, ssim_lambda: float) -> tuple[Tensor, Tensor]:
    """Loss, and the gradient of 3 · loss."""
    prediction = prediction.detach().clone().requires_grad_()
    loss = function(prediction, truth, ssim_lambda)
    (3 * loss).backward()
    return loss.detach(), prediction.grad


def assert_agrees_with_twin(function, prediction: Tensor, truth: Tensor, ssim_lambda: float) -> None:
    loss, gradient = derivatives(function, prediction, truth, ssim_lambda)
    assert loss.dtype == gradient.dtype == torch.float32 and loss.device == prediction.device
    as_double = truth if truth.dtype == torch.uint8 else truth.double()
    expected, expected_gradient = derivatives(reference.l1_ssim, prediction.double(), as_double, ssim_lambda)
    # A float32 truth and v / 255 in float64 differ by rounding, which is a sign where the two images are equal.
    equal = prediction == (divided(truth) if truth.dtype == torch.uint8 else truth)
    sign = torch.where(equal, 3.1 * (1 - ssim_lambda) / prediction.numel(), 0.0)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=2e-6)
    # Where the images are flat, a variance is the difference of numbers 10⁴ times as large: so in float32 by any means.
    error = (gradient - expected_gradient).abs() - sign
    assert error.max() <= 2e-4 * expected_gradient.abs().max()


@needs_cuda
@pytest.mark.parametrize("uint8", [False, True])
@pytest.mark.parametrize("ssim_lambda", [0.0, 0.2, 1.0])
@pytest.mark.parametrize(
    ("height", "width"),
    [(11, 11), (12, 11), (11, 12), (18, 74), (19, 75), (16, 64), (8 * 5 + 1, 64 * 3 - 1), (300, 401)],
)
def test_values_and_gradients_are_the_twins(cuda, height, width, ssim_lambda, uint8) -> None:
    assert_agrees_with_twin(cuda.l1_ssim, *images(height, width, uint8), ssim_lambda)


@needs_cuda
@pytest.mark.parametrize("uint8", [False, True])
def test_a_photograph_is_the_twins_and_the_same_again(cuda, uint8) -> None:
    prediction, truth = images(1200, 1600, uint8)
    assert_agrees_with_twin(cuda.l1_ssim, prediction, truth, 0.2)
    first, second = (derivatives(cuda.l1_ssim, prediction, truth, 0.2) for _ in range(2))
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


@needs_cuda
def test_bytes_are_divided_as_the_cpu_divides(cuda) -> None:
    truth = torch.arange(256, dtype=torch.uint8, device=DEVICE).repeat_interleave(9).reshape(24, 32, 3)
    prediction = torch.rand(24, 32, 3, device=DEVICE)
    for one, other in zip(
        derivatives(cuda.l1_ssim, prediction, truth, 0.2),
        derivatives(cuda.l1_ssim, prediction, divided(truth), 0.2),
        strict=True,
    ):
        assert torch.equal(one, other)


@needs_cuda
def test_equal_images(cuda) -> None:
    prediction, _ = images(40, 50, False)
    loss, gradient = derivatives(cuda.l1_ssim, prediction, prediction, 0.2)
    assert loss.abs() < 1e-6
    assert gradient.abs().max() < 1e-6


@needs_cuda
@pytest.mark.parametrize(("height", "width"), [(10, 40), (40, 10), (5, 5), (1, 1)])
def test_images_smaller_than_a_window_go_to_the_twin(height, width) -> None:
    prediction, truth = images(height, width, True)
    torch.testing.assert_close(l1_ssim(prediction, truth, 0.2), reference.l1_ssim(prediction, truth, 0.2))


@needs_cuda
def test_strided_images_and_no_gradient(cuda) -> None:
    prediction, truth = images(60, 45, True)
    strided = prediction.permute(2, 0, 1).contiguous().permute(1, 2, 0).requires_grad_()
    loss = l1_ssim(strided, truth.transpose(0, 1).contiguous().transpose(0, 1), 0.2)
    (3 * loss).backward()
    expected, gradient = derivatives(cuda.l1_ssim, prediction, truth, 0.2)
    assert torch.equal(loss.detach(), expected) and torch.equal(strided.grad, gradient)
    assert torch.equal(l1_ssim(prediction, truth, 0.2), expected)


@needs_cuda
def test_other_types_go_to_the_twin() -> None:
    prediction, truth = images(30, 31, False)
    loss = l1_ssim(prediction.double(), truth.double(), 0.2)
    assert torch.equal(loss, reference.l1_ssim(prediction.double(), truth.double(), 0.2))


@needs_cuda
def test_nothing_waits_for_the_device(cuda) -> None:
    prediction, truth = images(64, 64, True)
    derivatives(l1_ssim, prediction, truth, 0.2)
    torch.cuda.set_sync_debug_mode("error")
    try:
        derivatives(l1_ssim, prediction, truth, 0.2)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_cuda
def test_operators_keep_torchs_rules(cuda) -> None:
    prediction, truth = images(20, 24, True)
    operators, tests = torch.ops.odin_nerfstudio, ("test_schema", "test_faketensor")
    for derive in (False, True):
        torch.library.opcheck(operators.l1_ssim.default, (prediction, truth, 0.2, derive), test_utils=tests)
    _, by_window = operators.l1_ssim(prediction, truth, 0.2, True)
    arguments = prediction, truth, by_window, torch.ones((), device=DEVICE), 0.2
    torch.library.opcheck(operators.l1_ssim_backward.default, arguments, test_utils=tests)


@needs_cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_device_that_is_not_the_current_one(cuda) -> None:
    assert_agrees_with_twin(l1_ssim, *images(50, 70, True, torch.device("cuda", 1)), 0.2)
    assert torch.cuda.current_device() == 0


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_the_source_compiles_and_exports_its_functions(capability, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    library = kernels.load.__wrapped__("l1_ssim", capability)
    for name in ("l1_ssim_forward", "l1_ssim_backward"):
        assert hasattr(library, name)
