"""Who met whom at which primitives: what the Shadow Graph kept apart, counted for people to look at.

Nothing here decides anything. Sets of rows are packed bitmaps, so that watching costs little beside what it watches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from odin_nerfstudio.shadow.bitmap import Bitmap, count_bits
from odin_nerfstudio.shadow.readback import counts_to_host

WINDOW = 32
"""Units that a unit is compared with, and over which a primitive's contention is counted."""
KINDS = ("raw", "waw", "delayed")
"""Read after write, write after write, and reads of the first kind that did not wait (policy ``throughput``)."""


@dataclass(frozen=True)
class Conflicts:
    """With which ranks and earlier units one unit met on the primitives of one owner. Owners' counts add up."""

    ranks: dict[str, list[list[int]]]
    """By kind, (G, G) primitives. ``raw``: views of rank a read what views of rank b wrote in the unit before;
    ``delayed``: those of them that were read as they had been before; ``waw``: views of both wrote in this unit."""
    groups: dict[int, dict[str, int]]
    """By earlier unit and kind, primitives that this unit may read, or writes, and that one wrote. ``delayed`` is about
    the unit just before."""

    def to_json(self) -> dict[str, Any]:
        """Ready for JSON; :meth:`from_json` is the inverse."""
        return {"ranks": self.ranks, "groups": {str(step): counts for step, counts in self.groups.items()}}

    @staticmethod
    def from_json(content: dict[str, Any]) -> Conflicts:
        """What :meth:`to_json` gave."""
        return Conflicts(content["ranks"], {int(step): counts for step, counts in content["groups"].items()})

    def as_replica(self, rank: int) -> Conflicts:
        """The part that a rank tells of where all ranks own the same primitives, so that the parts add up."""
        ranks = {
            kind: [row if reader == rank else [0] * len(row) for reader, row in enumerate(matrix)]
            for kind, matrix in self.ranks.items()
        }
        return Conflicts(ranks, self.groups if rank == 0 else {})

    def __add__(self, other: Conflicts) -> Conflicts:
        """The same unit's on the primitives of two owners."""
        ranks = {
            kind: [[a + b for a, b in zip(*rows, strict=True)] for rows in zip(matrix, other.ranks[kind], strict=True)]
            for kind, matrix in self.ranks.items()
        }
        groups = {
            step: {kind: count + other.groups.get(step, {}).get(kind, 0) for kind, count in counts.items()}
            for step, counts in self.groups.items()
        }
        return Conflicts(ranks, {**other.groups, **groups})


@dataclass(frozen=True)
class Touched:
    """Rows of this owner that views of a rank read, or wrote."""

    rank: int
    rows: Tensor
    """(R,) int64."""
    chosen: Tensor | None = None
    """(R,) bool: which of them are meant; None: all."""

    def set_of(self, num_rows: int) -> Bitmap:
        """The same as a set out of ``num_rows``."""
        return Bitmap.from_rows(self.rows, num_rows, self.chosen)


@dataclass(frozen=True)
class _Open:
    """A unit in flight, as packed sets of rows."""

    scope: Tensor
    """(W,) words of a bitmap."""
    stale: Tensor
    """(W,) what was read before its publication."""
    reads: Tensor
    """(G, W) what the views of each rank read."""
    writes: Tensor
    """(G, W) what they wrote, as far as is known."""


@dataclass(frozen=True)
class _Past:
    """A finished unit."""

    step: int
    writes: Tensor
    """(G, W) what the views of each rank wrote."""
    written: Tensor
    """(W,) all of it."""


