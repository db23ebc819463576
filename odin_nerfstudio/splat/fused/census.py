"""How many rows of a unit there are, by owner, view and part: all that the host has to know of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PARTS = 2
"""A unit reads early rows, then the others."""


@dataclass(frozen=True)
class Census:
    """What one owner tells of a unit and of the one before it. Views are in the order of the ranks that render them."""

    pairs: list[list[int]]
    """[part][view] rows that a view may read."""
    wanted: list[list[int]]
    """[part][view] those that the unit before has read and this unit waits for."""
    rows: list[int]
    """[part] rows of its scope, each counted once."""
    wanted_rows: int
    """Rows that both scopes have."""
    step: int
    """Of the unit."""
    signal: int
    """What the owner wants all ranks to know."""

    @staticmethod
    def length(views: int) -> int:
        """Numbers in the census of so many views."""
        return 2 * PARTS * views + PARTS + 3

    @staticmethod
    def parse(numbers: Sequence[int], views: int) -> Census:
        """From its numbers, in the order of the fields."""
        lists = [list(numbers[first : first + views]) for first in range(0, 2 * PARTS * views, views)]
        *rows, wanted_rows, step, signal = numbers[2 * PARTS * views :]
        return Census(lists[:PARTS], lists[PARTS:], rows, wanted_rows, step, signal)
