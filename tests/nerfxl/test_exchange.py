"""Ranks against one process that holds all tiles: values, gradients, traffic."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks
from torch.profiler import ProfilerActivity, profile

from odin_nerfstudio.comm.world import World
from odin_nerfstudio.nerfxl.exchange import EXCHANGES, Radiance
from odin_nerfstudio.nerfxl.lattice import split
from odin_nerfstudio.nerfxl.rays import cross
from odin_nerfstudio.nerfxl.reference import Rays, draw_blobs, draw_rays, draw_tiles, relative_error, render
from odin_nerfstudio.nerfxl.tiles import tiles_of_rank

SEED = 5
RAYS, SAMPLES = 200, 48


def collectives(record: profile) -> int:
    return sum(event.name.startswith(("gloo:", "c10d::")) for event in record.events())


def step(world: World, exchange: str, count: int) -> tuple[dict[str, torch.Tensor], int, int]:
    """Gradients by name after one step in float32; collectives in the forward and in the backward."""
    generator = torch.Generator().manual_seed(SEED)
    tiles = draw_tiles(generator, count)
    rays = Rays(*(part.float() for part in draw_rays(generator, tiles, RAYS, SAMPLES)))
    blobs = draw_blobs(generator, count).float().requires_grad_()
    brightness = torch.ones(3, requires_grad=True)
    background = torch.full((3,), 0.5)
    with profile(activities=[ProfilerActivity.CPU]) as forward:
        shared = torch.cat([blobs[..., :5], blobs[..., 5:] * brightness], -1)
        rendered = render(tiles, rays, shared, background, world=world, exchange=exchange)
        loss = ((rendered.rgb - 0.3) ** 2).mean() + 1e-2 * rendered.distortion.mean() + rendered.depth.mean()
    with profile(activities=[ProfilerActivity.CPU]) as backward:
        loss.backward()
    world.sum_gradients([brightness])
    held = tiles_of_rank(world.rank, world.size, count)
    assert brightness.grad is not None and (blobs.grad is None) == (len(held) == 0)
    gradients = {"shared": brightness.grad, "loss": loss.detach()[None]}
    gradients |= {f"tile {tile}": blobs.grad[tile] for tile in held if blobs.grad is not None}
    return gradients, collectives(forward), collectives(backward)


def work(world: World, counts: tuple[int, ...]) -> tuple[list, list[tuple[int, int, int]]]:
    """Steps with both exchanges and each number of tiles; traffic. One start of the processes serves all tests."""
    return [step(world, exchange, count) for count in counts for exchange in EXCHANGES], traffic(world)


def traffic(world: World) -> list[tuple[int, int, int]]:
    """Of both exchanges: own samples, bytes sent, bytes received."""
    generator = torch.Generator().manual_seed(SEED)
    tiles = draw_tiles(generator, 2)
    origins, directions, near, far, ends = (part.float() for part in draw_rays(generator, tiles, RAYS, SAMPLES))
    held = tiles_of_rank(world.rank, world.size, 2)
    parts = split(ends, origins, directions, tiles, held)
    radiance = [Radiance(part, torch.ones_like(part.t_start), part.t_start[:, None].expand(-1, 3)) for part in parts]
    enter = cross(tiles, origins, directions, near, far).enter
    shared = [share(world, radiance, enter) for share in EXCHANGES.values()]
    assert relative_error(shared[0].segments, shared[1].segments) < 1e-6
    return [(sum(len(part.ray_index) for part in parts), one.sent, one.received) for one in shared]


@pytest.mark.parametrize(("size", "counts"), [(2, (2, 5)), (3, (2,))], ids=["one or more tiles", "a rank without"])
def test_ranks_equal_one_process(size: int, counts: tuple[int, ...]) -> None:
    wanted, nothing = work(World.current(), counts)
    ranks = run_ranks(size, work, counts)
    for steps, _ in ranks:
        for (mine, forward, backward), (alone, *_) in zip(steps, wanted, strict=True):
            assert forward > 0 and backward == 0
            for name, value in mine.items():
                assert relative_error(value, alone[name]) < 1e-6, name

    assert [moved[1:] for moved in nothing] == [(0, 0)] * 2
    by_tile, by_sample = zip(*(moved for _, moved in ranks), strict=True)
    tiles = [len(tiles_of_rank(rank, size, 2)) for rank in range(size)]
    assert sum(samples for samples, *_ in by_sample) == RAYS * SAMPLES
    for held, (_, sent, received) in zip(tiles, by_tile, strict=True):
        assert (sent, received) == (RAYS * 24 * held * (size - 1), RAYS * 24 * (2 - held))
    for samples, sent, received in by_sample:
        assert (sent, received) == (28 * samples * (size - 1), 28 * (RAYS * SAMPLES - samples))


def test_the_wrong_number_of_tiles_is_named() -> None:
    for share in EXCHANGES.values():
        with pytest.raises(ValueError, match="rank 0 holds 3 of 3 tiles, but was given 0"):
            share(World.current(), [], torch.zeros(4, 3))
