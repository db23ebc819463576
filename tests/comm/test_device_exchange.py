"""The exchange between GPUs, on CPUs joined by gloo: what arrives where, without asking for sizes."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks
from torch import Tensor

from odin_nerfstudio.comm.device_exchange import DeviceExchange, DeviceTransfer
from odin_nerfstudio.comm.exchange import PeerError, Signal
from odin_nerfstudio.comm.world import World
from odin_nerfstudio.shadow.stopwatch import HostStopwatch

RANKS = 3
WIDTH = 2


def block(source: int, target: int) -> Tensor:
    """What one rank has for another: as many rows as nobody else has, and none for the rank after it."""
    rows = 0 if target == (source + 1) % RANKS else 1 + 2 * source + target
    return torch.arange(rows * WIDTH, dtype=torch.float32).view(rows, WIDTH) + 100 * source + 10 * target


def swap(world: World) -> list[DeviceTransfer]:
    """Every rank gets what the others have for it, in the order of ranks; its own too."""
    transfers: list[DeviceTransfer] = []
    exchange = DeviceExchange(world, transfers.append, stopwatch=HostStopwatch())
    outgoing = [block(world.rank, target) for target in range(RANKS)]
    expected = [block(source, world.rank) for source in range(RANKS)]
    splits, counts = [len(each) for each in outgoing], [len(each) for each in expected]
    known = exchange.swap(torch.cat(outgoing), splits, counts, "splats", 3)
    asked = exchange.all_to_all(outgoing, "splats", 4, Signal.STOP if world.rank == 1 else Signal.NONE)
    marks = exchange.swap(torch.cat(outgoing)[:, 0].to(torch.uint8), splits, counts, "marks", 3)
    for job in (known, asked):
        assert all(torch.equal(a, b) for a, b in zip(exchange.wait(job), expected, strict=True))
    assert torch.equal(torch.cat(exchange.wait(marks)), torch.cat(expected)[:, 0].to(torch.uint8))
    assert asked.signal == Signal.STOP
    exchange.close()
    return transfers


def test_blocks_arrive() -> None:
    for rank, transfers in enumerate(run_ranks(RANKS, swap)):
        assert [(each.name, each.unit) for each in transfers] == [("splats", 3), ("splats", 4), ("marks", 3)]
        sent = sum(len(block(rank, other)) for other in range(RANKS) if other != rank)
        received = sum(len(block(other, rank)) for other in range(RANKS) if other != rank)
        for each, size in zip(transfers, (4 * WIDTH, 4 * WIDTH, 1), strict=True):
            assert (each.sent, each.received) == (sent * size, received * size)
            assert each.begin < each.end


def to_all(world: World) -> None:
    """Every rank gets the same, also from one that has nothing."""
    exchange = DeviceExchange(world)
    everyone = [torch.full((rank * 2, WIDTH), float(rank)) for rank in range(RANKS)]
    job = exchange.to_all(everyone[world.rank], [len(each) for each in everyone], "gradients", 0)
    assert all(torch.equal(a, b) for a, b in zip(exchange.wait(job), everyone, strict=True))
    exchange.close()


def test_everyone_hears_everyone() -> None:
    run_ranks(RANKS, to_all)


def gather(world: World) -> list[int]:
    exchange = DeviceExchange(world)
    coming = exchange.gather(torch.tensor([world.rank, 10 * world.rank]))
    numbers = coming.get()
    assert coming.get() == numbers
    exchange.close()
    return numbers


@pytest.mark.parametrize("size", [1, RANKS])
def test_numbers_of_all_ranks(size: int) -> None:
    expected = [number for rank in range(size) for number in (rank, 10 * rank)]
    assert run_ranks(size, gather) == [expected] * size


def fall_out_of_step(world: World) -> str:
    exchange = DeviceExchange(world)
    with pytest.raises(PeerError) as error:
        exchange.all_to_all([torch.zeros(1, 1)] * 2, "splats" if world.rank else "gradients", 7)
    return str(error.value)


def test_ranks_that_fall_out_of_step_say_so() -> None:
    first, second = run_ranks(2, fall_out_of_step)
    assert first == "rank 1 is not exchanging gradients of unit 7: the ranks fell out of step."
    assert second == "rank 0 is not exchanging splats of unit 7: the ranks fell out of step."


def test_one_rank_hands_its_own_through() -> None:
    exchange, rows = DeviceExchange(World.current()), torch.ones(3, WIDTH)
    assert torch.equal(exchange.wait(exchange.swap(rows, [3], [3], "splats", 0))[0], rows)
    assert torch.equal(exchange.wait(exchange.to_all(rows, [3], "gradients", 0))[0], rows)
    with pytest.raises(ValueError, match="2 blocks for 1 ranks"):
        exchange.all_to_all([rows, rows], "splats", 0)
    exchange.close()
