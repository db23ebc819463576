from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odin_nerfstudio.plan.partition import Partition

cells_to_try = st.integers(1, 17)


def inside(bounds: np.ndarray, points: np.ndarray) -> np.ndarray:
    """(N, k) whether a point lies in a cell; a lower face belongs to the cell, an upper one does not."""
    return ((points[:, None] >= bounds[:, 0]) & (points[:, None] < bounds[:, 1])).all(axis=2)


@given(st.integers(0, 2**32 - 1), st.integers(0, 300), cells_to_try, st.sampled_from([1.0, 1e-6, 1e6]))
@settings(deadline=None)
def test_every_place_has_one_owner_and_cells_share_the_points(seed, count, cells, scale) -> None:
    random = np.random.default_rng(seed)
    points = scale * random.normal(size=(count, 3)) * random.uniform(0.01, 1, 3) + scale * random.normal(size=3)
    partition = Partition.build(points, cells)
    assert len(partition) == cells and partition.bounds.shape == (cells, 2, 3)
    held = np.bincount(partition.owner(points), minlength=cells)
    assert np.abs(held - count / cells).max() <= 1

    faces = partition.bounds[np.isfinite(partition.bounds)]
    probes = np.concatenate([points, 50 * scale * random.normal(size=(100, 3))])
    if len(faces):
        on_faces = random.choice(faces, size=(100, 3))
        probes = np.concatenate([probes, on_faces, np.nextafter(on_faces, -np.inf)])
    owned = inside(partition.bounds, probes)
    assert (owned.sum(axis=1) == 1).all()
    np.testing.assert_array_equal(owned.argmax(axis=1), partition.owner(probes))


@given(st.integers(0, 2**32 - 1), st.integers(0, 40), cells_to_try)
@settings(deadline=None)
def test_duplicates_and_few_points(seed: int, count: int, cells: int) -> None:
    random = np.random.default_rng(seed)
    points = random.integers(0, 3, size=(count, 3)).astype(float)
    partition = Partition.build(points, cells)
    probes = np.concatenate([points, random.normal(size=(50, 3))])
    owned = inside(partition.bounds, probes)
    assert (owned.sum(axis=1) == 1).all()
    np.testing.assert_array_equal(owned.argmax(axis=1), partition.owner(probes))
    assert (partition.bounds[:, 0] < partition.bounds[:, 1]).all()


@pytest.mark.parametrize(("extent", "cells", "cuts"), [((4, 1, 1), 4, [3, 0, 0]), ((2, 2, 0.1), 4, [1, 1, 0])])
def test_cells_are_cubic(extent, cells, cuts) -> None:
    points = np.random.default_rng(0).uniform(size=(5_000, 3)) * extent
    bounds = Partition.build(points, cells).bounds
    found = [len(np.unique(np.round(b[np.isfinite(b)]))) for b in bounds.transpose(2, 0, 1)]
    assert found == cuts


def test_is_deterministic_and_exact_in_single_precision() -> None:
    points = np.random.default_rng(0).normal(size=(1_000, 3)).astype(np.float32)
    first, second = Partition.build(points, 5), Partition.build(points.copy(), 5)
    np.testing.assert_array_equal(first.bounds, second.bounds)
    np.testing.assert_array_equal(first.owner(points), second.owner(points.astype(np.float64)))


def test_needs_a_cell() -> None:
    with pytest.raises(ValueError, match="at least one cell"):
        Partition.build(np.zeros((3, 3)), 0)
