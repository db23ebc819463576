"""What both placements share between GPUs: scopes and their census, reading, and the rows of gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from itertools import accumulate
from operator import or_
from typing import Any

import torch
from torch import Tensor

from odin_nerfstudio.comm.device_exchange import DeviceJob
from odin_nerfstudio.comm.exchange import PeerError, Signal
from odin_nerfstudio.shadow.bitmap import Bitmap, count_all, rows_of, words_of
from odin_nerfstudio.shadow.contention import Touched
from odin_nerfstudio.shadow.optimizer import catch_up_rows
from odin_nerfstudio.shadow.policy import Quality
from odin_nerfstudio.splat.densify import SplatStatistics
from odin_nerfstudio.splat.fused.census import PARTS, Census
from odin_nerfstudio.splat.fused.routing import chosen_first
from odin_nerfstudio.splat.fused.unit import FusedPart, FusedUnit
from odin_nerfstudio.splat.raster import PinholeCamera
from odin_nerfstudio.splat.raster.camera_table import camera_table
from odin_nerfstudio.splat.raster.fused import project_rows
from odin_nerfstudio.splat.unit import FEW, UnitExchange

LITTLE = 0.25
"""Share of early rows below which a unit is read at once: what would be hidden takes less time than a second part."""


class FusedPlanning(UnitExchange):
    """Finds scopes of all views at once, and counts what the host must know while the GPU renders."""

    plans_ahead = True

    @torch.no_grad()
    def plan(
        self,
        step: int,
        ranks: list[int],
        cameras: list[PinholeCamera],
        before: Any,
        policy: Quality,
        pending: int,
        signal: Signal,
    ) -> FusedUnit:
        """Culls this rank's rows for all views and sends the census on its way to all ranks."""
        order = sorted(range(len(ranks)), key=ranks.__getitem__)
        table = camera_table([cameras[view] for view in order])
        views, size = self._model.scopes(table, step, pending), self._model.num_points
        of_views = [Bitmap(words, size) for words in views.unbind()]
        scope = Bitmap(reduce(or_, of_views).words, size)  # computed once, since all that follows is made of it
        if self._model.loss_reads_every_row(step):
            scope = Bitmap.from_mask(torch.ones(size, dtype=torch.bool, device=views.device))
        early = wanted = None
        words = [views[:0], views]
        if before is not None and self._world.size > 1:
            early = policy.ahead(scope, before.scope)
            wanted = before.scope & (scope - early)
            parts = [view & early for view in of_views] + [view - early for view in of_views]
            words = list(words_of(parts).view(PARTS, *views.shape).unbind())
        cameras = [cameras[view] for view in order]
        joins = not policy.delays  # rows that are read before their publication are worth a part
        unit = FusedUnit(step, ranks, cameras, scope, early=early, table=table, views=views, words=words, joins=joins)
        unit.coming = self._exchange.gather(self._census(unit, before, wanted, signal))
        return unit

    def _census(self, unit: FusedUnit, before: FusedUnit | None, wanted: Bitmap | None, signal: Signal) -> Tensor:
        """The numbers of this rank's :class:`Census`."""
        size, nothing = unit.scope.size, unit.scope - unit.scope
        sets: list[Bitmap] = []
        known: list[Bitmap] = []
        for number in range(PARTS):
            of_views = [Bitmap(words, size) for words in unit.words[number].unbind()]
            sets += of_views or [nothing] * len(unit.ranks)
            of_views = []
            if wanted is not None and before is not None:
                of_views = [Bitmap(words, size) & wanted for words in before.words[number].unbind()]
            known += of_views or [nothing] * len(unit.ranks)
        early = nothing if unit.early is None else unit.early
        rows = [early, unit.scope - early, nothing if wanted is None else wanted]
        return count_all(sets + known + rows, unit.step, signal)

    def _hear(self, unit: FusedUnit) -> Signal:
        """Waits for the census of all ranks; what they want each other to know.

        Raises:
            PeerError: when another rank plans another unit.
        """
        assert unit.coming is not None
        numbers, views = unit.coming.get(), len(unit.ranks)
        length = Census.length(views)
        unit.census = [Census.parse(numbers[at : at + length], views) for at in range(0, len(numbers), length)]
        signal = Signal.NONE
        for rank, census in enumerate(unit.census):
            if census.step != unit.step:
                raise PeerError(f"rank {rank} plans unit {census.step} instead of {unit.step}: they fell out of step.")
            signal |= Signal(census.signal)
        if unit.early is not None and unit.joins and unit.early_share < LITTLE:
            unit.read_at_once()
        return signal

    def _wants(self, unit: FusedUnit, before: FusedUnit) -> bool:
        """Whether some gradients that a unit waits for travel apart from the rest, which leaves something to hide."""
        if unit.early is None:
            return False
        wanted = sum(sum(map(sum, census.wanted)) for census in unit.census)
        before.nothing_wanted = wanted == 0
        if wanted > FEW * sum(sum(map(sum, census.pairs)) for census in before.census):
            return False
        before.wanted, before.follower = before.scope & (unit.scope - unit.early), unit
        return wanted > 0

    def _mark(self, unit: FusedUnit) -> list[Tensor]:
        """(P,) uint8 for each part: marks of the pairs whose rows are wanted first. Brings them into that order."""
        assert unit.wanted is not None
        marks = [unit.wanted.contains(part.rows).view(torch.uint8) for part in unit.read_parts]
        unit.orders = list(map(chosen_first, marks))
        return marks

    def _read_part(self, unit: FusedUnit, rows: Bitmap, stale: Bitmap | None, views: Sequence[int]) -> Tensor | None:
        """Brings rows up to date, copies and projects those that some views may read.

        Args:
            unit: whose part it is.
            rows: of the part.
            stale: those of them that are read as they are.
            views: whose splats are wanted, consecutive ones.

        Returns:
            (P, 13) splats, one view after the other; None where no rank has any row to read.
        """
        number = unit.next_part()
        if number is None:
            return None
        census = unit.census[self._world.rank]
        late = rows.rows(census.rows[number])
        if stale is not None:
            late = torch.where(stale.contains(late), -1, late)
        catch_up_rows(self._model.optimizers, late)
        chosen = slice(views[0], views[-1] + 1)
        counts = census.pairs[number][chosen]
        pairs = rows_of(unit.words[number][chosen], counts)
        offsets = list(accumulate(counts, initial=0))
        table, settings = unit.table[chosen], self._model.raster_settings(unit.step)
        found = project_rows(self._model.all_rows(), pairs, offsets, table, settings)
        radii = found.block[:, -1].view(torch.int32)
        unit.read_parts.append(FusedPart(pairs, offsets, found.values, radii, views[0]))
        return found.block

    def _wait(self, unit: FusedUnit, name: str, *jobs: DeviceJob) -> None:
        """Lets the current stream wait for what arrives; how long it stands still is what a timeline shows."""
        timeline = self._timeline
        if not timeline.records(unit.step) or self._world.size == 1:
            for job in jobs:
                self._exchange.wait(job)
            return
        watch = timeline.stopwatch
        begin = watch.mark()
        for job in jobs:
            self._exchange.wait(job)
        ends = [job.end for job in jobs if job.end is not None]

        def record() -> None:
            # Not to the mark after the wait: a host that is slow to queue it would count as one.
            end = max(map(watch.ns, ends), default=0)
            if end > watch.ns(begin):
                timeline.add("wait", unit.step, watch.ns(begin), end, name)

        timeline.defer(unit.step, record)

    # ------------------------------------------------------------------------------------------------ counts

    def _views_of(self, unit: FusedUnit, rank: int) -> list[int]:
        """The views that a rank renders."""
        return unit.views_by_rank.get(rank, [])

    def _counts(self, unit: FusedUnit, owner: int, first: bool | None = None) -> list[list[int]]:
        """[part][view] rows that an owner has read; ``first``: those whose gradients come first, or last."""
        pairs = [unit.census[owner].pairs[number] for number in unit.parts_read]
        if unit.follower is None or first is None:
            return pairs
        wanted = [unit.follower.census[owner].wanted[number] for number in unit.parts_read]
        if first:
            return wanted
        return [[n - w for n, w in zip(*of_part, strict=True)] for of_part in zip(pairs, wanted, strict=True)]

    def _rows_of_push(self, unit: FusedUnit, first: bool) -> tuple[Bitmap, int]:
        """Rows whose gradients are in a push, and how many."""
        count = sum(unit.census[self._world.rank].rows)
        if unit.wanted is None or unit.follower is None:
            return unit.scope, count
        wanted = unit.follower.census[self._world.rank].wanted_rows
        return (unit.wanted, wanted) if first else (unit.scope - unit.wanted, count - wanted)

    # --------------------------------------------------------------------------------------------- gradients

    def _statistics(
        self, unit: FusedUnit, counts: list[int], rows: Tensor, gradients: Tensor, radii: Tensor
    ) -> list[SplatStatistics]:
        """What densification wants to know of splats, of one view after the other.

        Args:
            unit: whose views they are of.
            counts: splats of each view; views of one size may be taken together.
            rows: (S,) int64 rows of this rank.
            gradients: (S, 2) with respect to the centres.
            radii: (S,) int32.
        """
        if not self._model.strategy.watches(unit.step):
            return []
        sizes = {(camera.width, camera.height) for camera in unit.cameras}
        if len(sizes) == 1:
            return [SplatStatistics(rows, gradients, radii, *sizes.pop(), views=len(unit.ranks))]
        found = []
        parts = zip(unit.cameras, rows.split(counts), gradients.split(counts), radii.split(counts), strict=True)
        for camera, index, grad2d, seen in parts:
            found.append(SplatStatistics(index, grad2d, seen, camera.width, camera.height, views=len(unit.ranks)))
        return found

    def _written(self, unit: FusedUnit, counts: list[int], rows: Tensor, touched: Tensor) -> Iterable[Touched]:
        """Which of (S,) ``rows``, of one view after the other, the views of each rank have a gradient for."""
        parts = zip(unit.view_ranks, rows.split(counts), touched.split(counts), strict=True)
        return [Touched(rank, of_view, hit) for rank, of_view, hit in parts]
