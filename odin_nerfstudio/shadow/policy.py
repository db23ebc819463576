"""The three policies of design §3.3: what a unit may read while the one before it is in flight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from odin_nerfstudio.shadow import hazards
from odin_nerfstudio.shadow.bitmap import Bitmap, count_bits
from odin_nerfstudio.shadow.unit import TaskUnit


@dataclass(frozen=True)
class Quality:
    """``quality``: early rows at once, late rows as each is published. The values read are those of ``barrier``."""

    overlaps: ClassVar[bool] = True
    """Whether anything is read while another unit is in flight."""
    delays: ClassVar[bool] = False
    """Whether rows may be read before their publication at all."""
    validates: ClassVar[bool] = True
    """Whether early rows are none that the unit before may still write. Without that a run is fast and wrong."""

    def ahead(self, scope: Bitmap, before: Bitmap) -> Bitmap:
        """Rows of a scope that are read while the unit before, with another scope, is in flight; see ``overlaps``."""
        return scope - before

    def early(self, unit: TaskUnit) -> Bitmap:
        """Rows that the unit reads without waiting for anyone."""
        return hazards.early(unit)

    def late(self, unit: TaskUnit) -> Bitmap:
        """Rows that the unit had to wait for and may read now."""
        return hazards.released(unit)

    def held(self, unit: TaskUnit) -> Bitmap:
        """Rows that the unit has to wait for still."""
        return hazards.held(unit)

    def negligible(self, magnitudes: Tensor, active: Tensor) -> Tensor:
        """(R,) bool: which gradients readers can do without for a while.

        Args:
            magnitudes: (R,) not negative, size of each gradient.
            active: (R,) bool: which of them count for the mean.
        """
        return torch.zeros_like(active)

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

    def negligible(self, magnitudes: Tensor, active: Tensor) -> Tensor:
        mean = (magnitudes * active).sum() / active.sum().clamp_min(1)
        return (magnitudes < self.delay_ratio * mean) & active

    def delayed(self, unit: TaskUnit, stale_run: Tensor) -> Bitmap:
        if unit.producer is None:
            return unit.nothing
        late = self.held(unit)
        few = count_bits(late.words) <= self.delay_ratio * count_bits(unit.scope.words).double()
        # Before the producer's backward nothing is known to be negligible.
        patient = Bitmap.from_mask((stale_run < self.max_delay) & few)
        return (late & unit.producer.negligible & patient) - unit.handed
