from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from odin_nerfstudio.nerfxl.lattice import lattice, seeds_along_rays, split
from odin_nerfstudio.nerfxl.rays import cross
from odin_nerfstudio.nerfxl.reference import draw_rays, draw_tiles
from odin_nerfstudio.nerfxl.tiles import Tiles

seeds = st.integers(0, 2**32 - 1)
dtypes = st.sampled_from([torch.float32, torch.float64])


@given(seeds, st.integers(1, 300), st.sampled_from([None, 1e-3, 1.0, 1e3]), dtypes)
@settings(deadline=None)
def test_intervals_fill_near_to_far(seed: int, count: int, knee: float | None, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    near = (0.01 + 10 * torch.rand(20, 1, generator=generator)).to(dtype)
    far = near * (1 + 10 ** (12 * torch.rand(20, 1, generator=generator) - 6).to(dtype))
    far[0] = near[0]
    jitter = torch.rand(20, 1, generator=generator).to(dtype)
    ends = lattice(near, far, count, jitter=jitter, knee=knee)
    assert ends.shape == (20, count + 1) and ends.dtype == dtype
    assert torch.equal(ends[:, :1], near) and torch.equal(ends[:, -1:], far)
    assert (ends.diff(dim=1) >= 0).all()


def test_spacing() -> None:
    near, far = torch.tensor([[2.0]]), torch.tensor([[10.0]])
    assert lattice(near, far, 4)[0].tolist() == [2, 4, 6, 8, 10]
    assert lattice(near, far, 4, jitter=torch.zeros(1, 1))[0].tolist() == [2, 3, 5, 7, 10]
    disparity = lattice(near, far, 4, knee=1.0).double().reciprocal().diff()
    torch.testing.assert_close(disparity, torch.full((1, 4), -0.1, dtype=torch.float64), rtol=1e-6, atol=0)
    # nerfstudio's piecewise spacing: s = t/2 up to 1, then 1 − 1/(2t).
    ends = lattice(torch.zeros(1, 1), torch.tensor([[1e4]]), 8, knee=1.0)[0].double()
    s = torch.where(ends < 1, ends / 2, 1 - 1 / (2 * ends))
    torch.testing.assert_close(s.diff(), torch.full((8,), float(s[-1]) / 8, dtype=torch.float64), rtol=1e-6, atol=0)


def test_single_precision_keeps_far_steps_apart() -> None:
    near, far = torch.tensor([[0.05]]), torch.tensor([[1e6]])
    ends = lattice(near, far, 256, knee=1.0)
    exact = lattice(near.double(), far.double(), 256, knee=1.0)
    torch.testing.assert_close(ends.double(), exact, rtol=1e-5, atol=0)


@given(seeds, st.integers(1, 8), st.booleans(), dtypes)
@settings(deadline=None)
def test_every_sample_belongs_to_one_tile(seed: int, count: int, occupancy: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    tiles = draw_tiles(generator, count)
    origins, directions, near, far, ends = (part.to(dtype) for part in draw_rays(generator, tiles))

    def occupied(tile: int, positions: torch.Tensor) -> torch.Tensor:
        assert (tiles.owner(positions) == tile).all()
        return positions[:, 0] + positions[:, 2] > 0

    parts = split(ends, origins, directions, tiles, range(count), occupied if occupancy else None)
    order = cross(tiles, origins, directions, near, far).order
    table = []
    for tile, samples in enumerate(parts):
        positions = samples.positions(origins, directions)
        assert (tiles.owner(positions) == tile).all()
        place = order.argsort(1)[samples.ray_index, tile]
        table.append(torch.stack([samples.ray_index, place, samples.t_start, samples.t_end], 1))
    # Sorted by ray and place alone, tile after tile gives back the lattice in its own order.
    rows = torch.cat(table)
    rows = rows[(rows[:, 0] * count + rows[:, 1]).argsort(stable=True)]
    kept = torch.ones(len(ends), ends.shape[1] - 1, dtype=torch.bool)
    if occupancy:
        kept = seeds_along_rays(origins, directions, ends)[:, ::2].sum(1).view(kept.shape) > 0
    assert torch.equal(rows[:, 0].long(), kept.nonzero()[:, 0])
    assert torch.equal(rows[:, 2], ends[:, :-1][kept]) and torch.equal(rows[:, 3], ends[:, 1:][kept])


def test_gradients_reach_the_rays_and_a_tile_may_be_empty() -> None:
    tiles = Tiles.build(torch.tensor([[-1.0, 0, 0], [1.0, 0, 0]]), 2)
    origins, directions = torch.full((1, 3), 0.5, requires_grad=True), torch.tensor([[1.0, 0, 0]], requires_grad=True)
    ends = lattice(torch.zeros(1, 1), torch.ones(1, 1), 4)
    nothing, everything = split(ends, origins, directions, tiles, [0, 1])
    assert len(nothing.ray_index) == 0 and nothing.positions(origins, directions).shape == (0, 3)
    everything.positions(origins, directions).sum().backward()
    assert origins.grad is not None and origins.grad.tolist() == [[4, 4, 4]]
    assert directions.grad is not None and directions.grad.tolist() == [[2, 2, 2]]


@pytest.mark.parametrize("count", [1, 3])
def test_tiles_from_rays(count: int) -> None:
    origins, directions = torch.randn(30, 3), torch.nn.functional.normalize(torch.randn(30, 3))
    ends = lattice(torch.full((30, 1), 0.1), torch.full((30, 1), 100.0), 16, knee=1.0)
    tiles = Tiles.build(seeds_along_rays(origins, directions, ends), count)
    sizes = [len(samples.ray_index) for samples in split(ends, origins, directions, tiles, range(count))]
    assert max(sizes) - min(sizes) <= 1 and sum(sizes) == 30 * 16
