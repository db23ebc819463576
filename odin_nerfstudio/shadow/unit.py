"""The task unit: one group as the owner of some primitives sees it (design §1)."""

from __future__ import annotations

from dataclasses import dataclass, field

from odin_nerfstudio.shadow.bitmap import Bitmap


@dataclass
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
    handed: Bitmap = field(init=False)
    """Rows handed out to the reader so far."""
    settled: Bitmap = field(init=False)
    """Rows of which it is known whether they have a gradient (hook 2)."""
    staged: Bitmap = field(init=False)
    """Rows whose gradient is staged."""
    published: Bitmap = field(init=False)
    """Rows whose new value readers see."""
    stale: Bitmap = field(init=False)
    """Rows that were handed out before their publication."""
    negligible: Bitmap = field(init=False)
    """Active rows whose gradient is small enough that others may read them before their publication."""
    active: Bitmap | None = None
    """Settled rows with a gradient (hook 2); None until something is settled."""
    finished: bool = False
    """Whether everything is published (hook 3)."""
    counts: UnitCounts = field(default_factory=UnitCounts)

    def __post_init__(self) -> None:
        self.handed = self.settled = self.staged = self.published = self.stale = self.negligible = self.nothing

    @property
    def nothing(self) -> Bitmap:
        """No row."""
        return self.scope - self.scope

    @property
    def complete(self) -> bool:
        """Whether its whole scope was handed out."""
        return self.counts.early + self.counts.late == self.counts.scope

    @property
    def is_settled(self) -> bool:
        """Whether its backward is done and has reached its whole scope."""
        return self.active is not None and not self.scope - self.settled

    @property
    def writes(self) -> Bitmap:
        """Rows that this unit publishes, as far as is known: what is not settled of its scope, and its active set."""
        return self.scope if self.active is None else (self.scope - self.settled) | self.active

    @property
    def pending(self) -> Bitmap:
        """Rows that this unit writes and has not published."""
        return self.writes - self.published
