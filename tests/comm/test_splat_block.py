"""Blocks of splats come out bit by bit as they went in."""

from __future__ import annotations

import pytest
import torch

from odin_nerfstudio.comm.splat_block import SplatBlock, SplatGradBlock


def any_bits(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Every bit pattern, so also NaNs with payloads, infinities and denormals."""
    width = torch.tensor([], dtype=dtype).element_size() // 4
    bits = torch.randint(-(2**31), 2**31, (*shape[:-1], shape[-1] * width), dtype=torch.int64).to(torch.int32)
    return bits.view(dtype)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.numpy().tobytes() == other.numpy().tobytes()


@pytest.mark.parametrize("count", [0, 1, 1000])
def test_splats(count: int) -> None:
    splats = SplatBlock(
        ids=any_bits(count, dtype=torch.int64),
        means2d=any_bits(count, 2),
        depths=any_bits(count),
        conics=any_bits(count, 3),
        opacities=any_bits(count),
        colors=any_bits(count, 3),
        radii=any_bits(count, dtype=torch.int32),
    )
    block = splats.pack()
    assert block.shape == (count, 13) and block.dtype == torch.float32
    assert all(map(same_bits, SplatBlock.unpack(block), splats))


def test_part_of_a_block() -> None:
    splats = SplatBlock(
        torch.arange(5), *(any_bits(5, *n) for n in [(2,), (), (3,), (), (3,)]), torch.arange(5, dtype=torch.int32)
    )
    assert SplatBlock.unpack(splats.pack()[3:4]).ids.tolist() == [3]


@pytest.mark.parametrize("count", [0, 1, 1000])
@pytest.mark.parametrize("absgrad", [0, 2])
def test_gradients(count: int, absgrad: int) -> None:
    grads = SplatGradBlock(
        means2d=any_bits(count, 2),
        depths=any_bits(count),
        conics=any_bits(count, 3),
        opacities=any_bits(count),
        colors=any_bits(count, 3),
        absgrad=any_bits(count, absgrad),
    )
    block = grads.pack()
    assert block.shape == (count, 10 + absgrad) and block.dtype == torch.float32
    assert all(map(same_bits, SplatGradBlock.unpack(block), grads))
