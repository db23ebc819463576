"""The two-slot ring in which gradients wait for their publication (design §3.1)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from odin_nerfstudio.shadow.hazards import HazardError

SLOTS = 2
"""Units in flight at most."""


class Slot:
    """Gradient rows of one unit in flight. Buffers are kept from unit to unit and grow as needed."""

    def __init__(self) -> None:
        self.step: int | None = None
        """The unit that uses the slot, None if it is free."""
        self._rows = torch.empty(0, dtype=torch.int64)
        self._gradients: dict[str, Tensor] = {}
        self._staged = 0

    @property
    def nbytes(self) -> int:
        """Memory of the buffers, bytes."""
        return sum(buffer.nbytes for buffer in (self._rows, *self._gradients.values()))

    def stage(self, rows: Tensor, gradients: Mapping[str, Tensor]) -> None:
        """Copies gradients in.

        Args:
            rows: (R,) int64, on the device of the gradients.
            gradients: (R, ...) for each parameter; the names, row shapes and dtypes of a run do not change.
        """
        end = self._staged + len(rows)
        if end > len(self._rows) or self._rows.device != rows.device:
            self._grow(end, rows.device)
        self._rows[self._staged : end] = rows
        for name, gradient in gradients.items():
            if name not in self._gradients:
                self._gradients[name] = gradient.new_empty(len(self._rows), *gradient.shape[1:])
            self._gradients[name][self._staged : end] = gradient
        self._staged = end

    def _grow(self, needed: int, device: torch.device) -> None:
        """Moves what is staged to larger buffers."""
        rows, gradients = self.uncommitted()
        # Some more than asked for, so that a slowly growing scene does not move the buffers at every unit.
        self._rows = rows.new_empty(needed + needed // 8, device=device)
        self._rows[: len(rows)] = rows
        for name, gradient in gradients.items():
            self._gradients[name] = gradient.new_empty(len(self._rows), *gradient.shape[1:])
            self._gradients[name][: len(gradient)] = gradient

    def uncommitted(self) -> tuple[Tensor, dict[str, Tensor]]:
        """What was staged since the last :meth:`committed`: views of the buffers, in the order of staging."""
        return self._rows[: self._staged], {name: buffer[: self._staged] for name, buffer in self._gradients.items()}

    def committed(self) -> None:
        """Makes room again: all that is staged was committed."""
        self._staged = 0

    def clear(self) -> None:
        """Frees the slot for another unit; the buffers stay."""
        self.step = None
        self._staged = 0


class StagingRing:
    """Two slots; unit t uses slot t mod 2. Memory does not depend on how many units pass through."""

    def __init__(self) -> None:
        self._slots = [Slot() for _ in range(SLOTS)]

    @property
    def nbytes(self) -> int:
        """Memory of both slots, bytes."""
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
