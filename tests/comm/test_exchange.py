"""Exchanges between real processes: what arrives, when, and what is said when it does not."""

from __future__ import annotations

import os
import signal
import threading
import time
from itertools import pairwise

import pytest
import torch
from ranks import run_ranks

from odin_nerfstudio.comm.exchange import Exchange, Link, PeerError, Transfer
from odin_nerfstudio.comm.world import World


def block(job: int, source: int, destination: int) -> torch.Tensor:
    """(0 … 40, 3) numbers that say which job, source and destination they belong to, some blocks empty."""
    generator = torch.Generator().manual_seed(10_000 * job + 100 * source + destination)
    rows = int(torch.randint(41, (), generator=generator)) * ((job + source + destination) % 3 > 0)
    return torch.randn(rows, 3, generator=generator)


def many_jobs(world: World) -> None:
    transfers: list[Transfer] = []
    exchange = Exchange(world, on_transfer=transfers.append)
    ranks = range(world.size)
    jobs = [exchange.all_to_all([block(n, world.rank, r) for r in ranks], "blocks", n) for n in range(50)]
    for n, job in reversed(list(enumerate(jobs))):
        arrived = exchange.wait(job, timeout=30)
        for source in ranks:
            assert torch.equal(arrived[source], block(n, source, world.rank))
            assert not arrived[source].requires_grad
    exchange.close()
    exchange.close()
    with pytest.raises(ValueError, match="closed"):
        exchange.all_to_all([block(0, 0, 0)] * world.size, "blocks", 0)
    assert not any(thread.name == "odin-exchange" for thread in threading.enumerate())
    if world.size == 1:
        return
    assert [transfer.unit for transfer in transfers] == list(range(50))
    assert all(one.end <= other.start for one, other in pairwise(transfers))
    others = [r for r in ranks if r != world.rank]
    assert transfers[1].sent == sum(12 * len(block(1, world.rank, r)) for r in others)
    assert transfers[1].received == sum(12 * len(block(1, r, world.rank)) for r in others)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_everything_arrives_where_it_belongs(size: int) -> None:
    run_ranks(size, many_jobs)


def leaves(world: World) -> None:
    exchange = Exchange(world)
    leaf = torch.ones(4, 2, requires_grad=True)
    integers = [torch.full((2, 1), -(2**62) + world.rank) for _ in range(world.size)]
    grads = exchange.wait(exchange.all_to_all([leaf * 2] * world.size, "splats", 0), timeout=30)
    assert not any(part.requires_grad for part in grads)
    arrived = exchange.wait(exchange.all_to_all(integers, "ids", 0), timeout=30)
    assert [part[0].item() for part in arrived] == [-(2**62) + rank for rank in range(world.size)]
    exchange.close()


@pytest.mark.parametrize("size", [1, 2])
def test_autograd_stays_and_other_types_travel(size: int) -> None:
    run_ranks(size, leaves)


def slow_link(world: World) -> None:
    # 2 MB at 0.08 Gb/s are 0.2 s
    transfers: list[Transfer] = []
    exchange = Exchange(world, Link(gbps=0.08, latency_us=50_000), transfers.append)
    started = time.perf_counter()
    blocks = [torch.zeros(500_000 if r != world.rank else 0, 1) for r in range(world.size)]
    jobs = [exchange.all_to_all(blocks, "splats", 0), exchange.all_to_all([torch.zeros(0, 1)] * 2, "nothing", 0)]
    assert time.perf_counter() - started < 0.2
    exchange.wait(jobs[0], timeout=30)
    assert time.perf_counter() - started >= 0.25
    exchange.wait(jobs[1], timeout=30)
    assert 0.3 <= time.perf_counter() - started < 10
    exchange.close()
    assert [transfer.sent for transfer in transfers] == [2_000_000, 0]
    assert transfers[0].end - transfers[0].start >= 0.25 and transfers[1].end - transfers[1].start >= 0.05


def test_a_slow_link_takes_its_time_off_the_compute_thread() -> None:
    run_ranks(2, slow_link)


def late_peer(world: World) -> None:
    exchange = Exchange(world)
    if world.rank == 1:
        time.sleep(1.0)
    first = exchange.all_to_all([torch.ones(1, 1)] * world.size, "early splats", 7)
    second = exchange.all_to_all([torch.ones(1, 1)] * world.size, "gradients", 6)
    if world.rank == 0:
        with pytest.raises(PeerError) as caught:
            exchange.wait(second, timeout=0.2)
        assert str(caught.value) == (
            "gradients of unit 6 did not arrive within 0.2 s: rank 0 waits for rank 1 in early splats of unit 7."
        )
    exchange.wait(first, timeout=30)
    exchange.wait(second, timeout=30)
    exchange.close()


def test_a_late_peer_is_named_and_may_still_come() -> None:
    run_ranks(3, late_peer)


def killed_peer(world: World) -> str:
    exchange = Exchange(world)
    exchange.wait(exchange.all_to_all([torch.ones(1, 1)] * world.size, "early splats", 0), timeout=30)
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    job = exchange.all_to_all([torch.ones(1, 1)] * world.size, "early splats", 1)
    queued = exchange.all_to_all([torch.ones(1, 1)] * world.size, "late splats", 1)
    with pytest.raises(PeerError) as caught:
        exchange.wait(job, timeout=30)
    with pytest.raises(PeerError):
        exchange.wait(queued, timeout=30)
    exchange.close()
    return str(caught.value)


def test_a_killed_peer_is_named() -> None:
    assert run_ranks(2, killed_peer, dying=(1,)) == [
        "early splats of unit 1: rank 1 ended or cannot be reached from rank 0.",
        None,
    ]


def out_of_step(world: World) -> str:
    exchange = Exchange(world)
    name = "gradients" if world.rank == 1 else "early splats"
    with pytest.raises(PeerError) as caught:
        exchange.wait(exchange.all_to_all([torch.ones(1, 1)] * world.size, name, 3), timeout=30)
    exchange.close()
    return str(caught.value)


def test_ranks_out_of_step_do_not_mix_up_blocks() -> None:
    first, second = run_ranks(2, out_of_step)
    assert first == ("rank 1 is not exchanging early splats of unit 3, as rank 0 is: the ranks fell out of step.")
    assert second.startswith("rank 0 is not exchanging gradients of unit 3")


def broken_timeline(world: World) -> None:
    def fail(transfer: Transfer) -> None:
        raise OSError("no timeline")

    exchange = Exchange(world, on_transfer=fail)
    with pytest.raises(OSError, match="no timeline"):
        exchange.wait(exchange.all_to_all([torch.ones(1, 1)] * world.size, "splats", 0), timeout=30)
    exchange.close()


def test_an_exception_on_the_thread_reaches_the_waiter() -> None:
    run_ranks(2, broken_timeline)


def test_blocks_for_the_wrong_number_of_ranks() -> None:
    with pytest.raises(ValueError, match="2 blocks for 1 ranks"):
        Exchange(World.current()).all_to_all([torch.ones(1, 1)] * 2, "splats", 0)
