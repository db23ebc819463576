"""Hash grids for tests of the kernels, and how far float32 may be from the float64 twin."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from odin_nerfstudio.nerfxl.hash_grid import Encoder, HashGridConfig, HashGridLayout, reference

ROUNDOFF = 2.0**-24


@dataclass(frozen=True)
class Derivatives:
    """An encoding and what a backward pass through it gives."""

    encoding: Tensor
    table: Tensor
    positions: Tensor


def dyadic(levels: int, features: int, log2_table_size: int, base_resolution: int) -> HashGridConfig:
    """A grid whose resolution doubles from level to level: with :func:`dyadic_positions` no cell is rounded."""
    return HashGridConfig(levels, features, log2_table_size, base_resolution, base_resolution << (levels - 1))


def dyadic_positions(n: int, generator: torch.Generator) -> Tensor:
    """(N, 3) float32 multiples of 2⁻¹⁰ in [0, 1]: faces of cells and of the cube are among them."""
    return torch.randint(0, 1025, (n, 3), generator=generator) / 1024


def derivatives(encode: Encoder, layout: HashGridLayout, positions: Tensor, table: Tensor, grad: Tensor) -> Derivatives:
    """Forward and backward of a backend."""
    positions, table = positions.clone().requires_grad_(), table.clone().requires_grad_()
    encoding = encode(positions, table, layout)
    encoding.backward(grad)
    assert positions.grad is not None and table.grad is not None
    return Derivatives(encoding.detach(), table.grad, positions.grad)


def assert_agrees_with_twin(
    encode: Encoder, config: HashGridConfig, n: int, generator: torch.Generator, device: str = "cpu"
) -> None:
    """Compares a float32 backend with the twin in float64, on a grid and positions where all cells are exact.

    What is left are roundings of weights and sums: each of the eight vertices of a cell has a weight of three factors,
    so an interpolated value of features in [−1, 1] is off by at most a dozen roundings; a sum over positions by one
    more for each; a derivative along an axis is a difference of features times the scale.
    """
    layout = config.layout
    positions = dyadic_positions(n, generator)
    table = torch.rand(layout.entries, layout.features, generator=generator) * 2 - 1
    grad = torch.randn(n, layout.out_dim, generator=generator)
    expected = derivatives(reference.encode, layout, positions.double(), table.double(), grad.double())
    found = derivatives(encode, layout, *(tensor.to(device) for tensor in (positions, table, grad)))

    assert_within(found.encoding, expected.encoding, torch.tensor(12 * ROUNDOFF))
    for index, level in enumerate(layout.levels):
        columns = slice(index * layout.features, (index + 1) * layout.features)
        rows = slice(level.offset, level.offset + level.entries)
        sums = grad[:, columns].double().abs().sum(dim=0)
        assert_within(found.table[rows], expected.table[rows], (12 + n) * ROUNDOFF * sums)
    scales = torch.tensor([level.scale for level in layout.levels]).repeat_interleave(layout.features)
    slopes = 2 * (grad.double().abs() * scales).sum(dim=1, keepdim=True)
    assert_within(found.positions, expected.positions, (12 + layout.out_dim) * ROUNDOFF * slopes)


def assert_within(found: Tensor, expected: Tensor, tolerance: Tensor) -> None:
    """Every element of ``found`` is float32, and no further than ``tolerance`` from ``expected``."""
    assert found.dtype == torch.float32
    assert found.shape == expected.shape
    error = (found.cpu().double() - expected).abs()
    assert bool((error <= tolerance).all()), f"largest error {error.max():.3g}, tolerance {tolerance.max():.3g}"
