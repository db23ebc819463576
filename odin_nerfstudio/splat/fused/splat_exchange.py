"""Sharded placement between GPUs: owners send splats, renderers send their gradients back (design §3.1)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from odin_nerfstudio.comm.device_exchange import DeviceJob
from odin_nerfstudio.comm.exchange import Signal
from odin_nerfstudio.comm.splat_block import GRADIENTS
from odin_nerfstudio.shadow.bitmap import Bitmap, Index
from odin_nerfstudio.shadow.contention import Touched
from odin_nerfstudio.splat.arrival import as_leaves
from odin_nerfstudio.splat.densify import SplatStatistics
from odin_nerfstudio.splat.fused.leaves import gradients_in_order, merge
from odin_nerfstudio.splat.fused.planning import FusedPlanning
from odin_nerfstudio.splat.fused.routing import chosen_first, to_parts, to_ranks
from odin_nerfstudio.splat.fused.unit import FusedUnit, once_a_unit
from odin_nerfstudio.splat.look import ShardedLook
from odin_nerfstudio.splat.raster import Splats
from odin_nerfstudio.splat.raster.fused import Sums, pull_back_rows
from odin_nerfstudio.splat.unit import RowGradients

_Item = TypeVar("_Item")


class FusedSplatExchange(FusedPlanning, ShardedLook):
    """The two parts that a rank plays: owner of a shard and renderer of views."""

    # ------------------------------------------------------------------------------------------------ splats

    def begin(self, unit: FusedUnit, before: FusedUnit | None) -> Signal:
        """Marks the splats of wanted rows for the ranks that have them."""
        signal = self._hear(unit)
        if before is not None and self._wants(unit, before):
            sent, arriving = self._sent(before), self._arriving(before)
            before.marked = self._swap(to_ranks(self._mark(before), sent), sent, arriving, "marks", before)
        return signal

    def read(self, unit: FusedUnit, rows: Bitmap, stale: Bitmap | None, name: str) -> None:
        """Projects rows for all views and sends the splats of each to the rank that renders it."""
        number = len(unit.read_parts)
        block = self._read_part(unit, rows, stale, range(len(unit.ranks)))
        if block is None:
            return
        sent, arriving = self._sent(unit)[number : number + 1], self._arriving(unit)[number : number + 1]
        unit.sent.append(self._swap(block, sent, arriving, name, unit))

    def leaves(self, unit: FusedUnit) -> list[Splats]:
        """Waits for the splats of all owners and merges them."""
        self._wait(unit, "splats", *unit.sent)
        with self._timeline.span("compute", unit.step, "merge"):
            sizes = self._pieces(unit)
            parts = [job.arrived.split(of_part) for job, of_part in zip(unit.sent, sizes, strict=True)]
            leaves = []
            for of_view in self._by_view(unit, parts):
                splats, place = merge(of_view)
                unit.places.append(place)
                leaves.append(as_leaves(splats))
            return leaves

    # --------------------------------------------------------------------------------------------- gradients

    def push(self, unit: FusedUnit, first: bool, signal: Signal = Signal.NONE) -> DeviceJob:
        """Returns gradients to the owners of the splats; ``signal`` travels with the next plan."""
        if unit.outgoing is None:
            unit.outgoing = self._as_arrived(unit)
            if unit.marked is not None:
                self._exchange.wait(unit.marked)
                unit.order = chosen_first(unit.marked.arrived)
        block, chosen = unit.outgoing, len(unit.pushes) > 1
        arrived, returned = self._arriving(unit, first), self._sent(unit, first)
        if chosen:
            assert unit.order is not None
            wanted = sum(map(sum, self._arriving(unit, first=True)))
            block = block.index_select(0, unit.order[:wanted] if first else unit.order[wanted:])
        name = "wanted gradients" if first and chosen else "gradients"
        unit.pushed = self._swap(block, arrived, returned, name, unit)
        return unit.pushed

    @torch.no_grad()
    def gradients(self, unit: FusedUnit, first: bool) -> RowGradients:
        """Takes the gradients of splats through the projection of this shard's rows."""
        job = unit.pushed
        assert job is not None
        self._wait(unit, job.name, job)
        with self._timeline.span("compute", unit.step, "pull back"):
            blocks = to_parts(job.arrived, self._sent(unit, first))
            some, count = self._rows_of_push(unit, first)
            sums, settings = self._no_gradients(some, count), self._model.raster_settings(unit.step)
            asked = self._timeline.records(unit.step) or self._model.strategy.watches(unit.step)
            statistics: list[SplatStatistics] = []
            written: list[Touched] = []
            for number, (part, block) in enumerate(zip(unit.read_parts, blocks, strict=True)):
                chosen, rows, radii = self._chosen(unit, number, first), part.rows, part.radii
                if chosen is not None and asked:
                    rows, radii = rows.index_select(0, chosen), radii.index_select(0, chosen)
                pull_back_rows(part.values, part.offsets, unit.table, settings, block, chosen, part.rows, sums)
                counts = self._counts(unit, self._world.rank, first)[number]
                grad2d = block[:, GRADIENTS:] if self._model.strategy.absgrad else block[:, :2]
                statistics += self._statistics(unit, counts, rows, grad2d, radii)
                if self._timeline.records(unit.step):
                    written += self._written(unit, counts, rows, (block[:, :GRADIENTS] != 0).any(1))
            return RowGradients(some.rows(count), sums.values, sums.active, statistics, written)

    def _no_gradients(self, some: Bitmap, count: int) -> Sums:
        """Zeros for each of ``count`` rows, all in one piece of memory."""
        sizes = [count * shape.numel() for shape in self._shapes.values()]
        flags = -(-count // 4)  # floats that hold a byte for each row
        zeros = torch.zeros(sum(sizes) + flags, device=self._world.device)
        *parts, last = zeros.split([*sizes, flags])
        shapes = zip(self._shapes.items(), parts, strict=True)
        values = {name: part.view(count, *shape) for (name, shape), part in shapes}
        return Sums(values, last.view(torch.bool)[:count], Index(some))

    @cached_property
    def _shapes(self) -> dict[str, torch.Size]:
        """Of a row of each parameter, however many rows there are."""
        return {name: param.shape[1:] for name, param in self._model.gauss_params.items()}

    def _chosen(self, unit: FusedUnit, number: int, first: bool) -> Tensor | None:
        """(S,) int64 which pairs of a part have their gradients in a push; None: all."""
        if len(unit.pushes) == 1:
            return None
        order = unit.orders[number]
        wanted = sum(self._sent(unit, first=True)[number])
        return order[:wanted] if first else order[wanted:]

    def _as_arrived(self, unit: FusedUnit) -> Tensor:
        """(M, 12) gradients of the leaves as their owners want them: owner by owner, part by part, view by view."""
        by_view = list(map(gradients_in_order, unit.leaves, unit.places))
        if len(by_view) == 1:
            return by_view[0]
        sizes = self._by_view(unit, self._pieces(unit))
        pieces = [gradients.split(of_view) for gradients, of_view in zip(by_view, sizes, strict=True)]
        return torch.cat([piece for of_part in zip(*pieces, strict=True) for piece in of_part])

    # ------------------------------------------------------------------------------------------------ counts

    @once_a_unit
    def _sent(self, unit: FusedUnit, first: bool | None = None) -> list[list[int]]:
        """[part][rank] splats of this owner that a rank renders; ``first``: those pushed first, or the others."""
        return [
            [sum(counts[view] for view in self._views_of(unit, rank)) for rank in range(self._world.size)]
            for counts in self._counts(unit, self._world.rank, first)
        ]

    @once_a_unit
    def _arriving(self, unit: FusedUnit, first: bool | None = None) -> list[list[int]]:
        """[part][owner] splats that this rank renders; ``first`` as in :meth:`_sent`."""
        mine = self._views_of(unit, self._world.rank)
        of_owners = [self._counts(unit, owner, first) for owner in range(self._world.size)]
        return [[sum(counts[view] for view in mine) for counts in of_part] for of_part in zip(*of_owners, strict=True)]

    def _pieces(self, unit: FusedUnit) -> list[list[int]]:
        """[part][owner × view] splats of each of this rank's views."""
        mine = self._views_of(unit, self._world.rank)
        of_owners = [self._counts(unit, owner) for owner in range(self._world.size)]
        return [[counts[view] for counts in of_part for view in mine] for of_part in zip(*of_owners, strict=True)]

    def _by_view(self, unit: FusedUnit, parts: Sequence[Sequence[_Item]]) -> list[list[_Item]]:
        """[part][owner × view] → [view][owner × part]"""
        views = len(unit.ranks) // self._world.size
        return [
            [item for of_owner in zip(*(part[view::views] for part in parts), strict=True) for item in of_owner]
            for view in range(views)
        ]

    def _swap(
        self, block: Tensor, sent: list[list[int]], arriving: list[list[int]], name: str, unit: FusedUnit
    ) -> DeviceJob:
        return self._exchange.swap(block, _totals(sent), _totals(arriving), name, unit.step)


def _totals(counts: list[list[int]]) -> list[int]:
    """[part][rank] → [rank]"""
    return [sum(of_rank) for of_rank in zip(*counts, strict=True)]
