from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from odin_nerfstudio.nerfxl.tiles import Tiles, tiles_of_rank

seeds = st.integers(0, 2**32 - 1)


def draw_points(seed: int, count: int, kind: str) -> np.ndarray:
    random = np.random.default_rng(seed)
    points = random.normal(size=(count, 3)) * random.uniform(0.01, 1, 3) + random.normal(size=3)
    if kind == "repeated":
        points = points[np.zeros(count, dtype=int)]
    if kind == "flat":
        points[:, 1] = 0.7
    if kind == "far":
        points = 100 * points + 1e4
    return points


@given(seeds, st.sampled_from([0, 1, 2, 5, 200]), st.integers(1, 8), st.sampled_from(["", "repeated", "flat", "far"]))
@settings(deadline=None)
def test_every_position_has_one_owner(seed: int, points: int, count: int, kind: str) -> None:
    tiles = Tiles.build(draw_points(seed, points, kind), count)
    random = np.random.default_rng(seed)
    probes = np.concatenate([draw_points(seed, 50, kind), 1e6 * random.normal(size=(20, 3))])
    faces = tiles.bounds[tiles.bounds.isfinite()].double().numpy()
    if len(faces):
        on_faces = random.choice(faces, size=(100, 3))
        probes = np.concatenate([probes, on_faces, np.nextafter(on_faces, -np.inf)])
    for dtype in (torch.float32, torch.float64):
        positions = torch.from_numpy(probes).to(dtype)
        owners = torch.stack([tiles.contains(tile, positions) for tile in range(count)]).long()
        assert (owners.sum(0) == 1).all()
        assert torch.equal(owners.argmax(0), tiles.owner(positions))
        assert np.array_equal(tiles.owner(positions).numpy(), tiles.partition.owner(positions.numpy()))


@given(seeds, st.sampled_from([0, 1, 2, 200]), st.integers(1, 8), st.sampled_from(["", "repeated", "flat"]))
@settings(deadline=None)
def test_cores_are_boxes_within_their_tiles(seed: int, points: int, count: int, kind: str) -> None:
    tiles = Tiles.build(draw_points(seed, points, kind), count)
    assert tiles.core.isfinite().all()
    assert (tiles.core[:, 0] < tiles.core[:, 1]).all()
    assert (tiles.core[:, 0] >= tiles.bounds[:, 0]).all() and (tiles.core[:, 1] <= tiles.bounds[:, 1]).all()
    faces = tiles.bounds.isfinite()
    assert torch.equal(tiles.core[faces], tiles.bounds[faces])


def test_state_restores_the_tiles(tmp_path) -> None:
    tiles = Tiles.build(draw_points(0, 100, ""), 5)
    torch.save(tiles.state_dict(), tmp_path / "tiles.pt")
    restored = Tiles.from_state_dict(torch.load(tmp_path / "tiles.pt", weights_only=True))
    for name, value in tiles.state_dict().items():
        assert torch.equal(restored.state_dict()[name], value), name
    probes = torch.randn(1000, 3)
    assert torch.equal(restored.owner(probes), tiles.owner(probes))
    assert np.array_equal(restored.partition.bounds, tiles.partition.bounds)


def test_points_that_are_not_finite_are_ignored() -> None:
    points = torch.randn(50, 3)
    broken = torch.cat([points, torch.tensor([[torch.nan, 0, 0], [0, torch.inf, 0]])])
    assert torch.equal(Tiles.build(broken, 3).bounds, Tiles.build(points, 3).bounds)


@pytest.mark.parametrize(("ranks", "count"), [(1, 5), (2, 2), (2, 7), (3, 8), (4, 3)])
def test_ranks_share_the_tiles_in_order(ranks: int, count: int) -> None:
    shares = [tiles_of_rank(rank, ranks, count) for rank in range(ranks)]
    assert [tile for share in shares for tile in share] == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
