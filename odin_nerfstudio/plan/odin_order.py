"""Odin's order (design §2): every group is weakly coupled, in the RLG, to the ``window`` groups before it.

An epoch is filled group by group, each the best of a random pool of the views that are left, and then repaired by
swaps, since the last groups have little to choose from. Its first ``window`` groups, its *anchors*, and the views it
hands to the next epoch are drawn first, from the seed alone: the end of an epoch can then avoid the beginning of the
next one, although neither needs the other's order.
"""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from odin_nerfstudio.plan.order import ShuffledTails, Views, generator

REPAIRED_SLOTS = 2_000
"""Views of an epoch, those with the strongest coupling first, that a pass of the repair tries to move."""
REPAIR_PASSES = 2
"""Passes of the repair."""
DENSE = 2_048
"""Views up to which the RLG is looked up in a full matrix, which takes 32 MiB and a tenth of the time."""


class OdinOrder:
    """Weak coupling inside the window, randomness everywhere else."""

    def __init__(self, rlg: sp.csr_array, tails: ShuffledTails, window: int, pool: int) -> None:
        """
        Args:
            rlg: (V, V) relative locality graph.
            tails: what every epoch hands to the next one.
            window: how many groups before a group it should not conflict with.
            pool: random candidates looked at per view to place.
        """
        self.coupling = _Coupling(rlg)
        self.tails = tails
        self.stream = tails.stream
        self.window = window
        self.pool = pool * tails.stream.group_size

    def epoch(self, epoch: int) -> Views:
        carry, tail = self.tails(epoch - 1), self.tails(epoch)
        random = generator(self.tails.seed, epoch, "order")
        anchors = self._anchors(epoch)
        following = self._anchors(epoch + 1)
        taken = np.concatenate([anchors.ravel()[len(carry) :], tail])
        left = random.permutation(np.setdiff1d(np.arange(self.stream.views), taken))
        groups = np.concatenate([anchors, self._fill(anchors, left), following])
        self._repair(groups, slice(len(anchors), len(groups) - len(following)), random)
        own = groups[: len(groups) - len(following)].ravel()[len(carry) :]
        return np.concatenate([own, tail])

    def _anchors(self, epoch: int) -> Views:
        """(A, n) the first groups of the epoch, beginning with the one that it shares with the epoch before."""
        size, carry, tail = self.stream.group_size, self.tails(epoch - 1), self.tails(epoch)
        head = self.stream.head(epoch)
        left = generator(self.tails.seed, epoch, "anchors").permutation(self.stream.views)
        left = left[~np.isin(left, tail)]
        free = left[~np.isin(left, carry)]
        first = np.concatenate([carry, free[: head or size]])[None]
        left = left[~np.isin(left, first[0, len(carry) :])]
        return np.concatenate([first, self._fill(first, left, self.window - 1)])

    def _fill(self, before: Views, left: Views, count: int | None = None) -> Views:
        """Forms groups of the views that are left, one after the other.

        Args:
            before: (B, n) the groups that lie before.
            left: views to choose from, in random order.
            count: groups to form at most; None: as many as there are.

        Returns:
            (count, n) groups.
        """
        size = self.stream.group_size
        count = len(left) // size if count is None else min(count, len(left) // size)
        groups = np.concatenate([before, np.empty((count, size), dtype=np.int64)])
        pool, next_view = left[: self.pool], self.pool
        for g in range(len(before), len(groups)):
            near = groups[max(g - self.window, 0) : g].ravel()
            best = np.argsort(self.coupling.between(pool, near), kind="stable")[:size]
            groups[g] = pool[best]
            fresh = left[next_view : next_view + size]
            next_view += size
            pool = np.concatenate([np.delete(pool, best), fresh])
        return groups[len(before) :]

    def _repair(self, groups: Views, movable: slice, random: np.random.Generator) -> None:
        """Swaps views of the movable groups where that lowers the coupling; the worst placed are tried first."""
        size, first = self.stream.group_size, movable.start
        count = (movable.stop - movable.start) * size
        for _ in range(REPAIR_PASSES):
            cost = np.array([self._cost(groups, g) for g in range(movable.start, movable.stop)]).ravel()
            worst = np.argsort(-cost, kind="stable")[:REPAIRED_SLOTS]
            for slot in worst[cost[worst] > 0]:
                others = random.choice(count, min(self.pool, count), replace=False)
                others = others[np.abs(others // size - slot // size) > self.window]
                if len(others):
                    self._swap(groups, int(slot) + first * size, others + first * size)

    def _cost(self, groups: Views, g: int) -> NDArray[np.float64]:
        """(n,) coupling of each view of group g to the groups within the window, on both sides."""
        return self.coupling.between(groups[g], self._near(groups, g))

    def _near(self, groups: Views, g: int) -> Views:
        return np.concatenate([groups[max(g - self.window, 0) : g], groups[g + 1 : g + 1 + self.window]]).ravel()

    def _swap(self, groups: Views, slot: int, others: Views) -> None:
        """Swaps the view in ``slot`` with the one of ``others`` that lowers the sum of both costs most, if any does."""
        flat, size = groups.reshape(-1), self.stream.group_size
        near_slot = self._near(groups, slot // size)
        near_others = [self._near(groups, other // size) for other in others]
        which = np.repeat(np.arange(len(others)), [len(near) for near in near_others])
        near = np.concatenate(near_others)
        view, candidates = flat[slot], flat[others]
        before = self.coupling.between(flat[[slot]], near_slot)
        after = self.coupling.between(candidates, near_slot)
        before_others = np.bincount(which, self.coupling.pairs(candidates[which], near), len(others))
        after_others = np.bincount(which, self.coupling.between(near, view[None]), len(others))
        change = after + after_others - before - before_others
        best = int(change.argmin())
        if change[best] < 0:
            flat[slot], flat[others[best]] = candidates[best], view


class _Coupling:
    """Sums of RLG weights between few views.

    A view is coupled to itself by 1: it can stand in two groups that follow each other across the end of an epoch.
    """

    def __init__(self, rlg: sp.csr_array) -> None:
        self.weights = sp.csr_array(rlg + sp.eye_array(rlg.shape[0], dtype=rlg.dtype))
        self._dense = self.weights.toarray().astype(np.float64) if rlg.shape[0] <= DENSE else None

    def between(self, views: Views, near: Views) -> NDArray[np.float64]:
        """(len(views),) Σ over ``near`` of w."""
        if self._dense is not None:
            return self._dense[near[:, None], views].sum(0)
        indptr, indices, data = self.weights.indptr, self.weights.indices, self.weights.data
        total = np.zeros(len(indptr) - 1)
        for view in near:
            row = slice(indptr[view], indptr[view + 1])
            total[indices[row]] += data[row]
        return total[views]

    def pairs(self, views: Views, others: Views) -> NDArray[np.float64]:
        """(N,) w between N views and N others, pair by pair."""
        if self._dense is not None:
            return self._dense[views, others]
        return np.asarray(self.weights[views, others]).ravel()
