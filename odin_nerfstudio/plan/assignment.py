"""Which rank renders which view of a group (design §2): near its primitives, and with even loads."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment


def assign_ranks(
    ownership: NDArray[np.float64], batch_per_rank: int, costs: NDArray[np.float64] | None = None
) -> NDArray[np.int64]:
    """Gives every rank exactly ``batch_per_rank`` of the group's views.

    Without costs, one linear assignment maximises the share of primitives that are local. With them, views are dealt
    in rounds of one per rank, the dearest first; a round charges a view's cost against the load its rank has already.

    Args:
        ownership: (n, G) share of each view's points that each rank owns; n = G × batch_per_rank.
        batch_per_rank: B.
        costs: (n,) measured cost of rendering each view, any unit.

    Returns:
        (n,) rank of each view.
    """
    views, ranks = ownership.shape
    if costs is None:
        remote = np.repeat(1 - ownership, batch_per_rank, axis=1)
        return linear_sum_assignment(remote)[1] // batch_per_rank
    relative = costs / (float(costs.mean()) or 1.0)
    by_cost = np.argsort(-relative, kind="stable")
    assigned = np.empty(views, dtype=np.int64)
    load = np.zeros(ranks)
    for start in range(0, views, ranks):
        dealt = by_cost[start : start + ranks]
        # The products are least when heavy views go to light ranks.
        rank = linear_sum_assignment(1 - ownership[dealt] + np.outer(relative[dealt], load))[1]
        assigned[dealt] = rank
        load[rank] += relative[dealt]
    return assigned
