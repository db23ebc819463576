from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from odin_nerfstudio.nerfxl.contraction import Contraction
from odin_nerfstudio.nerfxl.tiles import Tiles

seeds = st.integers(0, 2**32 - 1)


def draw_tiles(seed: int, count: int) -> Tiles:
    generator = torch.Generator().manual_seed(seed)
    return Tiles.build(torch.randn(100, 3, generator=generator) * torch.rand(3, generator=generator), count)


@given(seeds, st.integers(1, 20))
@settings(deadline=None, max_examples=25)
def test_monotone_smooth_and_invertible(seed: int, count: int) -> None:
    tiles = draw_tiles(seed, count)
    for tile in range(count):
        contraction = Contraction.of(tiles, tile)
        line = torch.linspace(0.001, 0.999, 500, dtype=torch.float64)[:, None].expand(-1, 3)
        positions = contraction.inverse(line).requires_grad_()
        assert tiles.contains(tile, positions).all()
        torch.testing.assert_close(contraction(positions), line, rtol=0, atol=1e-12)
        (slope,) = torch.autograd.grad(contraction(positions).sum(), positions)
        assert (slope > 0).all()
        # No jump of the slope, at the ends of the core either: its root falls evenly from there to 0.
        root = (slope / slope.max(dim=0).values).sqrt()
        assert root.diff(dim=0).abs().max() < 5 / len(line)


@given(seeds, st.integers(1, 8), st.sampled_from([torch.float32, torch.float64]))
@settings(deadline=None)
def test_all_of_space_lands_in_the_cube(seed: int, count: int, dtype: torch.dtype) -> None:
    tiles = draw_tiles(seed, count)
    generator = torch.Generator().manual_seed(seed)
    positions = torch.randn(300, 3, generator=generator) * 10 ** (40 * torch.rand(300, 1, generator=generator) - 3)
    positions = torch.cat([torch.zeros(1, 3), positions.clamp(-3e38, 3e38)]).to(dtype).requires_grad_()
    for tile in range(count):
        unit = Contraction.of(tiles, tile)(positions)
        assert (unit >= 0).all() and (unit <= 1).all()
        (slope,) = torch.autograd.grad(unit.sum(), positions)
        assert slope.isfinite().all()


def test_sides() -> None:
    tiles = Tiles.build(torch.tensor([[-1.0, 0, 0], [1.0, 0, 0]]), 2)
    left, right = (Contraction.of(tiles, tile) for tile in range(2))
    at_face, far = torch.tensor([0.0, 0, 0]), torch.tensor([1e9, 1e9, -1e9])
    assert left(at_face)[0] == 1 and right(at_face)[0] == 0
    torch.testing.assert_close(right(far), torch.tensor([1.0, 1.0, 0.0]))
    (lower, upper), _ = tiles.core[1], tiles.bounds[1]
    torch.testing.assert_close(right(lower), torch.tensor([0, 0.25, 0.25]))
    torch.testing.assert_close(right(upper), torch.tensor([2 / 3, 0.75, 0.75]))
