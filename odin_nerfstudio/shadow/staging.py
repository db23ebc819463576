"""The two-slot ring in which gradients wait for their publication (design §3.1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from odin_nerfstudio.shadow.hazards import HazardError

SLOTS = 2
"""Units in flight at most."""


@dataclass(frozen=True, eq=False)
class Staged:
    """Gradients that were staged together."""

    rows: Tensor
    """(R,) int64, all different."""
    gradients: Mapping[str, Tensor]
    """(R, ...) for each parameter."""
    chosen: Tensor | None
    """(R,) bool: which of the rows are meant; None: all."""

    @property
    def nbytes(self) -> int:
        """Memory, bytes."""
        return sum(tensor.nbytes for tensor in (self.rows, *self.gradients.values()))


@dataclass(eq=False)
class Slot:
    """What one unit in flight has staged. The tensors are the caller's, who leaves them alone until they are
    published; nothing is copied."""

    step: int | None = None
    """The unit that uses the slot, None if it is free."""
    parts: list[Staged] = field(default_factory=list)
    """What was staged since the last :meth:`committed`."""

    @property
    def nbytes(self) -> int:
        """Memory of what is staged, bytes."""
        return sum(part.nbytes for part in self.parts)

    def stage(self, rows: Tensor, gradients: Mapping[str, Tensor], chosen: Tensor | None) -> None:
        """Keeps gradients; see :class:`Staged`."""
        self.parts.append(Staged(rows, gradients, chosen))

    def committed(self) -> None:
        """Makes room again: all that is staged was committed."""
        self.parts = []

    def clear(self) -> None:
        """Frees the slot for another unit."""
        self.step, self.parts = None, []


class StagingRing:
    """Two slots; unit t uses slot t mod 2. Memory does not depend on how many units pass through."""

    def __init__(self) -> None:
        self._slots = [Slot() for _ in range(SLOTS)]

    @property
    def nbytes(self) -> int:
        """Memory of what is staged in both slots, bytes."""
        return sum(slot.nbytes for slot in self._slots)

    def __getitem__(self, step: int) -> Slot:
        """The slot of unit ``step``."""
        return self._slots[step % SLOTS]

    def open(self, step: int) -> Slot:
        """Gives unit ``step`` its slot.

        Raises:
            HazardError: when the unit that used it has not finished (WAR).
        """
        slot = self[step]
        if slot.step is not None:
            raise HazardError(f"unit {step} needs the staging slot that unit {slot.step} has not finished with")
        slot.step = step
        return slot
