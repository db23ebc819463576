from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from odin_nerfstudio.nerfxl.rays import cross
from odin_nerfstudio.nerfxl.reference import draw_rays, draw_tiles
from odin_nerfstudio.nerfxl.tiles import Tiles

seeds = st.integers(0, 2**32 - 1)


@given(seeds, st.integers(1, 8), st.sampled_from([torch.float32, torch.float64]))
@settings(deadline=None)
def test_intervals_chain_from_near_to_far(seed: int, count: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    tiles = draw_tiles(generator, count)
    origins, directions, near, far, _ = (part.to(dtype) for part in draw_rays(generator, tiles))
    crossings = cross(tiles, origins, directions, near, far)
    assert torch.equal(crossings.order.sort(1).values, torch.arange(count).expand(len(origins), -1))
    enter, leave = crossings.enter.gather(1, crossings.order), crossings.leave.gather(1, crossings.order)
    assert torch.equal(enter[:, :1], near) and torch.equal(leave[:, -1:], far)
    assert torch.equal(enter[:, 1:], leave[:, :-1])
    assert (leave >= enter).all()
    assert torch.equal(crossings.hit.any(1), (far > near)[:, 0])


@given(seeds, st.integers(1, 8))
@settings(deadline=None)
def test_intervals_lie_in_their_boxes(seed: int, count: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tiles = draw_tiles(generator, count)
    origins, directions, near, far, _ = draw_rays(generator, tiles)
    crossings = cross(tiles, origins, directions, near, far)
    for share in (0.001, 0.5, 0.999):
        t = crossings.enter + share * (crossings.leave - crossings.enter)
        owner = tiles.owner(origins[:, None] + t[..., None] * directions[:, None])
        clear = crossings.leave - crossings.enter > 1e-9
        assert torch.equal(owner[clear], torch.arange(count).expand_as(owner)[clear])


@given(seeds, st.integers(1, 8), st.sampled_from([0.0, 1e4]), st.sampled_from([torch.float32, torch.float64]))
@settings(deadline=None)
def test_owners_of_rounded_positions_follow_the_order(seed: int, count: int, shift: float, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    tiles = draw_tiles(generator, count)
    origins, directions, near, far, _ = (part.to(dtype) for part in draw_rays(generator, tiles))
    tiles = Tiles.build(shift + torch.rand(100, 3, generator=generator), count)
    origins = origins + shift
    # Many positions per unit in the last place: rounding decides where they are.
    crossings = cross(tiles, origins, directions, near, far)
    around = crossings.enter.repeat_interleave(64, dim=1)
    t = (around * (1 + 8 * torch.finfo(dtype).eps * torch.randn(around.shape, generator=generator).to(dtype))).sort(1)[
        0
    ]
    owner = tiles.owner(origins[:, None] + t[..., None] * directions[:, None])
    place = crossings.order.argsort(1).gather(1, owner)
    assert (place.diff(dim=1) >= 0).all()


def test_a_ray_in_a_face_belongs_to_the_upper_side() -> None:
    tiles = Tiles.build(torch.tensor([[-1.0, 0, 0], [1.0, 0, 0]]), 2)
    assert tiles.bounds[0, 1, 0] == 0
    origins = torch.zeros(5, 3)
    directions = torch.tensor([[0.0, 1, 0], [-0.0, 1, 0], [1, 0, 0], [-1, 0, 0], [1, 0, 0]])
    near, far = torch.zeros(5, 1), torch.tensor([[1.0], [1], [1], [1], [-1]])
    crossings = cross(tiles, origins, directions, near, far)
    assert crossings.hit.tolist() == [[False, True], [False, True], [False, True], [True, False], [False, False]]
