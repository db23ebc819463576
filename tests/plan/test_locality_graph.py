from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st

from odin_nerfstudio.plan import locality_graph
from odin_nerfstudio.plan.capture import find_colmap_model
from odin_nerfstudio.plan.colmap_model import read_colmap_model
from odin_nerfstudio.plan.locality_graph import relative_locality_graph


def jaccard(seen: np.ndarray) -> np.ndarray:
    sets = [set(np.flatnonzero(row)) for row in seen]
    weight = [[len(a & b) / len(a | b) if a | b else 0 for b in sets] for a in sets]
    return np.array(weight).reshape(len(sets), len(sets)) * (1 - np.eye(len(sets)))


@given(st.integers(0, 2**32 - 1), st.integers(1, 30), st.integers(0, 60), st.floats(0, 1))
def test_equals_the_jaccard_of_sets(seed: int, views: int, points: int, density: float) -> None:
    seen = np.random.default_rng(seed).random((views, points)) < density
    rlg = relative_locality_graph(sp.csr_array(seen))
    np.testing.assert_allclose(rlg.toarray(), jaccard(seen), atol=1e-7)
    assert rlg.shape == (views, views) and rlg.has_sorted_indices
    assert abs(rlg - rlg.T).nnz == 0
    assert rlg.nnz == 0 or (rlg.data.min() > 0 and rlg.data.max() <= 1)
    assert (rlg.diagonal() == 0).all()


def test_pieces_and_blocks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = sp.csr_array(np.random.default_rng(1).random((50, 90)) < 0.2)
    whole = relative_locality_graph(seen).toarray()
    monkeypatch.setattr(locality_graph, "ROWS_PER_BLOCK", 7)
    monkeypatch.setattr(locality_graph, "ENTRIES_PER_PIECE", 11)
    np.testing.assert_array_equal(relative_locality_graph(seen).toarray(), whole)


@pytest.mark.parametrize("name", ["fox", "alexander"])
def test_equals_the_jaccard_of_real_tracks(shared_data, name: str) -> None:
    model = read_colmap_model(find_colmap_model(shared_data(name)))
    weights = relative_locality_graph(model.tracks).toarray()
    np.testing.assert_allclose(weights, jaccard(model.tracks.toarray()), atol=1e-7)
