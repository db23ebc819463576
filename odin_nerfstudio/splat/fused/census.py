"""How many rows of a unit there are, by owner, view and part: all that the host has to know of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

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

    def at_once(self) -> Census:
        """The same of a unit that reads nothing before the unit before it is published."""
        pairs, nothing = [sum(of_view) for of_view in zip(*self.pairs, strict=True)], [0] * len(self.pairs[0])
        rows = [0] * (PARTS - 1) + [sum(self.rows)]
        return replace(
            self,
            pairs=[nothing] * (PARTS - 1) + [pairs],
            wanted=[nothing] * PARTS,
            rows=rows,
            wanted_rows=0,
        )

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
