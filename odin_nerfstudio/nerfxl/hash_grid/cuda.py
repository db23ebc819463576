"""Multiresolution hash encoding on CUDA: the kernels of cuda/hash_grid.cu as torch operators.

``torch.ops.odin_nerfstudio.hash_grid`` and its two derivatives have shapes for fake tensors, so ``torch.compile`` and
``torch.export`` see them as a whole. The kernels themselves are compiled by :mod:`odin_nerfstudio.kernels`.

Memory is feature by feature, (levels · features, N); callers see the transpose, which matrix products take as it is.
The gradient of the table is a sum of atomic additions: its last bits differ from run to run.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from odin_nerfstudio import kernels
from odin_nerfstudio.kernels import KernelUnavailable
from odin_nerfstudio.nerfxl.hash_grid.layout import HashGridConfig, HashGridLayout

if not hasattr(torch.library, "custom_op"):
    raise KernelUnavailable(f"The hash grid's CUDA kernel needs torch 2.4 or later, not {torch.__version__}.")


def prepare(device: torch.device) -> None:
    """Compiles and loads the kernels for a device.

    Raises:
        KernelUnavailable: without a CUDA compiler, or where it fails.
    """
    kernels.load("hash_grid", torch.cuda.get_device_capability(device))


def encode(positions: Tensor, table: Tensor, layout: HashGridLayout) -> Tensor:
    """Interpolates the features of all levels; see :func:`reference.encode`.

    Args:
        positions: (N, 3) float32 on a CUDA device, in [0, 1].
        table: (entries, features) float32 on the same device.
        layout: of the table.

    Returns:
        (N, levels · features) float32, a transposed view; differentiable once, with respect to both arguments.

    Raises:
        KernelUnavailable: without a CUDA compiler, or where it fails.
    """
    return _forward(positions, table, *_numbers(layout.config)).t()


def _numbers(config: HashGridConfig) -> tuple[int, int, int, int, int]:
    """A config as arguments of an operator."""
    return (
        config.levels,
        config.features,
        config.log2_table_size,
        config.base_resolution,
        config.max_resolution,
    )


@torch.library.custom_op("odin_nerfstudio::hash_grid", mutates_args=(), device_types="cuda")
def _forward(
    positions: Tensor,
    table: Tensor,
    levels: int,
    features: int,
    log2_table_size: int,
    base_resolution: int,
    max_resolution: int,
) -> Tensor:
    """(levels · features, N) encodings."""
    layout = HashGridConfig(levels, features, log2_table_size, base_resolution, max_resolution).layout
    encoding = table.new_empty(layout.out_dim, len(positions))
    _launch("hash_grid_forward", layout, positions, table, encoding)
    return encoding


@_forward.register_fake
def _(positions, table, levels, features, log2_table_size, base_resolution, max_resolution):
    return table.new_empty(levels * features, positions.shape[0])


@torch.library.custom_op("odin_nerfstudio::hash_grid_table_backward", mutates_args=(), device_types="cuda")
def _table_backward(
    positions: Tensor,
    grad: Tensor,
    levels: int,
    features: int,
    log2_table_size: int,
    base_resolution: int,
    max_resolution: int,
) -> Tensor:
    """(entries, features) gradient of the table."""
    layout = HashGridConfig(levels, features, log2_table_size, base_resolution, max_resolution).layout
    grad_table = grad.new_zeros(layout.entries, features)
    _launch("hash_grid_table_backward", layout, positions, grad, grad_table)
    return grad_table


@_table_backward.register_fake
def _(positions, grad, levels, features, log2_table_size, base_resolution, max_resolution):
    layout = HashGridConfig(levels, features, log2_table_size, base_resolution, max_resolution).layout
    return grad.new_empty(layout.entries, features)


@torch.library.custom_op("odin_nerfstudio::hash_grid_positions_backward", mutates_args=(), device_types="cuda")
def _positions_backward(
    positions: Tensor,
    table: Tensor,
    grad: Tensor,
    levels: int,
    features: int,
    log2_table_size: int,
    base_resolution: int,
    max_resolution: int,
) -> Tensor:
    """(N, 3) gradient of the positions."""
    layout = HashGridConfig(levels, features, log2_table_size, base_resolution, max_resolution).layout
    grad_positions = torch.empty_like(positions, memory_format=torch.contiguous_format)
    _launch("hash_grid_positions_backward", layout, positions, table, grad, grad_positions)
    return grad_positions


@_positions_backward.register_fake
def _(positions, table, grad, levels, features, log2_table_size, base_resolution, max_resolution):
    return torch.empty_like(positions, memory_format=torch.contiguous_format)


def _setup_context(ctx, inputs, output) -> None:
    positions, table, *ctx.numbers = inputs
    ctx.save_for_backward(positions, table)


def _backward(ctx, grad: Tensor):
    positions, table = ctx.saved_tensors
    grad_positions = grad_table = None
    if ctx.needs_input_grad[0]:
        grad_positions = _positions_backward(positions, table, grad, *ctx.numbers)
    if ctx.needs_input_grad[1]:
        grad_table = _table_backward(positions, grad, *ctx.numbers)
    return grad_positions, grad_table, None, None, None, None, None


_forward.register_autograd(_backward, setup_context=_setup_context)


def _launch(function: str, layout: HashGridLayout, positions: Tensor, *tensors: Tensor) -> None:
    """Queues a function of the library on the current stream; the last tensor is the one it writes."""
    if len(positions) == 0:
        return
    inputs = [tensor.contiguous() for tensor in (positions, *tensors[:-1])]
    levels = ctypes.c_void_p(layout.array.ctypes.data)
    sizes = len(positions), layout.features, len(layout.levels)
    kernels.launch("hash_grid", function, positions.device, *sizes, levels, *inputs, tensors[-1])
