"""The three policies of design §3.3: what a unit may read while the one before it is in flight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from odin_nerfstudio.shadow import hazards
from odin_nerfstudio.shadow.bitmap import Bitmap
from odin_nerfstudio.shadow.unit import TaskUnit


@dataclass(frozen=True)
class Quality:
    """``quality``: early rows at once, late rows as each is published. The values read are those of ``barrier``."""

    overlaps: ClassVar[bool] = True
    """Whether anything is read while another unit is in flight."""
    delays: ClassVar[bool] = False
    """Whether rows may be read before their publication at all."""

    def early(self, unit: TaskUnit) -> Bitmap:
        """Rows that the unit reads without waiting for anyone."""
        return hazards.early(unit)

    def late(self, unit: TaskUnit) -> Bitmap:
        """Rows that the unit had to wait for and may read now."""
        return hazards.released(unit)

    def held(self, unit: TaskUnit) -> Bitmap:
        """Rows that the unit has to wait for still."""
        return hazards.held(unit)

    def negligible(self, magnitudes: Tensor) -> Tensor:
        """(A,) bool: which gradients readers can do without for a while, from their magnitudes ((A,), not negative)."""
        return torch.zeros_like(magnitudes, dtype=torch.bool)

    def delayed(self, unit: TaskUnit, stale_run: Tensor) -> Bitmap:
        """Held rows that the unit may read all the same.

        Args:
            unit: the reader.
            stale_run: (N,) uint8: for how many units in a row each row was read before its publication.
        """
        return unit.nothing


@dataclass(frozen=True)
class Barrier(Quality):
    """``barrier``: nothing is read while another unit is in flight."""

    overlaps: ClassVar[bool] = False

    def early(self, unit: TaskUnit) -> Bitmap:
        return unit.scope if unit.producer is None else unit.nothing

    def late(self, unit: TaskUnit) -> Bitmap:
        return unit.scope if unit.producer is not None and unit.producer.finished else unit.nothing

    def held(self, unit: TaskUnit) -> Bitmap:
        return unit.scope - self.early(unit) - self.late(unit)


@dataclass(frozen=True)
class Throughput(Quality):
    """``throughput``: a few late rows with small gradients are read before their publication, for a few units in a row.

    Raises:
        ValueError: for a ratio outside [0, 1] or a delay outside [0, 255].
    """

    delays: ClassVar[bool] = True
    delay_ratio: float = 0.2
    """Largest |late| / |scope| of a unit that reads ahead, and largest gradient of a row that it reads ahead, relative
    to the mean over the active set."""
    max_delay: int = 4
    """Number of units in a row that may read a row before its publication."""

    def __post_init__(self) -> None:
        if not (0 <= self.delay_ratio <= 1 and 0 <= self.max_delay <= 255):
            raise ValueError(f"delay_ratio must be in [0, 1] and max_delay in [0, 255], not {self}")

    def negligible(self, magnitudes: Tensor) -> Tensor:
        return magnitudes < self.delay_ratio * magnitudes.mean()

    def delayed(self, unit: TaskUnit, stale_run: Tensor) -> Bitmap:
        late = self.held(unit)
        # Before the producer's backward nothing is known to be negligible.
        if unit.producer is None or late.count() > self.delay_ratio * unit.counts.scope:
            return unit.nothing
        rows = ((late & unit.producer.negligible) - unit.handed).rows()
        return Bitmap.from_rows(rows[stale_run[rows] < self.max_delay], late.size)
