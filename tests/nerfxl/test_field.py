"""Fields of tiles and their shared head: shapes, gradients, what is saved, what the split layer computes."""

from __future__ import annotations

import pytest
import torch
from nerfstudio.utils.math import components_from_spherical_harmonics

from odin_nerfstudio.nerfxl.field import SharedHead, SharedHeadConfig, TileField, TileFieldConfig
from odin_nerfstudio.nerfxl.hash_grid import HashGridConfig

GRID = HashGridConfig(levels=4, features=2, log2_table_size=10, base_resolution=4, max_resolution=64)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def directions(n: int) -> torch.Tensor:
    return torch.nn.functional.normalize(torch.randn(n, 3, generator=rng(9)), dim=-1)


@pytest.mark.parametrize("n", [0, 1, 33])
def test_shapes_and_gradients_of_a_tile(n: int) -> None:
    tile = TileField(TileFieldConfig(grid=GRID), rng())
    positions = torch.rand(n, 3, generator=rng(1), requires_grad=True)
    density, geometry = tile(positions)
    assert density.shape == (n,) and geometry.shape == (n, 15)
    assert bool((density > 0).all())
    (density.sum() + geometry.sum()).backward()
    # A rank without samples still takes part: its gradients exist, and are zero.
    for parameter in tile.parameters():
        assert parameter.grad is not None
        assert bool(parameter.grad.any()) == (n > 0)
    assert positions.grad.shape == (n, 3)


def test_an_untrained_tile_has_about_the_initial_density() -> None:
    tile = TileField(TileFieldConfig(grid=GRID, average_init_density=0.3), rng())
    density, _ = tile(torch.rand(100, 3, generator=rng(1)))
    assert bool((density > 0.3 / 2).all()) and bool((density < 0.3 * 2).all())


def test_opposite_faces_of_a_tile_share_nothing_in_dense_levels() -> None:
    dense = HashGridConfig(levels=2, features=1, log2_table_size=14, base_resolution=4, max_resolution=8)
    tile = TileField(TileFieldConfig(grid=dense), rng())
    face = torch.rand(500, 3, generator=rng(1))
    touched = []
    for side in (0.0, 1.0):
        face[:, 0] = side
        tile.zero_grad()
        tile.grid(face * tile.grid.layout.extent).sum().backward()
        touched.append(tile.grid.table.grad != 0)
    assert not bool((touched[0] & touched[1]).any())


@pytest.mark.parametrize("embed_dim", [0, 8])
def test_the_head_is_a_network_on_harmonics_appearance_and_geometry(embed_dim: int) -> None:
    head = SharedHead(
        SharedHeadConfig(hidden_dim=16, appearance_embed_dim=embed_dim), 15, num_images=5, generator=rng()
    )
    view, images, ray_ids = directions(3), torch.tensor([4, 0, 4]), torch.tensor([0, 0, 2, 1, 2])
    geometry = torch.randn(5, 15, generator=rng(2))
    rgb = head(geometry, head.encode_rays(view, images), ray_ids)
    assert rgb.shape == (5, 3)

    per_ray = components_from_spherical_harmonics(4, view)
    if embed_dim:
        per_ray = torch.cat((per_ray, head.appearance(images)), dim=-1)
    per_ray = per_ray[ray_ids]
    weight = torch.cat((head.ray_layer.weight, head.geometry_layer.weight), dim=1)
    hidden = torch.relu(torch.cat((per_ray, geometry), dim=-1) @ weight.T + head.ray_layer.bias)
    torch.testing.assert_close(rgb, torch.sigmoid(head.mlp(hidden)))


def test_gradients_of_the_head() -> None:
    head = SharedHead(SharedHeadConfig(), 15, num_images=5, generator=rng())
    view = directions(3).requires_grad_()
    geometry = torch.randn(6, 15, generator=rng(2), requires_grad=True)
    head(geometry, head.encode_rays(view, torch.tensor([1, 1, 3])), torch.tensor([0, 1, 1, 2, 2, 2])).sum().backward()
    assert all(bool(parameter.grad.any()) for parameter in head.parameters())
    assert head.appearance.weight.grad.any(dim=1).tolist() == [False, True, False, True, False]
    assert bool(view.grad.any()) and bool(geometry.grad.any())


def test_appearance_of_views_that_are_not_training_images() -> None:
    mean = SharedHead(SharedHeadConfig(), 15, num_images=2, generator=rng())
    zeros = SharedHead(SharedHeadConfig(use_average_appearance_embedding=False), 15, num_images=2, generator=rng())
    view = directions(4)
    with torch.no_grad():
        between = (mean.encode_rays(view, torch.zeros(4).long()) + mean.encode_rays(view, torch.ones(4).long())) / 2
        torch.testing.assert_close(mean.encode_rays(view, None), between)
        zeros.appearance.weight[1] = 0
        torch.testing.assert_close(zeros.encode_rays(view, None), zeros.encode_rays(view, torch.ones(4).long()))


def test_a_saved_field_is_the_same_field() -> None:
    config = TileFieldConfig(grid=GRID)
    tile, other = TileField(config, rng()), TileField(config, rng(1))
    positions = torch.rand(20, 3)
    assert not torch.equal(tile(positions)[0], other(positions)[0])
    other.load_state_dict(tile.state_dict())
    assert torch.equal(tile(positions)[0], other(positions)[0])
    names = ["grid.table", "mlp.0.weight", "mlp.0.bias", "mlp.2.weight", "mlp.2.bias"]
    assert list(tile.state_dict()) == names


def test_a_generator_decides_all_initial_parameters() -> None:
    for build in (
        lambda: TileField(TileFieldConfig(grid=GRID), rng(7)),
        lambda: SharedHead(SharedHeadConfig(), 15, 3, rng(7)),
    ):
        torch.manual_seed(0)
        first = build()
        torch.manual_seed(1)
        second = build()
        assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_float64_all_the_way() -> None:
    tile, head = TileField(TileFieldConfig(grid=GRID)).double(), SharedHead(SharedHeadConfig(), 15, 2).double()
    density, geometry = tile(torch.rand(4, 3, dtype=torch.float64))
    rgb = head(geometry, head.encode_rays(directions(4).double(), None), torch.arange(4))
    assert density.dtype == geometry.dtype == rgb.dtype == torch.float64
