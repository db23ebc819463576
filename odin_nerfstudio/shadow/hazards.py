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


def check_reads(unit: TaskUnit, rows: Tensor, read: Tensor, now: Tensor) -> None:
    """WAR and lost updates: nobody published a row between its reading and its publication by this unit.

    Rows that were read before their publication on purpose are left out.

    Args:
        unit: the unit that is about to publish.
        rows: (R,) int64 it publishes.
        read: (R,) their versions when it read them.
        now: (R,) their versions now.

    Raises:
        HazardError: when another publication came in between.
    """
    moved = rows[read != now]
    if len(moved):
        moved = moved[~unit.stale.contains(moved)]
    if len(moved):
        raise HazardError(f"row {int(moved[0])} was published by others since unit {unit.step} read it")
