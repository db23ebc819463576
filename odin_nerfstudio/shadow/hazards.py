"""The three hazards between units in flight (design §3.1), as sets and as refusals."""

from __future__ import annotations

from torch import Tensor

from odin_nerfstudio.shadow.bitmap import Bitmap
from odin_nerfstudio.shadow.unit import TaskUnit


class HazardError(RuntimeError):
    """A call that would break the order of reads and writes; nothing was changed. The message names units and rows."""


def early(unit: TaskUnit) -> Bitmap:
    """RAW: rows of the scope that no unit before this one writes."""
    return unit.scope if unit.producer is None else unit.scope - unit.producer.writes


def released(unit: TaskUnit) -> Bitmap:
    """RAW: rows of the scope that the unit before this one wrote and has published."""
    return unit.nothing if unit.producer is None else unit.scope & unit.producer.published


def held(unit: TaskUnit) -> Bitmap:
    """RAW: rows of the scope that are pending."""
    return unit.nothing if unit.producer is None else unit.scope & unit.producer.pending


def check_order(unit: TaskUnit) -> None:
    """WAW: units publish in task order, and with them the publications of any primitive.

    Raises:
        HazardError: while an earlier unit has something left to publish.
    """
    if unit.producer is not None and not unit.producer.finished:
        raise HazardError(f"unit {unit.step} may not publish before unit {unit.producer.step} has finished")


def moved(unit: TaskUnit, rows: Bitmap, read: Tensor, now: Tensor) -> Bitmap:
    """WAR and lost updates: rows that somebody published between their reading and their publication by this unit.

    Rows that were read before their publication on purpose are left out.

    Args:
        unit: the unit that is about to publish.
        rows: those that it publishes.
        read: (N,) the version of every row when it was read.
        now: (N,) their versions now.
    """
    return Bitmap.from_mask(read != now) & rows - unit.stale
