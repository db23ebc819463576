"""A unit on a GPU: rows by view, and what the ranks know of each other's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, wraps
from typing import Any

import torch
from torch import Tensor

from odin_nerfstudio.comm.device_exchange import DeviceJob, Gathered
from odin_nerfstudio.shadow.contention import Touched
from odin_nerfstudio.splat.fused.census import PARTS, Census
from odin_nerfstudio.splat.raster import Rows
from odin_nerfstudio.splat.unit import Unit


@dataclass(frozen=True)
class FusedPart:
    """Rows that were read together: for every view those that it may read, one view after the other."""

    rows: Tensor
    """(P,) int64 rows of the model, ascending within each view."""
    offsets: list[int]
    """(V + 1,) where each view begins."""
    values: Rows
    """(P, ...) copies of the rows: a publication cannot change them."""
    radii: Tensor
    """(P,) int32, 0 where a view does not see the row."""
    first: int
    """The first of the views."""

    @property
    def sizes(self) -> list[int]:
        """Rows of each view."""
        return [end - begin for begin, end in zip(self.offsets, self.offsets[1:], strict=False)]


@dataclass
class FusedUnit(Unit):
    """A unit whose splats and gradients are on their way. Views are in the order of the ranks that render them."""

    table: Tensor = field(default_factory=lambda: torch.empty(0))
    """(V, 18) cameras."""
    views: Tensor = field(default_factory=lambda: torch.empty(0))
    """(V, W) bitmaps of the rows that the views may read."""
    words: list[Tensor] = field(default_factory=list)
    """(V, W) for each part, the same of its rows."""
    joins: bool = True
    """Whether it is read at once where little of it is early."""
    coming: Gathered | None = None
    """The census of all ranks, on its way."""
    census: list[Census] = field(default_factory=list)
    """Of every rank, once it is here."""
    counted: dict[tuple[str, bool | None], list[list[int]]] = field(default_factory=dict)
    """What follows from the census; see :func:`once_a_unit`."""
    follower: FusedUnit | None = None
    """The unit that waits for some of its gradients."""
    reading: int = 0
    """How many parts it has come to."""
    read_parts: list[FusedPart] = field(default_factory=list)
    """Of each number in ``parts_read``."""
    sent: list[DeviceJob] = field(default_factory=list)
    """For each part, the exchange of its splats."""
    places: list[Tensor | None] = field(default_factory=list)
    """For each view of this rank, (M,) where the splats that arrived or were read stand among its leaves; None: in the
    same order."""
    orders: list[Tensor] = field(default_factory=list)
    """(P,) int64 for each part: numbers of the pairs whose rows are wanted first, then those of the others."""
    marked: DeviceJob | None = None
    """The exchange of (P,) uint8 marks of wanted rows for the ranks that have the splats."""
    outgoing: Tensor | None = None
    """(M, D) gradients of this rank's splats, owner by owner, part by part."""
    order: Tensor | None = None
    """(M,) numbers of the splats that are wanted first, then those of the others."""
    pushed: DeviceJob | None = None
    """The exchange of gradients that is under way."""
    blocks: list[Tensor] = field(default_factory=list)
    """Replicated: (P, 13) splats of each part."""
    returned: list[Tensor] = field(default_factory=list)
    """Replicated: (P, 12) their gradients."""

    @cached_property
    def view_ranks(self) -> list[int]:
        """The rank that renders each view."""
        return sorted(self.ranks)

    @cached_property
    def views_by_rank(self) -> dict[int, list[int]]:
        """The views that each rank renders."""
        return {rank: [v for v, other in enumerate(self.view_ranks) if other == rank] for rank in set(self.ranks)}

    @cached_property
    def parts_read(self) -> list[int]:
        """Numbers of the parts that any rank has rows in, at least one; known with the census."""
        return [part for part in range(PARTS) if any(census.rows[part] for census in self.census)] or [PARTS - 1]

    @property
    def early_share(self) -> float:
        """Early rows ÷ all that are read, over all ranks; known with the census."""
        early, late = (sum(census.rows[part] for census in self.census) for part in range(PARTS))
        return early / max(1, early + late)

    def read_at_once(self) -> None:
        """From now on nothing is early. On all ranks, before anything is read."""
        self.early, self.words = None, [self.views[:0], self.views]
        self.census = [census.at_once() for census in self.census]

    def next_part(self) -> int | None:
        """The number of the part that is read now, early rows before the others; None if nobody has rows in it."""
        number = PARTS - 1 if self.early is None else self.reading
        self.reading += 1
        return number if number in self.parts_read else None

    @property
    def has_late(self) -> bool:
        """Whether any rank has something left to read once the unit before is published."""
        return any(census.rows[-1] for census in self.census)

    def reads(self) -> Iterator[Touched]:
        """Rows that the views which this rank projects are made of."""
        for part in self.read_parts:
            ranks = self.view_ranks[part.first :]
            of_views = zip(ranks, part.rows.split(part.sizes), part.radii.split(part.sizes), strict=False)
            for rank, rows, radii in of_views:
                yield Touched(rank, rows, radii > 0)


def once_a_unit(count: Callable[..., list[list[int]]]) -> Callable[..., list[list[int]]]:
    """A method that counts something of a unit and takes ``first`` as
    :meth:`~odin_nerfstudio.splat.fused.planning.FusedPlanning._counts` does: its answer is kept with the unit."""

    @wraps(count)
    def kept(exchange: Any, unit: FusedUnit, first: bool | None = None) -> list[list[int]]:
        key = count.__name__, first
        if key not in unit.counted:
            unit.counted[key] = count(exchange, unit, first)
        return unit.counted[key]

    return kept
