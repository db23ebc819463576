"""All that rank 0 knows of a run: every rank's timeline, and what is read off them.

Panel, trace, scalars and report take their numbers from here, so they cannot disagree.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from operator import add

import numpy as np
from numpy.typing import NDArray

from odin_nerfstudio.shadow.contention import Conflicts
from odin_nerfstudio.shadow.timeline import StepRecord, Timeline

IN_FLIGHT = 2
"""Units that may be under way together: the computation of those around a unit is what hides its communication."""
KEPT = 1000
"""Units whose numbers are kept once they are final."""


@dataclass(frozen=True)
class UnitFigures:
    """The numbers of one unit over all ranks."""

    step: int
    scope: int
    """Primitives that its views may read, over all owners; as the next four."""
    early: int
    late: int
    delayed: int
    fallback: int
    bytes: int
    """Sent, over all ranks."""
    hidden: float
    """Share of the communication that computation overlapped, mean over ranks; 1 without communication."""
    wait: list[float]
    """Exposed wait of each rank, seconds."""
    primitives: list[int]
    """That each rank has."""
    memory: list[int]
    """That each rank uses, bytes."""

    @property
    def early_share(self) -> float:
        """Early primitives ÷ primitives in scope, 1 for an empty scope."""
        return self.early / self.scope if self.scope else 1.0


class Recording:
    """Timelines of all ranks on rank 0.

    Args:
        timelines: rank 0's own, and for each other rank one that absorbs what it gives out.
        predicted: ``predicted(step, earlier)`` is the share of what the group of a step sees that the group of an
            earlier one sees too, after the plan; None where there is no plan.
    """

    def __init__(self, timelines: Sequence[Timeline], predicted: Callable[[int, int], float] | None = None) -> None:
        self.timelines = list(timelines)
        # Figures ask again and again for the same pairs, and a plan never changes its mind.
        self.predicted = None if predicted is None else lru_cache(maxsize=4096)(predicted)
        self._final: OrderedDict[int, UnitFigures] = OrderedDict()

    @staticmethod
    def around(own: Timeline, ranks: int, predicted: Callable[[int, int], float] | None = None) -> Recording:
        """Of one rank's timeline, and of ``ranks`` − 1 others that nothing has been heard of yet."""
        return Recording([own if rank == own.rank else Timeline(rank) for rank in range(ranks)], predicted)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.timelines)

    def absorb(self, records: Sequence[Mapping[int, StepRecord]]) -> None:
        """Adds what the timelines of the other processes gave out, by rank; rank 0's own are here already."""
        for timeline, given in zip(self.timelines[1:], records[1:], strict=True):
            timeline.absorb(given)

    def steps(self, last: int | None = None) -> list[int]:
        """Units that every rank has told of and finished, ascending; the ``last`` ones of them, or all."""
        known = [{step for step in timeline.steps if timeline.is_finished(step)} for timeline in self.timelines]
        steps = sorted(set.intersection(*known))
        return steps if last is None else steps[max(0, len(steps) - last) :]

    def excerpt(self, steps: Sequence[int]) -> Recording:
        """A copy of some units and of those that were in flight with them, which no longer changes."""
        copies = []
        for timeline in self.timelines:
            around = {near for step in steps for near in range(step - IN_FLIGHT, step + IN_FLIGHT + 1)}
            records = {step: timeline.record(step) for step in timeline.steps if step in around}
            copies.append(Timeline(timeline.rank, max(1, len(records))))
            copies[-1].absorb(records)
        return Recording(copies, self.predicted)

    def unit(self, step: int) -> UnitFigures:
        """The numbers of one unit."""
        if step not in self._final:
            figures = self._figures(step)
            if any(timeline.last_finished < step + IN_FLIGHT for timeline in self.timelines):
                return figures  # what hides its communication may not all be known yet
            self._final[step] = figures
            while len(self._final) > KEPT:
                self._final.popitem(last=False)
        return self._final[step]

    def _figures(self, step: int) -> UnitFigures:
        counts = [timeline.counts(step) for timeline in self.timelines]
        total = {
            name: sum(each.get(name, 0) for each in counts)
            for name in ("scope", "early", "late", "delayed", "fallback", "bytes")
        }
        return UnitFigures(
            step=step,
            **total,
            hidden=float(np.mean([timeline.hidden_fraction(step) for timeline in self.timelines])),
            wait=[timeline.seconds("wait", step) for timeline in self.timelines],
            primitives=[each.get("primitives", 0) for each in counts],
            memory=[each.get("memory", 0) for each in counts],
        )

    def conflicts(self, step: int) -> Conflicts | None:
        """Of one unit, over all owners; None where primitives are nobody's, or not all owners watched it."""
        found = [conflicts for timeline in self.timelines if (conflicts := timeline.conflicts(step)) is not None]
        return reduce(add, found) if len(found) == self.world_size else None

    def rank_conflicts(self, kind: str, steps: Sequence[int]) -> NDArray[np.int64]:
        """(G, G) primitives, summed over units; see :class:`~odin_nerfstudio.shadow.contention.Conflicts`."""
        total = np.zeros((self.world_size, self.world_size), np.int64)
        for step in steps:
            conflicts = self.conflicts(step)
            if conflicts is not None:
                total += np.asarray(conflicts.ranks[kind])
        return total

    def group_conflicts(self, kind: str, steps: Sequence[int]) -> NDArray[np.float64]:
        """(S, S) primitives on which a unit (row) met each earlier one (column); NaN where that was not recorded."""
        matrix = np.full((len(steps), len(steps)), np.nan)
        column = {step: number for number, step in enumerate(steps)}
        for row, step in enumerate(steps):
            conflicts = self.conflicts(step)
            for earlier, counts in (conflicts.groups if conflicts else {}).items():
                if earlier in column:
                    matrix[row, column[earlier]] = counts[kind]
        return matrix

    def predicted_conflicts(self, steps: Sequence[int]) -> NDArray[np.float64]:
        """(S, S) share of what a unit's group (row) sees that the group of an earlier one (column) sees too; or NaN."""
        matrix = np.full((len(steps), len(steps)), np.nan)
        if self.predicted is not None:
            for row, step in enumerate(steps):
                matrix[row, :row] = [self.predicted(step, earlier) for earlier in steps[:row]]
        return matrix
