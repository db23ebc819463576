"""The task unit: one group as the owner of some primitives sees it (design §1)."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from odin_nerfstudio.shadow.bitmap import Bitmap, count_all


@dataclass(frozen=True)
class UnitCounts:
    """How a unit read its scope, in primitives. Once it has read everything, ``early + late = scope``."""

    scope: int = 0
    """Primitives it may read."""
    early: int = 0
    """Read without waiting."""
    late: int = 0
    """Pending when the unit wanted to read; how many there are is known as they are read."""
    delayed: int = 0
    """Those of ``late`` that were read before their publication (policy ``throughput``)."""
    fallback: int = 0
    """Those of ``late`` that ``throughput`` waited for, because its conditions did not hold."""


@dataclass(eq=False)
class TaskUnit:
    """Which rows a unit may read, has read, writes, has published. Sets are replaced, never changed in place."""

    step: int
    """Optimizer step; units are ordered by it."""
    scope: Bitmap
    """Rows it may read (hook 1)."""
    producer: TaskUnit | None
    """The unit in flight when this one was admitted, None if there was none; dropped when this one is finished."""
    early: Bitmap = field(init=False)
    """Rows handed out so far that it did not have to wait for."""
    late: Bitmap = field(init=False)
    """Rows handed out so far that had to be published first."""
    stale: Bitmap = field(init=False)
    """Rows handed out before their publication."""
    settled: Bitmap = field(init=False)
    """Rows of which it is known whether they have a gradient (hook 2)."""
    staged: Bitmap = field(init=False)
    """Rows whose gradient is staged."""
    published: Bitmap = field(init=False)
    """Rows whose new value readers see."""
    negligible: Bitmap = field(init=False)
    """Active rows whose gradient is small enough that others may read them before their publication."""
    active: Bitmap | None = None
    """Settled rows with a gradient (hook 2); None until something is settled."""
    settled_all: bool = False
    """Whether the backward is done and has reached the whole scope."""
    finished: bool = False
    """Whether everything is published (hook 3)."""

    def __post_init__(self) -> None:
        self.early = self.late = self.stale = self.nothing
        self.settled = self.staged = self.published = self.negligible = self.nothing

    @property
    def nothing(self) -> Bitmap:
        """No row."""
        return Bitmap.empty(self.scope.size, self.scope.device)

    @property
    def handed(self) -> Bitmap:
        """Rows handed out to the reader so far."""
        return self.early | self.late | self.stale

    @property
    def unread(self) -> Bitmap:
        """Rows of the scope that were not handed out yet."""
        return self.scope - self.handed

    @property
    def complete(self) -> bool:
        """Whether its whole scope was handed out."""
        return not self.unread

    @property
    def unsettled(self) -> Bitmap:
        """Rows that its backward has not reached yet."""
        return self.scope - self.settled

    @property
    def writes(self) -> Bitmap:
        """Rows that this unit publishes, as far as is known: what is not settled of its scope, and its active set."""
        return self.scope if self.active is None else self.unsettled | self.active

    @property
    def pending(self) -> Bitmap:
        """Rows that this unit writes and has not published."""
        return self.writes - self.published

    def sizes(self) -> Tensor:
        """(4,) int64 rows in the scope, and handed out as early, late and stale ones, without waiting for a device."""
        return count_all((self.scope, self.early, self.late, self.stale))
