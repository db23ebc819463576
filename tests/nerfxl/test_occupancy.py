"""The occupancy grid on fields whose opacity is known."""

from __future__ import annotations

import torch
from torch import Tensor

from odin_nerfstudio.nerfxl.occupancy import OccupancyConfig, OccupancyGrid

CONFIG = OccupancyConfig(resolution=16, update_every=4, warmup_steps=64)


def blob(positions: Tensor) -> Tensor:
    """A ball of opacity ½ with a soft edge, and nothing but a trace elsewhere."""
    return 0.5 * torch.sigmoid((0.25 - (positions - 0.4).norm(dim=-1)) * 60)


def trained(steps: int, config: OccupancyConfig = CONFIG, opacity_at=blob, seed: int = 0) -> OccupancyGrid:
    grid = OccupancyGrid(config, seed)
    for step in range(steps):
        grid.update(step, opacity_at)
    return grid


def centres(resolution: int) -> Tensor:
    axis = (torch.arange(resolution) + 0.5) / resolution
    return torch.cartesian_prod(axis, axis, axis)


def test_everything_is_occupied_until_the_warm_up_ends() -> None:
    assert bool(trained(CONFIG.warmup_steps).occupied.all())
    assert not bool(trained(CONFIG.warmup_steps + 1).occupied.all())


def test_it_converges_on_a_blob() -> None:
    grid = trained(2000)
    found = grid.occupied
    # Half a diagonal of a cell further out or in than the ball's surface, where opacity is far from the threshold.
    distance = (centres(16) - 0.4).norm(dim=-1)
    half_diagonal = 3**0.5 / 2 / 16
    # The edge falls to the threshold within 0.07 of the surface.
    assert bool(found[distance < 0.25 - half_diagonal].all())
    assert not bool(found[distance > 0.25 + 0.07 + half_diagonal].any())


def test_a_dense_cell_is_never_dropped_after_the_warm_up() -> None:
    dense = (centres(16) - 0.4).norm(dim=-1) < 0.2
    grid = trained(CONFIG.warmup_steps)
    for step in range(CONFIG.warmup_steps, 1500):
        grid.update(step, blob)
        assert bool(grid.occupied[dense].all())


def test_what_appears_later_is_found_within_four_updates() -> None:
    grid = trained(600)
    corner = torch.full((1, 3), 0.95)
    assert not bool(grid(corner))
    for step in range(600, 600 + 4 * CONFIG.update_every):
        grid.update(step, lambda positions: (positions > 0.9).all(dim=-1).float())
    assert bool(grid(corner))


def test_what_moves_is_let_go_where_it_was() -> None:
    grid = trained(200)
    for step in range(200, 2000):
        grid.update(step, lambda positions: (positions[:, 0] > 0.9).float())
    assert torch.equal(grid.occupied, centres(16)[:, 0] > 14 / 16)


def test_a_field_below_the_threshold_everywhere_keeps_its_denser_half() -> None:
    grid = trained(400, opacity_at=lambda positions: 1e-4 * (1 + positions[:, 0]))
    assert 0.4 < grid.occupied.float().mean() < 0.6


def test_positions_are_looked_up_in_their_cells() -> None:
    grid = OccupancyGrid(OccupancyConfig(resolution=4), 0)
    grid.occupied.zero_()
    grid.occupied[(3 * 4 + 1) * 4 + 2] = True
    inside = torch.tensor([[0.76, 0.26, 0.51], [0.99, 0.49, 0.74], [1.0, 0.3, 0.6], [1.2, 0.3, 0.6]])
    outside = torch.tensor([[0.74, 0.26, 0.51], [0.76, 0.51, 0.51], [0.76, 0.26, 0.49], [0.26, 0.51, 0.76]])
    assert grid(inside).tolist() == [True] * 4
    assert grid(outside).tolist() == [False] * 4
    assert grid(torch.rand(0, 3)).shape == (0,)


def test_cells_are_looked_at_where_they_lie() -> None:
    seen: list[Tensor] = []

    def record(positions: Tensor) -> Tensor:
        seen.append(positions)
        return torch.zeros(len(positions))

    OccupancyGrid(OccupancyConfig(resolution=5), 0).update(0, record)
    assert torch.equal((seen[0] * 5).floor(), (centres(5) * 5).floor())


def test_draws_depend_on_seed_and_step_alone() -> None:
    first, second = trained(300), trained(200)
    torch.rand(10)
    for step in range(200, 300):
        second.update(step, blob)
    assert torch.equal(first.opacity, second.opacity)
    assert not torch.equal(first.opacity, trained(300, seed=1).opacity)


def test_a_resumed_grid_goes_on_as_if_nothing_had_happened() -> None:
    grid, resumed = trained(200), OccupancyGrid(CONFIG, 0)
    resumed.load_state_dict(grid.state_dict())
    for step in range(200, 300):
        grid.update(step, blob)
        resumed.update(step, blob)
    assert torch.equal(grid.occupied, resumed.occupied) and torch.equal(grid.opacity, resumed.opacity)
