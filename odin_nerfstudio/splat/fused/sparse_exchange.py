"""Replicated placement between GPUs: every rank has all rows and hands its gradient rows to all (design §3.2).

All ranks cull the same rows for the same cameras, so each knows which rows the others' gradients belong to: neither ids
nor counts travel.
"""

from __future__ import annotations

import torch

from odin_nerfstudio.comm.device_exchange import DeviceJob
from odin_nerfstudio.comm.exchange import Signal
from odin_nerfstudio.comm.splat_block import SplatGradBlock
from odin_nerfstudio.shadow.bitmap import Bitmap, Index, rows_of
from odin_nerfstudio.shadow.contention import Touched
from odin_nerfstudio.splat.arrival import as_leaves
from odin_nerfstudio.splat.densify import SplatStatistics
from odin_nerfstudio.splat.fused.leaves import gradients_in_order, merge
from odin_nerfstudio.splat.fused.planning import FusedPlanning
from odin_nerfstudio.splat.fused.routing import joined, to_parts
from odin_nerfstudio.splat.fused.unit import FusedUnit
from odin_nerfstudio.splat.look import ReplicatedLook
from odin_nerfstudio.splat.raster import Splats
from odin_nerfstudio.splat.raster.fused import pull_back_rows
from odin_nerfstudio.splat.unit import RowGradients

STATISTICS = 3
"""Columns beside a gradient row that densification needs: the gradient of the centre, and the radius."""


class FusedSparseExchange(FusedPlanning, ReplicatedLook):
    """Renders from this rank's own rows and hands gradient rows to everyone."""

    # ------------------------------------------------------------------------------------------------ splats

    def begin(self, unit: FusedUnit, before: FusedUnit | None) -> Signal:
        """Nothing to tell: every rank knows the scopes of all."""
        signal = self._hear(unit)
        if before is not None and self._wants(unit, before):
            self._mark(before)
        return signal

    def read(self, unit: FusedUnit, rows: Bitmap, stale: Bitmap | None, name: str) -> None:
        """Copies the rows that this rank's views may touch, and projects them; all are brought up to date, to stay the
        same on all ranks."""
        block = self._read_part(unit, rows, stale, self._views_of(unit, self._world.rank))
        if block is not None:
            unit.blocks.append(block)

    def leaves(self, unit: FusedUnit) -> list[Splats]:
        """The splats of this rank's views."""
        with self._timeline.span("compute", unit.step, "merge"):
            parts = [block.split(part.sizes) for block, part in zip(unit.blocks, unit.read_parts, strict=True)]
            leaves = []
            for of_view in zip(*parts, strict=True):
                splats, place = merge(of_view)
                unit.places.append(place)
                leaves.append(as_leaves(splats))
            return leaves

    # --------------------------------------------------------------------------------------------- gradients

    @torch.no_grad()
    def push(self, unit: FusedUnit, first: bool, signal: Signal = Signal.NONE) -> DeviceJob:
        """Sends gradient rows to all ranks; ``signal`` travels with the next plan."""
        if not unit.returned:
            sizes = [part.sizes for part in unit.read_parts]
            by_view = [
                gradients_in_order(leaves, place).split(of_view)
                for leaves, place, of_view in zip(unit.leaves, unit.places, zip(*sizes, strict=True), strict=True)
            ]
            unit.returned = [joined(of_part) for of_part in zip(*by_view, strict=True)]
        settings, watched = self._model.raster_settings(unit.step), self._model.strategy.watches(unit.step)
        mine = self._views_of(unit, self._world.rank)
        table, rows = unit.table[mine[0] : mine[-1] + 1], []
        for number, (part, block) in enumerate(zip(unit.read_parts, unit.returned, strict=True)):
            chosen, radii = None, part.radii
            if len(unit.pushes) > 1:
                order, wanted = unit.orders[number], self._counts(unit, self._world.rank, True)[number]
                count = sum(wanted[view] for view in mine)
                chosen = order[:count] if first else order[count:]
                block = block.index_select(0, chosen)
                if watched:
                    radii = radii.index_select(0, chosen)
            found = pull_back_rows(part.values, part.offsets, table, settings, block, chosen)
            columns = [found[name].flatten(1) for name in self._params]
            if watched:
                fields = SplatGradBlock.unpack(block)
                columns.append(fields.absgrad if self._model.strategy.absgrad else fields.means2d)
                columns.append(radii.view(torch.float32)[:, None])
            rows.append(torch.cat(columns, dim=1))
        name = "wanted gradients" if first and len(unit.pushes) > 1 else "gradients"
        unit.pushed = self._exchange.to_all(joined(rows), self._totals(unit, first), name, unit.step)
        return unit.pushed

    @torch.no_grad()
    def gradients(self, unit: FusedUnit, first: bool) -> RowGradients:
        """Adds up the gradient rows of all ranks, view by view, so that all ranks come to the same bits."""
        assert unit.pushed is not None
        self._wait(unit, unit.pushed.name, unit.pushed)
        with self._timeline.span("compute", unit.step, "add up"):
            params = self._model.gauss_params
            widths = [params[name][:1].numel() for name in self._params]
            some, count = self._rows_of_push(unit, first)
            index, sums = Index(some), torch.zeros(count, sum(widths), device=self._world.device)
            by_view = self._counts(unit, self._world.rank, first)
            blocks = to_parts(unit.pushed.arrived, [self._by_rank(unit, counts) for counts in by_view])
            statistics: list[SplatStatistics] = []
            written: list[Touched] = []
            for number, block, counts in zip(unit.parts_read, blocks, by_view, strict=True):
                words = unit.words[number] if len(unit.pushes) == 1 else unit.words[number] & some.words
                rows, gradients = rows_of(words, counts), block[:, : sums.shape[1]]
                place = index.place(rows)
                for at, of_view in zip(place.split(counts), gradients.split(counts), strict=True):
                    sums.index_add_(0, at, of_view)  # within a view all rows are different
                if self._model.strategy.watches(unit.step):
                    grad2d, radii = block[:, -STATISTICS:-1], block[:, -1].contiguous().view(torch.int32)
                    statistics += self._statistics(unit, counts, rows, grad2d, radii)
                if self._timeline.records(unit.step):
                    written += self._written(unit, counts, rows, (gradients != 0).any(1))
            columns = zip(self._params, sums.split(widths, dim=1), strict=True)
            values = {name: column.reshape(-1, *params[name].shape[1:]).contiguous() for name, column in columns}
            return RowGradients(some.rows(count), values, (sums != 0).any(1), statistics, written)

    def _by_rank(self, unit: FusedUnit, counts: list[int]) -> list[int]:
        """[view] → [rank]"""
        return [sum(counts[view] for view in self._views_of(unit, rank)) for rank in range(self._world.size)]

    def _totals(self, unit: FusedUnit, first: bool) -> list[int]:
        """Gradient rows that each rank sends."""
        parts = [self._by_rank(unit, counts) for counts in self._counts(unit, self._world.rank, first)]
        return [sum(of_rank) for of_rank in zip(*parts, strict=True)]
