from __future__ import annotations

from itertools import permutations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from odin_nerfstudio.plan.assignment import assign_ranks


@given(st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(1, 2))
def test_no_other_assignment_is_more_local(seed: int, ranks: int, batch: int) -> None:
    ownership = np.random.default_rng(seed).dirichlet(np.ones(ranks), size=ranks * batch)
    assigned = assign_ranks(ownership, batch)
    assert np.bincount(assigned, minlength=ranks).tolist() == [batch] * ranks
    views = np.arange(len(ownership))
    best = max(ownership[views, list(p)].sum() for p in permutations(np.repeat(np.arange(ranks), batch)))
    assert ownership[views, assigned].sum() >= best - 1e-12
