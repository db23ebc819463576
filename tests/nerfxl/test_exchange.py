"""Ranks against one process that holds all tiles: values, gradients, traffic."""

from __future__ import annotations

import pytest
import torch
from blobs import Rays, draw_blobs, draw_rays, draw_tiles, relative_error, render
from ranks import run_ranks
from torch.profiler import ProfilerActivity, profile

from odin_nerfstudio.comm.world import World
from odin_nerfstudio.nerfxl.exchange import EXCHANGES, Radiance
from odin_nerfstudio.nerfxl.lattice import split
from odin_nerfstudio.nerfxl.rays import cross
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
    assert blobs.grad is not None and brightness.grad is not None
    held = tiles_of_rank(world.rank, world.size, count)
    gradients = {f"tile {tile}": blobs.grad[tile] for tile in held}
    gradients |= {"shared": brightness.grad, "loss": loss.detach()[None]}
    return gradients, collectives(forward), collectives(backward)


CASES = [(exchange, count) for exchange in EXCHANGES for count in (2, 5)]


def steps(world: World) -> list[tuple[dict[str, torch.Tensor], int, int]]:
    return [step(world, *case) for case in CASES]


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_give_the_gradients_of_one_process(size: int) -> None:
    """With three ranks and two tiles, one rank holds none."""
    alone = steps(World.current())
    for mine in run_ranks(size, steps):
        for (gradients, forward, backward), (wanted, *_) in zip(mine, alone, strict=True):
            assert forward > 0 and backward == 0
            for name, value in gradients.items():
                assert relative_error(value, wanted[name]) < 1e-6, name


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


def test_traffic_is_counted() -> None:
    first, second = run_ranks(2, traffic)
    tile_bytes = RAYS * 6 * 4
    assert [part[1:] for part in (first[0], second[0])] == [(tile_bytes, tile_bytes)] * 2
    samples, others = first[1][0], second[1][0]
    assert samples + others == RAYS * SAMPLES
    assert first[1][1:] == (28 * samples, 28 * others) and second[1][1:] == (28 * others, 28 * samples)
    alone = traffic(World.current())
    assert [part[1:] for part in alone] == [(0, 0)] * 2


def test_the_wrong_number_of_tiles_is_named() -> None:
    for share in EXCHANGES.values():
        with pytest.raises(ValueError, match="rank 0 holds 3 of 3 tiles, but was given 0"):
            share(World.current(), [], torch.zeros(4, 3))
