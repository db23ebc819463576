from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

from odin_nerfstudio.errors import UserError
from odin_nerfstudio.plan.capture import find_colmap_model
from odin_nerfstudio.plan.colmap_model import read_colmap_model
from odin_nerfstudio.plan.conflict import mean_coupling, predicted_conflict
from odin_nerfstudio.plan.locality_graph import relative_locality_graph
from odin_nerfstudio.plan.schedule import Schedule, ScheduleConfig

orders = st.sampled_from(["odin", "locality-only", "random"])


def some_rlg(views: int, seed: int = 0, density: float = 0.15) -> sp.csr_array:
    seen = np.random.default_rng(seed).random((views, 4 * views)) < density
    return relative_locality_graph(sp.csr_array(seen))


def ring(views: int, reach: int = 3) -> sp.csr_array:
    """Views on a ring, each coupled to its nearest neighbours."""
    seen = sum(np.roll(np.eye(views, dtype=bool), k, axis=1) for k in range(reach)) > 0
    return relative_locality_graph(sp.csr_array(seen))


@given(st.data(), orders, st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), st.integers(0, 2**31))
@settings(deadline=None)
def test_every_view_comes_once_per_epoch(data, order, world_size, batch_per_rank, window, seed) -> None:
    size = world_size * batch_per_rank
    views = data.draw(st.integers(size, 4 * size + 7))
    config = ScheduleConfig(order=order, window=window, pool=2, seed=seed)
    schedule = Schedule(some_rlg(views, seed), config, world_size, batch_per_rank)
    epochs = 5
    groups = [group for epoch in range(epochs) for group in schedule.epoch(epoch)]
    assert [group.step for group in groups] == list(range(epochs * views // size))
    stream = np.concatenate([group.views for group in groups])
    for epoch in range(epochs - 1):
        assert sorted(stream[epoch * views : (epoch + 1) * views]) == list(range(views))
    assert max(Counter(stream[(epochs - 1) * views :]).values(), default=1) == 1
    for group in groups:
        assert len(set(group.views)) == size
        assert all(len(group.of_rank(rank)) == batch_per_rank for rank in range(world_size))


@given(orders, st.integers(0, 2**31), st.integers(0, 300))
@settings(deadline=None, max_examples=30)
def test_a_step_needs_no_history(order, seed, step) -> None:
    rlg = some_rlg(23)
    resumed = Schedule(rlg, ScheduleConfig(order=order, window=2, seed=seed), 3, 2)
    unbroken = Schedule(rlg, ScheduleConfig(order=order, window=2, seed=seed), 3, 2)
    earlier = [group.views for group, _ in zip(unbroken, range(step), strict=False)]
    np.testing.assert_array_equal(resumed.group(step).views, unbroken.group(step).views)
    assert len(earlier) == step


def test_fingerprint_tells_schedules_apart() -> None:
    rlg, ownership = some_rlg(20), np.full((20, 2), 0.5)
    base = Schedule(rlg, ScheduleConfig(), 2)
    assert Schedule(rlg.copy(), ScheduleConfig(), 2).fingerprint() == base.fingerprint()
    others = [
        Schedule(rlg, ScheduleConfig(seed=1), 2),
        Schedule(rlg, ScheduleConfig(window=2), 2),
        Schedule(rlg, ScheduleConfig(order="random"), 2),
        Schedule(rlg, ScheduleConfig(), 1, 2),
        Schedule(rlg, ScheduleConfig(), 2, ownership=ownership),
        Schedule(some_rlg(20, seed=1), ScheduleConfig(), 2),
    ]
    assert len({base.fingerprint(), *(other.fingerprint() for other in others)}) == len(others) + 1


@pytest.mark.parametrize("order", ["odin", "random"])
def test_epochs_and_seeds_differ(order) -> None:
    schedule = Schedule(ring(40), ScheduleConfig(order=order), 2)
    first, second = ({tuple(group.views) for group in schedule.epoch(epoch)} for epoch in range(2))
    other = {tuple(group.views) for group in Schedule(ring(40), ScheduleConfig(order=order, seed=1), 2).epoch(0)}
    assert len(first & second) <= 3 and len(first & other) <= 3


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_odin_order_keeps_neighbours_apart(window: int, world_size: int) -> None:
    """On a ring of 70 views there is room for no conflict at all, also across the ends of epochs."""
    rlg = ring(70)
    schedule = Schedule(rlg, ScheduleConfig(window=window), world_size)
    groups = np.array([schedule.group_views(step) for step in range(schedule.steps(6).start)])
    for lag in range(1, window + 1):
        assert mean_coupling(groups, rlg, lag) <= 0.002


def test_locality_only_walks_along_neighbours() -> None:
    schedule = Schedule(ring(30), ScheduleConfig(order="locality-only"), 2)
    walk = np.concatenate([group.views for group in schedule.epoch(0)])
    steps = np.abs(np.diff(walk))
    assert (np.minimum(steps, 30 - steps) == 1).sum() >= 27
    np.testing.assert_array_equal(walk, np.concatenate([group.views for group in schedule.epoch(1)]))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_conflict_on_an_aerial_survey_is_a_tenth_of_random(shared_data, world_size: int) -> None:
    incidence = read_colmap_model(find_colmap_model(shared_data("seneca"))).tracks
    rlg = relative_locality_graph(incidence)
    late, coupling = {}, {}
    for order in ("odin", "random"):
        schedule = Schedule(rlg, ScheduleConfig(order=order), world_size)
        groups = np.array([schedule.group_views(step) for step in range(schedule.steps(4).start)])
        late[order] = predicted_conflict(groups, incidence, window=1).mean()
        coupling[order] = mean_coupling(groups, rlg, lag=1)
    assert late["odin"] <= 0.1 * late["random"]
    assert coupling["odin"] <= 0.1 * coupling["random"]


def test_views_go_where_their_points_are() -> None:
    ownership = np.eye(2)[np.arange(20) % 2]
    schedule = Schedule(sp.csr_array((20, 20)), ScheduleConfig(), 2, ownership=ownership)
    for group in schedule.epoch(0):
        parity = group.views % 2
        if parity.sum() == 1:
            np.testing.assert_array_equal(group.ranks, parity)


@pytest.mark.parametrize(
    ("world_size", "batch_per_rank", "config", "message"),
    [
        (3, 2, ScheduleConfig(), "world size 3 x batch per rank 2 needs 6 views per step, but the capture has 5 "),
        (0, 1, ScheduleConfig(), "world size must be at least 1, not 0"),
        (1, 0, ScheduleConfig(), "batch per rank must be at least 1, not 0"),
        (1, 1, ScheduleConfig(window=0), "window must be at least 1, not 0"),
    ],
)
def test_refuses_what_cannot_be_scheduled(world_size, batch_per_rank, config, message) -> None:
    with pytest.raises(UserError, match=message):
        Schedule(some_rlg(5), config, world_size, batch_per_rank)
