"""Blocking calls among ranks: order, bits, and the message when ranks disagree."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks

from odin_nerfstudio.comm.world import World
from odin_nerfstudio.errors import UserError

TYPES = [torch.float32, torch.float64, torch.int64, torch.int32, torch.bool]


def rows_of(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """(rank·3 % 4, 2, 2): one of the ranks has none."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(2 if dtype is torch.bool else 1000, (rank * 3 % 4, 2, 2), generator=generator).to(dtype)


def gather(world: World) -> list[torch.Tensor]:
    nothing = world.all_gather_rows(torch.zeros(0, 5))
    assert nothing.shape == (0, 5)
    return [world.all_gather_rows(rows_of(world.rank, dtype)) for dtype in TYPES]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_gathered_rows_are_in_order_of_ranks(size: int) -> None:
    for gathered in run_ranks(size, gather):
        for rows, dtype in zip(gathered, TYPES, strict=True):
            assert rows.dtype == dtype
            assert torch.equal(rows, torch.cat([rows_of(rank, dtype) for rank in range(size)]))


def agree(world: World) -> tuple[int, str]:
    world.check_same("abc", "the order of views")
    chosen = world.broadcast_object(world.rank + 10, source=world.size - 1)
    try:
        world.check_same("abc" if world.rank != 1 else "xyz", "the order of views")
    except UserError as error:
        return chosen, str(error)
    return chosen, ""


@pytest.mark.parametrize("size", [1, 3])
def test_every_rank_hears_who_differs(size: int) -> None:
    for chosen, message in run_ranks(size, agree):
        assert chosen == size + 9
        if size == 1:
            assert message == ""
        else:
            assert message.startswith("the order of views of rank 1 differs from that of rank 0 (xyz and abc).")
