"""The relative locality graph (RLG, design §2; Odin, arXiv 2607.19893): which views conflict, and how likely.

Vertices are views; the weight of an edge is the Jaccard similarity of what the two views see,
``w_ij = |P_i ∩ P_j| / |P_i ∪ P_j|``. All intersections at once are the product of the view × point incidence with its
transpose, and the unions follow from them: ``|P_i ∪ P_j| = |P_i| + |P_j| − |P_i ∩ P_j|``.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import scipy.sparse as sp

ROWS_PER_BLOCK = 256
"""Views per piece of the product: small enough that the intersections of a piece stay in cache."""
ENTRIES_PER_PIECE = 1 << 20
"""Entries renumbered at a time."""


def relative_locality_graph(incidence: sp.csr_array) -> sp.csr_array:
    """The RLG of a view × point incidence.

    Args:
        incidence: (V, P) bool, without duplicate entries: view i sees point p.

    Returns:
        (V, V) float32 weights in (0, 1], symmetric, zero diagonal (not stored), sorted indices.
    """
    views = incidence.shape[0]
    counts = _in_order_of_appearance(incidence)
    transposed = counts.T.tocsr()
    seen = np.diff(counts.indptr)

    def block(start: int) -> sp.csr_array:
        stop = min(start + ROWS_PER_BLOCK, views)
        shared = counts[start:stop] @ transposed
        shared.sort_indices()
        row = np.repeat(np.arange(start, stop), np.diff(shared.indptr))
        union = seen[row] + seen[shared.indices] - shared.data
        weights = (shared.data / union).astype(np.float32)
        keep = shared.indices != row
        indptr = np.concatenate([[0], np.cumsum(keep)])[shared.indptr].astype(shared.indptr.dtype)
        return sp.csr_array((weights[keep], shared.indices[keep], indptr), shape=(stop - start, views))

    # SciPy's product leaves the interpreter lock, so threads share one copy of the incidence.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        blocks = list(pool.map(block, range(0, views, ROWS_PER_BLOCK)))
    return sp.vstack(blocks, format="csr") if blocks else sp.csr_array((0, 0), dtype=np.float32)


def _in_order_of_appearance(incidence: sp.csr_array) -> sp.csr_array:
    """The incidence as int32 counts, its points renumbered in the order in which the views first name them.

    Points that the same views see then lie close together in memory, which makes the product many times faster when a
    capture's numbering is not local.
    """
    indices, entries = incidence.indices, incidence.nnz
    if entries == 0:
        return incidence.astype(np.int32)
    first = np.zeros(incidence.shape[1], dtype=indices.dtype)
    for end in range(entries, 0, -ENTRIES_PER_PIECE):  # backwards: the earliest entry of a point is written last
        start = max(end - ENTRIES_PER_PIECE, 0)
        first[indices[start:end][::-1]] = np.arange(start, end, dtype=first.dtype)[::-1]
    appears = np.zeros(entries, dtype=bool)
    appears[first] = True  # a point that nobody sees names entry 0, which is an appearance anyway
    number = (np.cumsum(appears, dtype=indices.dtype) - 1)[first]
    return sp.csr_array((np.ones(entries, dtype=np.int32), number[indices], incidence.indptr), shape=incidence.shape)
