from __future__ import annotations

import numpy as np
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st

from odin_nerfstudio.plan.conflict import mean_coupling, predicted_conflict


@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(1, 3))
def test_equals_late_over_scope(seed: int, size: int, window: int) -> None:
    random = np.random.default_rng(seed)
    seen = random.random((12, 30)) < 0.1
    groups = random.integers(12, size=(9, size))
    expected = []
    for step in range(1, len(groups)):
        scope = seen[groups[step]].any(axis=0)
        pending = seen[groups[max(step - window, 0) : step].ravel()].any(axis=0)
        expected.append((scope & pending).sum() / max(scope.sum(), 1))
    np.testing.assert_allclose(predicted_conflict(groups, sp.csr_array(seen), window), expected)


@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(1, 3))
def test_equals_the_mean_over_pairs(seed: int, size: int, lag: int) -> None:
    random = np.random.default_rng(seed)
    weights = random.random((12, 12)) * (random.random((12, 12)) < 0.4)
    groups = random.integers(12, size=(9, size))
    with_self = weights * (1 - np.eye(12)) + np.eye(12)
    pairs = [with_self[a, b] for s in range(lag, 9) for a in groups[s] for b in groups[s - lag]]
    np.testing.assert_allclose(mean_coupling(groups, sp.csr_array(weights), lag), np.mean(pairs))
