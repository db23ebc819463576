"""The loss by ``cuda/l1_ssim.cu``, as torch operators.

``torch.ops.odin_nerfstudio.l1_ssim`` and its derivative have shapes for fake tensors. Both are deterministic.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from odin_nerfstudio import kernels
from odin_nerfstudio.splat.l1_ssim.reference import WINDOW

_TILE_ROWS, _TILE_COLUMNS = 8, 64  # pixels of a block

_OPERATORS = torch.library.Library("odin_nerfstudio", "FRAGMENT")
_OPERATORS.define("l1_ssim(Tensor prediction, Tensor truth, float ssim_lambda, bool derive) -> (Tensor, Tensor)")
_OPERATORS.define(
    "l1_ssim_backward(Tensor prediction, Tensor truth, Tensor derivatives, Tensor upstream, float ssim_lambda)"
    " -> Tensor"
)


def l1_ssim(prediction: Tensor, truth: Tensor, ssim_lambda: float) -> Tensor:
    """The loss between two images; see :func:`reference.l1_ssim`.

    Args:
        prediction: (H, W, 3) float32 on a CUDA device, H and W at least a window long.
        truth: (H, W, 3) uint8 or float32 on the same device.
        ssim_lambda: λ.

    Returns:
        () float32, differentiable once, with respect to ``prediction``.

    Raises:
        KernelUnavailable: without a CUDA compiler, or where it fails.
    """
    return _L1SSIM.apply(prediction, truth, ssim_lambda)


class _L1SSIM(torch.autograd.Function):
    @staticmethod
    def forward(ctx, prediction: Tensor, truth: Tensor, ssim_lambda: float) -> Tensor:
        prediction, truth = prediction.contiguous(), truth.contiguous()
        derive = ctx.needs_input_grad[0]
        loss, derivatives = torch.ops.odin_nerfstudio.l1_ssim(prediction, truth, ssim_lambda, derive)
        if derive:
            ctx.save_for_backward(prediction, truth, derivatives)
            ctx.ssim_lambda = ssim_lambda
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream: Tensor) -> tuple[Tensor, None, None]:
        gradient = torch.ops.odin_nerfstudio.l1_ssim_backward(*ctx.saved_tensors, upstream, ctx.ssim_lambda)
        return gradient, None, None


def _forward(prediction: Tensor, truth: Tensor, ssim_lambda: float, derive: bool) -> tuple[Tensor, Tensor]:
    """() the loss; (3, H − 10, W − 10, 3) derivatives of each window's SSIM, empty unless they are asked for."""
    height, width, _ = prediction.shape
    loss = prediction.new_empty(())
    derivatives = prediction.new_empty(_derivatives_shape(height, width, derive))
    sums = prediction.new_empty(-(-height // _TILE_ROWS) * -(-width // _TILE_COLUMNS), 2)
    inputs = _inputs(prediction, truth, ssim_lambda)
    outputs = derivatives if derive else None, sums, len(sums), loss
    kernels.launch("l1_ssim", "l1_ssim_forward", prediction.device, *inputs, *outputs)
    return loss, derivatives


def _backward(prediction: Tensor, truth: Tensor, derivatives: Tensor, upstream: Tensor, ssim_lambda: float) -> Tensor:
    """(H, W, 3) gradient of the prediction."""
    gradient = torch.empty_like(prediction)
    inputs = _inputs(prediction, truth, ssim_lambda)
    kernels.launch("l1_ssim", "l1_ssim_backward", prediction.device, *inputs, derivatives, upstream, gradient)
    return gradient


def _inputs(prediction: Tensor, truth: Tensor, ssim_lambda: float) -> tuple[Tensor, Tensor, int, int, int, float]:
    height, width, _ = prediction.shape
    return prediction, truth, int(truth.dtype == torch.uint8), height, width, float(ssim_lambda)


def _derivatives_shape(height: int, width: int, derive: bool) -> tuple[int, ...]:
    return (3, height - WINDOW + 1, width - WINDOW + 1, 3) if derive else (0,)


_OPERATORS.impl("l1_ssim", _forward, "CUDA")
_OPERATORS.impl("l1_ssim_backward", _backward, "CUDA")


@torch.library.register_fake("odin_nerfstudio::l1_ssim")
def _(prediction, truth, ssim_lambda, derive):
    shape = _derivatives_shape(prediction.shape[0], prediction.shape[1], derive)
    return prediction.new_empty(()), prediction.new_empty(shape)


@torch.library.register_fake("odin_nerfstudio::l1_ssim_backward")
def _(prediction, truth, derivatives, upstream, ssim_lambda):
    return torch.empty_like(prediction)
