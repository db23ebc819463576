"""Multiresolution hash encoding on the CPU: parallel, and the same bits with any number of threads.

Memory is feature by feature, (levels · features, N), so that a level is read and written in one sweep while its part
of the table stays in the cache; callers see the transpose, which matrix products take as it is.

Forward: a work item is one level of a block of positions. Gradient of the table: an item is a whole level, whose
entries nobody else writes, in the order of the positions; so at most as many threads as there are levels can help.
Gradient of the positions: an item is a block of positions.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from odin_nerfstudio.cpu.jit import inlined, jit
from odin_nerfstudio.cpu.threads import run, take
from odin_nerfstudio.nerfxl.hash_grid.layout import HashGridLayout

_BLOCK = 4096
_PRIME_Y, _PRIME_Z = 2654435761, 805459861
_HALF, _ONE = np.float32(0.5), np.float32(1.0)


def encode(positions: Tensor, table: Tensor, layout: HashGridLayout) -> Tensor:
    """Interpolates the features of all levels; see :func:`reference.encode`.

    Args:
        positions: (N, 3) float32 on the CPU, in [0, 1].
        table: (entries, features) float32 on the CPU.
        layout: of the table.

    Returns:
        (N, levels · features) float32, a transposed view; differentiable once, with respect to both arguments.
    """
    return _Encode.apply(positions, table, layout)


class _Encode(torch.autograd.Function):
    @staticmethod
    def forward(ctx, positions: Tensor, table: Tensor, layout: HashGridLayout) -> Tensor:
        ctx.save_for_backward(positions, table)
        ctx.layout = layout
        out = np.empty((layout.out_dim, len(positions)), dtype=np.float32)
        blocks = -(-len(positions) // _BLOCK)
        run(_forward, len(layout.levels) * blocks, blocks, layout.array, _array(positions), _array(table), out)
        return torch.from_numpy(out).t()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        positions, table = ctx.saved_tensors
        layout: HashGridLayout = ctx.layout
        by_feature = _array(grad.t())
        grad_positions = grad_table = None
        if ctx.needs_input_grad[0]:
            grad_positions = torch.empty_like(positions, memory_format=torch.contiguous_format)
            blocks = -(-len(positions) // _BLOCK)
            arguments = (layout.array, _array(positions), _array(table), by_feature, grad_positions.numpy())
            run(_positions_backward, blocks, *arguments)
        if ctx.needs_input_grad[1]:
            grad_table = torch.empty_like(table, memory_format=torch.contiguous_format)
            run(_table_backward, len(layout.levels), layout.array, _array(positions), by_feature, grad_table.numpy())
        return grad_positions, grad_table, None


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().contiguous().numpy()


@inlined
def _split(coordinate, scale):
    """Lower vertex along one axis and the fraction of a cell above it."""
    scaled = coordinate * scale + _HALF
    floor = np.floor(scaled)
    return np.int64(floor), scaled - floor


@inlined
def _unpacked(level):
    """Scale of a level and its (first entry, entries, step along y, step along z, hashed) as local values."""
    row = np.int64(level.resolution)
    return level.scale, (np.int64(level.offset), np.int64(level.entries), row, row * row, level.hashed != 0)


@inlined
def _entries(grid, x, y, z):
    """Entries of the eight vertices of a cell; x varies fastest, then y."""
    first, entries, row, plane, hashed = grid
    if hashed:
        mask = entries - 1
        y0, y1 = y * _PRIME_Y, (y + 1) * _PRIME_Y
        z0, z1 = z * _PRIME_Z, (z + 1) * _PRIME_Z
        return (
            first + ((x ^ y0 ^ z0) & mask),
            first + (((x + 1) ^ y0 ^ z0) & mask),
            first + ((x ^ y1 ^ z0) & mask),
            first + (((x + 1) ^ y1 ^ z0) & mask),
            first + ((x ^ y0 ^ z1) & mask),
            first + (((x + 1) ^ y0 ^ z1) & mask),
            first + ((x ^ y1 ^ z1) & mask),
            first + (((x + 1) ^ y1 ^ z1) & mask),
        )
    corner = x + row * y + plane * z
    return (
        first + _wrapped(corner, entries),
        first + _wrapped(corner + 1, entries),
        first + _wrapped(corner + row, entries),
        first + _wrapped(corner + row + 1, entries),
        first + _wrapped(corner + plane, entries),
        first + _wrapped(corner + plane + 1, entries),
        first + _wrapped(corner + plane + row, entries),
        first + _wrapped(corner + plane + row + 1, entries),
    )


@inlined
def _wrapped(index, entries):
    """Index modulo entries; only the outermost half cell of a dense level needs the division."""
    return index if 0 <= index < entries else index % entries


@jit
def _forward(counter, items, blocks, levels, positions, table, out):
    """Args: items: level · blocks + block; out: (L · F, N) float32, written."""
    features = table.shape[1]
    while True:
        item = take(counter)
        if item >= items:
            break
        index, block = item // blocks, item % blocks
        scale, grid = _unpacked(levels[index])
        for n in range(block * _BLOCK, min((block + 1) * _BLOCK, positions.shape[0])):
            x, u = _split(positions[n, 0], scale)
            y, v = _split(positions[n, 1], scale)
            z, w = _split(positions[n, 2], scale)
            e0, e1, e2, e3, e4, e5, e6, e7 = _entries(grid, x, y, z)
            a, b, c = _ONE - u, _ONE - v, _ONE - w
            b00, b10, b01, b11 = b * c, v * c, b * w, v * w
            for f in range(features):
                out[index * features + f, n] = (
                    (a * table[e0, f] + u * table[e1, f]) * b00
                    + (a * table[e2, f] + u * table[e3, f]) * b10
                    + (a * table[e4, f] + u * table[e5, f]) * b01
                    + (a * table[e6, f] + u * table[e7, f]) * b11
                )


@jit
def _table_backward(counter, items, levels, positions, grad, grad_table):
    """Args: items: levels; grad: (L · F, N) float32; grad_table: (entries, F) float32, written."""
    features = grad_table.shape[1]
    while True:
        index = take(counter)
        if index >= items:
            break
        scale, grid = _unpacked(levels[index])
        for entry in range(grid[0], grid[0] + grid[1]):
            for f in range(features):
                grad_table[entry, f] = np.float32(0.0)
        for n in range(positions.shape[0]):
            x, u = _split(positions[n, 0], scale)
            y, v = _split(positions[n, 1], scale)
            z, w = _split(positions[n, 2], scale)
            e0, e1, e2, e3, e4, e5, e6, e7 = _entries(grid, x, y, z)
            a, b, c = _ONE - u, _ONE - v, _ONE - w
            b00, b10, b01, b11 = b * c, v * c, b * w, v * w
            for f in range(features):
                g = grad[index * features + f, n]
                grad_table[e0, f] += a * b00 * g
                grad_table[e1, f] += u * b00 * g
                grad_table[e2, f] += a * b10 * g
                grad_table[e3, f] += u * b10 * g
                grad_table[e4, f] += a * b01 * g
                grad_table[e5, f] += u * b01 * g
                grad_table[e6, f] += a * b11 * g
                grad_table[e7, f] += u * b11 * g


@jit
def _positions_backward(counter, items, levels, positions, table, grad, grad_positions):
    """Args: items: blocks of positions; grad: (L · F, N) float32; grad_positions: (N, 3) float32, written."""
    features = table.shape[1]
    while True:
        block = take(counter)
        if block >= items:
            break
        first, last = block * _BLOCK, min((block + 1) * _BLOCK, positions.shape[0])
        for n in range(first, last):
            for axis in range(3):
                grad_positions[n, axis] = np.float32(0.0)
        for index in range(levels.shape[0]):
            scale, grid = _unpacked(levels[index])
            for n in range(first, last):
                x, u = _split(positions[n, 0], scale)
                y, v = _split(positions[n, 1], scale)
                z, w = _split(positions[n, 2], scale)
                e0, e1, e2, e3, e4, e5, e6, e7 = _entries(grid, x, y, z)
                b, c = _ONE - v, _ONE - w
                along_x = along_y = along_z = np.float32(0.0)
                for f in range(features):
                    g = grad[index * features + f, n]
                    # Differences along x on the four edges, then values on them, then on the two faces in z.
                    t0, t1, t2, t3 = table[e0, f], table[e2, f], table[e4, f], table[e6, f]
                    d0, d1, d2, d3 = table[e1, f] - t0, table[e3, f] - t1, table[e5, f] - t2, table[e7, f] - t3
                    s0, s1, s2, s3 = t0 + u * d0, t1 + u * d1, t2 + u * d2, t3 + u * d3
                    along_x += g * (c * (b * d0 + v * d1) + w * (b * d2 + v * d3))
                    along_y += g * (c * (s1 - s0) + w * (s3 - s2))
                    along_z += g * ((b * s2 + v * s3) - (b * s0 + v * s1))
                grad_positions[n, 0] += scale * along_x
                grad_positions[n, 1] += scale * along_y
                grad_positions[n, 2] += scale * along_z
