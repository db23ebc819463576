"""The schedule: which views each optimizer step uses, and on which rank (design §2)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from odin_nerfstudio.errors import UserError
from odin_nerfstudio.plan.assignment import assign_ranks
from odin_nerfstudio.plan.odin_order import OdinOrder
from odin_nerfstudio.plan.order import LocalityOnlyOrder, Order, RandomOrder, ShuffledTails, Stream, Views

OrderName = Literal["odin", "locality-only", "random"]


@dataclass(frozen=True)
class ScheduleConfig:
    """How the views of an epoch are ordered."""

    order: OrderName = "odin"
    """odin: weakly coupled to the groups just before, otherwise random; random: a plain shuffle; locality-only: always
    the nearest view next, without randomness. The last two are there to compare with."""
    window: int = 1
    """How many groups before a group it should not conflict with: as many as are in flight together."""
    pool: int = 8
    """Random candidates looked at for every view that is placed. More means weaker coupling and less randomness."""
    seed: int = 0
    """Seed of all random choices."""


@dataclass(frozen=True)
class Group:
    """The views of one optimizer step."""

    step: int
    """The step, from 0."""
    views: Views
    """(n,) indices of views, all different; n = batch per rank × world size."""
    ranks: NDArray[np.int64]
    """(n,) the rank that renders each view."""

    def of_rank(self, rank: int) -> Views:
        """(B,) the views that a rank renders, in the order of the group."""
        return self.views[self.ranks == rank]


@dataclass(frozen=True)
class Schedule:
    """The groups of all steps. Every view comes exactly once per epoch.

    Epochs follow each other without a gap: where the group size does not divide the number of views, the last views of
    an epoch and the first of the next one form a group. A group depends on the arguments and its step only, and costs
    the ordering of the epochs it touches, one or two: every rank can compute it and a run can resume anywhere.
    """

    rlg: sp.csr_array
    """(V, V) relative locality graph of the training views."""
    config: ScheduleConfig
    """How views are ordered."""
    world_size: int = 1
    """G, number of ranks."""
    batch_per_rank: int = 1
    """B, views per rank and step."""
    ownership: NDArray[np.float64] | None = None
    """(V, G) share of each view's points that each rank owns; None: views go to ranks in the order of the group."""
    _epoch_views: Callable[[int], Views] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """
        Raises:
            UserError: a size is below 1, or a group would need more views than there are.
        """
        for name in ("world_size", "batch_per_rank"):
            if getattr(self, name) < 1:
                raise UserError(f"{name.replace('_', ' ')} must be at least 1, not {getattr(self, name)}.")
        for name in ("window", "pool"):
            if getattr(self.config, name) < 1:
                raise UserError(f"{name} must be at least 1, not {getattr(self.config, name)}.")
        if self.group_size > self.views:
            raise UserError(
                f"world size {self.world_size} x batch per rank {self.batch_per_rank} needs {self.group_size} views "
                f"per step, but the capture has {self.views} training view{'s' if self.views != 1 else ''}."
            )
        tails = ShuffledTails(Stream(self.views, self.group_size), self.config.seed)
        order: Order
        if self.config.order == "odin":
            order = OdinOrder(self.rlg, tails, self.config.window, self.config.pool)
        elif self.config.order == "random":
            order = RandomOrder(tails)
        else:
            order = LocalityOnlyOrder(self.rlg)
        object.__setattr__(self, "_epoch_views", lru_cache(maxsize=3)(order.epoch))

    @property
    def views(self) -> int:
        """V, number of views."""
        return self.rlg.shape[0]

    @property
    def group_size(self) -> int:
        """n, views per step over all ranks."""
        return self.world_size * self.batch_per_rank

    def steps(self, epoch: int) -> range:
        """The steps whose last view belongs to this epoch."""
        return range(epoch * self.views // self.group_size, (epoch + 1) * self.views // self.group_size)

    def epoch(self, epoch: int) -> list[Group]:
        """The groups of an epoch; the first may begin with views that the epoch before left over."""
        return [self.group(step) for step in self.steps(epoch)]

    def group(self, step: int) -> Group:
        """The group of a step, from 0."""
        views = self.group_views(step)
        if self.ownership is None:
            ranks = np.arange(self.group_size) // self.batch_per_rank
        else:
            ranks = assign_ranks(self.ownership[views], self.batch_per_rank)
        return Group(step, views, ranks)

    def group_views(self, step: int) -> Views:
        """(n,) the views of a step."""
        first, end = step * self.group_size, (step + 1) * self.group_size
        epochs = range(first // self.views, (end - 1) // self.views + 1)
        spans = [(self._epoch_views(e), e * self.views) for e in epochs]
        return np.concatenate([views[max(first - start, 0) : end - start] for views, start in spans])

    def __iter__(self) -> Iterator[Group]:
        """All groups, without end."""
        step = 0
        while True:
            yield self.group(step)
            step += 1

    def fingerprint(self) -> str:
        """Equal on two ranks only if all they will ever compute is: a hash of the inputs and of the first epoch."""
        digest = hashlib.sha256(repr((self.config, self.views, self.world_size, self.batch_per_rank)).encode())
        for array in (self.rlg.indptr, self.rlg.indices, self.rlg.data, self.ownership, self._epoch_views(0)):
            if array is not None:
                digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()[:16]
