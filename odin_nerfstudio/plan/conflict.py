"""How much the groups of a schedule will conflict, predicted from what their views see."""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray


def predicted_conflict(groups: NDArray[np.int64], incidence: sp.csr_array, window: int) -> NDArray[np.float64]:
    """The late share that each group would meet if the groups in the window before it were all pending.

    With points standing for primitives this is |late| / |scope|: of the points that the group sees, the part that one
    of the ``window`` groups before it sees too.

    Args:
        groups: (S, n) views of S steps that follow each other.
        incidence: (V, P) bool: view sees point.
        window: groups in flight before a group.

    Returns:
        (S − 1,) shares in [0, 1], from the second group on; 0 for a group that sees nothing.
    """
    last_seen = np.full(incidence.shape[1], -1 - window)
    shares = np.zeros(len(groups))
    for step, views in enumerate(groups):
        rows = [incidence.indices[incidence.indptr[view] : incidence.indptr[view + 1]] for view in views]
        scope = rows[0] if len(rows) == 1 else np.unique(np.concatenate(rows))
        if len(scope):
            shares[step] = np.mean(last_seen[scope] >= step - window)
        last_seen[scope] = step
    return shares[1:]


def points_seen(group: NDArray[np.int64], incidence: sp.csr_array) -> NDArray[np.integer]:
    """(m,) ascending, the points that any view of a group ((n,)) sees."""
    return np.unique(incidence[group].indices)


def mean_coupling(groups: NDArray[np.int64], rlg: sp.csr_array, lag: int) -> float:
    """Mean RLG weight between a view of a group and a view of the group ``lag`` steps before it.

    Args:
        groups: (S, n) views of S > lag steps that follow each other.
        rlg: (V, V) relative locality graph; a view that stands in both groups counts as 1.
        lag: steps between the two groups, ≥ 1.
    """
    later, earlier = np.broadcast_arrays(groups[lag:, :, None], groups[:-lag, None, :])
    later, earlier = later.ravel(), earlier.ravel()
    weights = np.asarray(rlg[later, earlier]).ravel()
    return float(np.where(later == earlier, 1.0, weights).mean())