class Contention:
    """Watches the units of one owner in order, and remembers the last ones.

    Args:
        num_rows: N, primitives of this owner.
        world_size: G, ranks that render views.
        device: where rows live.
    """

    def __init__(self, num_rows: int, world_size: int, device: torch.device | str = "cpu") -> None:
        self.window = WINDOW
        """Units to look back on; may be changed at any time."""
        self.watching = True
        """Whether units that begin are watched; may be changed at any time."""
        self._world_size = world_size
        self._device = torch.device(device)
        self._num_rows = num_rows
        self._open: dict[int, _Open] = {}
        self._past: deque[_Past] = deque()
        self._met: deque[Bitmap] = deque()
        """For each of the last units, rows on which it met the unit before, or ranks met in it."""

    def resize(self, source: Tensor) -> None:
        """Follows rows to other places. Of units so far only the share is kept in which each row was contended.

        Args:
            source: (N,) int64, where each row was before, −1 for rows that are new here.
        """
        self._open.clear()
        self._past.clear()
        kept, place = source >= 0, source.clamp_min(0)
        if self._num_rows:
            self._met = deque(Bitmap.from_mask(met.mask()[place].bool() & kept) for met in self._met)
        else:
            self._met.clear()
        self._num_rows = len(source)

    def read(self, step: int, scope: Bitmap, stale: Bitmap, reads: Iterable[Touched]) -> None:
        """A unit has read its scope.

        Args:
            step: of the unit; it may be the second one in flight.
            scope: what its views may read.
            stale: what it read before its publication.
            reads: what the views of ranks were made of.
        """
        if not self.watching:
            return
        nothing = Bitmap.empty(self._num_rows, self._device).words
        by_rank = nothing.repeat(self._world_size, 1)
        for touched in reads:
            by_rank[touched.rank] |= touched.set_of(self._num_rows).words
        self._open = {other: unit for other, unit in self._open.items() if other == step - 1}
        self._open[step] = _Open(scope.words, stale.words, by_rank, torch.zeros_like(by_rank))

    def wrote(self, step: int, touched: Touched) -> None:
        """Views of a rank have a gradient for some rows of a unit that has read. May be told in parts."""
        if step in self._open:
            self._open[step].writes[touched.rank] |= touched.set_of(self._num_rows).words

    def finish(self, step: int) -> Callable[[], Conflicts] | None:
        """All that a unit wrote is known.

        Returns:
            With whom it met, to be asked for once the device has counted; None for a unit that was not watched from its
            beginning.
        """
        unit = self._open.pop(step, None)
        if unit is None:
            return None
        written, size = _union(unit.writes), self._world_size
        pairs = unit.writes[:, None] & unit.writes[None]
        pairs.diagonal().zero_()
        met = _union(pairs.flatten(0, 1))
        counts = {"waw": count_bits(pairs)}
        others = [other.step for other in self._past]
        before = self._past[-1] if self._past and self._past[-1].step == step - 1 else None
        if others:
            past = torch.stack([other.written for other in self._past])
            counts |= {"groups raw": count_bits(past & unit.scope), "groups waw": count_bits(past & written)}
        if before is not None:
            read = unit.reads[:, None] & before.writes[None]
            counts |= {"raw": count_bits(read), "delayed": count_bits(read & unit.stale)}
            counts["groups delayed"] = count_bits(before.written & unit.scope & unit.stale)[None]
            met |= unit.scope & before.written
        self._past.append(_Past(step, unit.writes, written))
        self._met.append(Bitmap(met, self._num_rows))
        for kept in (self._past, self._met):
            while len(kept) > self.window:
                kept.popleft()
        coming = counts_to_host(torch.cat([numbers.flatten() for numbers in counts.values()]))
        shapes = {kind: numbers.shape for kind, numbers in counts.items()}
        return lambda: _conflicts(coming.get(), shapes, size, others, None if before is None else before.step)

    @property
    def share(self) -> Tensor:
        """(N,) float32 in [0, 1]: in which part of the finished units of the window each row was contended."""
        total = torch.zeros(self._num_rows, dtype=torch.int32, device=self._device)
        for met in self._met:
            total += met.mask()
        return total / max(1, len(self._met))


def _conflicts(
    numbers: list[int], shapes: dict[str, torch.Size], size: int, others: list[int], before: int | None
) -> Conflicts:
    """What was counted, by name, as people look at it.

    Args:
        numbers: the counts, one kind after the other.
        shapes: of the counts, by kind.
        size: G, ranks.
        others: earlier units, oldest first.
        before: the unit just before, if it was watched.
    """
    counts, end = {}, 0
    for kind, shape in shapes.items():
        counts[kind] = torch.tensor(numbers[end : end + shape.numel()]).view(shape).tolist()
        end += shape.numel()
    ranks = {kind: counts.get(kind, [[0] * size] * size) for kind in KINDS}
    groups = {
        step: {"raw": raw, "waw": waw, "delayed": counts["groups delayed"][0] if step == before else 0}
        for step, raw, waw in zip(others, counts.get("groups raw", []), counts.get("groups waw", []), strict=True)
    }
    return Conflicts(ranks, groups)


def _union(words: Tensor) -> Tensor:
    """(K, W) → (W,)"""
    union = torch.zeros_like(words[0])
    for each in words:
        union |= each
    return union
