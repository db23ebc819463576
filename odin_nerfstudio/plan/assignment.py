"""Which rank renders which view of a group (design §2): one near its primitives."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment


def assign_ranks(ownership: NDArray[np.float64], batch_per_rank: int) -> NDArray[np.int64]:
    """Gives every rank exactly ``batch_per_rank`` of the group's views, so that most primitives are local.

    Args:
        ownership: (n, G) share of each view's points that each rank owns; n = G × batch_per_rank.
        batch_per_rank: B.

    Returns:
        (n,) rank of each view.
    """
    remote = np.repeat(1 - ownership, batch_per_rank, axis=1)
    return linear_sum_assignment(remote)[1] // batch_per_rank
