"""Three orders of the views of an epoch. Each is a function of the epoch's number alone, so that a resume is cheap."""

from __future__ import annotations

from functools import lru_cache
from typing import Protocol

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

Views = NDArray[np.int64]


class Order(Protocol):
    """The order in which an epoch visits its views."""

    def epoch(self, epoch: int) -> Views:
        """(V,) every view exactly once, in the order of the epoch."""


class Stream:
    """The views of all epochs, one after the other, cut into groups of n: where an epoch's pieces lie.

    Of the V views of epoch e, the first ``head(e)`` complete the group that the epoch before it left open, and the last
    ``tail(e)`` open the group that the next epoch completes.
    """

    def __init__(self, views: int, group_size: int) -> None:
        self.views = views
        self.group_size = group_size

    def head(self, epoch: int) -> int:
        return -epoch * self.views % self.group_size

    def tail(self, epoch: int) -> int:
        return (epoch + 1) * self.views % self.group_size if epoch >= 0 else 0


class ShuffledTails:
    """The tails of all epochs, drawn from the seed before any epoch is ordered.

    A tail is known without its epoch's order, so the group across a boundary is too: this is what makes epochs
    independent of each other. A view never stands twice in that group.
    """

    def __init__(self, stream: Stream, seed: int) -> None:
        self.stream = stream
        self.seed = seed
        self._cached = lru_cache(maxsize=8)(self._tail)

    def __call__(self, epoch: int) -> Views:
        """The last ``tail(epoch)`` views of the epoch; epoch −1 has none."""
        return self._cached(epoch)

    def _tail(self, epoch: int) -> Views:
        first = epoch
        # With fewer than two groups to an epoch, what is carried into it limits what it can carry out of it.
        while self.stream.views < 2 * self.stream.group_size and self.stream.tail(first - 1):
            first -= 1
        tail = np.empty(0, dtype=np.int64)
        for e in range(first, epoch + 1):
            tail = self._draw(e, tail)
        return tail

    def _draw(self, epoch: int, carried: Views) -> Views:
        shuffled = generator(self.seed, epoch, "tail").permutation(self.stream.views)
        # The head of this epoch may take none of the carried views, so enough of the others must stay for it.
        keep = np.isin(shuffled, carried)
        spare = self.stream.views - self.stream.group_size
        return shuffled[keep | (np.cumsum(~keep) <= spare)][: self.stream.tail(epoch)]


class RandomOrder:
    """A plain shuffle: the control that knows nothing of locality."""

    def __init__(self, tails: ShuffledTails) -> None:
        self.tails = tails

    def epoch(self, epoch: int) -> Views:
        stream, tail = self.tails.stream, self.tails(epoch)
        rest = np.setdiff1d(np.arange(stream.views), tail)
        rest = generator(self.tails.seed, epoch, "order").permutation(rest)
        # Views that the open group already holds may not complete it.
        carried = np.isin(rest, self.tails(epoch - 1))
        head = rest[~carried][: stream.head(epoch)]
        return np.concatenate([head, rest[~np.isin(rest, head)], tail])


class LocalityOnlyOrder:
    """A walk from neighbour to neighbour in the RLG, the same in every epoch: the control that only seeks locality.

    Views of one group, and of groups that follow each other, see much of the same. That is the order that re-uses most
    of what is at hand, and the one that conflicts most when steps overlap.
    """

    def __init__(self, rlg: sp.csr_array) -> None:
        views = rlg.shape[0]
        walk = np.empty(views, dtype=np.int64)
        fresh = np.ones(views, dtype=bool)
        lowest = 0
        for i in range(views):
            view = LocalityOnlyOrder._next(rlg, walk[i - 1], fresh) if i else 0
            if view < 0:
                while not fresh[lowest]:
                    lowest += 1
                view = lowest
            walk[i] = view
            fresh[view] = False
        self.walk = walk

    @staticmethod
    def _next(rlg: sp.csr_array, view: int, fresh: NDArray[np.bool_]) -> int:
        row = slice(rlg.indptr[view], rlg.indptr[view + 1])
        weights = rlg.data[row] * fresh[rlg.indices[row]]
        return int(rlg.indices[row][weights.argmax()]) if weights.any() else -1

    def epoch(self, epoch: int) -> Views:
        return self.walk


def generator(seed: int, epoch: int, purpose: str) -> np.random.Generator:
    """Random numbers that depend on these three only."""
    return np.random.default_rng([seed, epoch + 1, *purpose.encode()])
