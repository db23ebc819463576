"""Sharded placement: owners send splats, renderers send their gradients back (design §3.1).

An owner projects rows of its shard for every view of a group. Tens of floats for each primitive and view travel,
instead of the hundreds of a raw row with its moments, and no rank needs memory for primitives of others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from odin_nerfstudio.comm.exchange import Job, Signal
from odin_nerfstudio.comm.splat_block import SplatGradBlock
from odin_nerfstudio.shadow.bitmap import Bitmap
from odin_nerfstudio.shadow.contention import Touched
from odin_nerfstudio.shadow.optimizer import catch_up_rows
from odin_nerfstudio.splat.arrival import as_leaves, gradients_as_arrived, merge, pack
from odin_nerfstudio.splat.densify import SplatStatistics
from odin_nerfstudio.splat.host_planning import HostPlanning
from odin_nerfstudio.splat.look import ShardedLook
from odin_nerfstudio.splat.raster import Rows, Splats
from odin_nerfstudio.splat.unit import Part, RowGradients, Unit, gradients_of, is_active, pull_back, read_rows


@dataclass
class SplatUnit(Unit):
    """A unit whose splats and gradients are on their way."""

    sent: list[Job] = field(default_factory=list)
    """For each part, the exchange of its splats."""
    counts: list[int] = field(default_factory=list)
    """Number of splats that arrived from each owner."""
    marked: Job | None = None
    """The exchange of marks: which splats belong to wanted rows."""
    outgoing: list[Tensor] = field(default_factory=list)
    """For each owner, the gradients of its splats, part by part and view by view."""
    pushed: Job | None = None
    """The exchange of gradients that is under way."""


class SplatExchange(HostPlanning, ShardedLook):
    """The two parts that a rank plays: owner of a shard and renderer of views."""

    unit_type = SplatUnit

    # ------------------------------------------------------------------------------------------------ splats

    def begin(self, unit: SplatUnit, before: SplatUnit | None) -> Signal:
        """Marks the splats of wanted rows for the ranks that have them."""
        if unit.early is not None and before is not None:
            self._want(unit, before)
            kept = [_kept(before, part, first=True) for part in before.parts]
            blocks = []
            for rank in range(self._world.size):
                marks = [of_part[part.splats[view].index] for part, of_part, view in self._places(before, kept, rank)]
                blocks.append(torch.cat(marks or [kept[0][:0]])[:, None])
            before.marked = self._exchange.all_to_all(blocks, "marks", before.step)
        return Signal.NONE  # it travels with the gradients

    def read(self, unit: SplatUnit, rows: Bitmap, stale: Bitmap | None, name: str) -> None:
        """Projects rows for all views and sends the splats of each to the rank that renders it."""
        chosen = rows.rows()
        catch_up_rows(self._model.optimizers, chosen if stale is None else (rows - stale).rows())
        values = read_rows(self._model, chosen)
        part = Part(chosen, values, self._project(values, unit.cameras, unit.step))
        blocks = [pack(part.splats, unit.views_of(rank), chosen.device) for rank in range(self._world.size)]
        unit.parts.append(part)
        unit.sent.append(self._exchange.all_to_all(blocks, name, unit.step))

    def leaves(self, unit: SplatUnit) -> list[Splats]:
        """Waits for the splats of all owners and merges them."""
        with self._timeline.span("wait", unit.step, "splats"):
            parts = [self._exchange.wait(job) for job in unit.sent]
        with self._timeline.span("compute", unit.step, "merge"):
            by_owner = [torch.cat(blocks) for blocks in zip(*parts, strict=True)]
            unit.counts = [len(block) for block in by_owner]
            views, unit.order = merge(torch.cat(by_owner), len(unit.ranks))
            return [as_leaves(views[view]) for view in unit.views_of(self._world.rank)]

    # --------------------------------------------------------------------------------------------- gradients

    def push(self, unit: SplatUnit, first: bool, signal: Signal = Signal.NONE) -> Job:
        """Returns gradients to the owners of the splats."""
        if first:
            assert unit.order is not None
            unit.outgoing = list(gradients_as_arrived(unit.leaves, unit.order).split(unit.counts))
        blocks = unit.outgoing
        if unit.marked is not None:
            marks = [mark[:, 0] == first for mark in self._exchange.wait(unit.marked)]
            blocks = [block[mark] for block, mark in zip(blocks, marks, strict=True)]
        name = "wanted gradients" if first and unit.marked is not None else "gradients"
        unit.pushed = self._exchange.all_to_all(blocks, name, unit.step, signal)
        return unit.pushed

    def gradients(self, unit: SplatUnit, first: bool) -> RowGradients:
        """Takes the gradients of splats through the projection of this shard's rows."""
        assert unit.pushed is not None
        with self._timeline.span("wait", unit.step, unit.pushed.name):
            blocks = self._exchange.wait(unit.pushed)
        with self._timeline.span("compute", unit.step, "pull back"):
            return self._pull_back(unit, first, blocks)

    def _pull_back(self, unit: SplatUnit, first: bool, blocks: list[Tensor]) -> RowGradients:
        kept = [_kept(unit, part, first) for part in unit.parts]
        pieces = [self._pieces(unit, kept, rank, block) for rank, block in enumerate(blocks)]
        rows, sums = [], []
        seen: list[list[tuple[Tensor, Tensor, Tensor]]] = [[] for _ in unit.cameras]
        for part, of_part in zip(unit.parts, kept, strict=True):
            if first and not of_part.all():  # few rows, whose projection is cheaper to repeat than that of all to keep
                part = self._select(unit, part, of_part)
                of_part = torch.ones_like(part.rows, dtype=torch.bool)
            for view, splats in part.splats.items():
                came, returned = of_part[splats.index], next(pieces[unit.ranks[view]])
                every = returned
                if len(returned) < len(came):
                    every = returned.new_zeros(len(came), returned.shape[1])
                    every[came] = returned
                if len(returned):
                    pull_back(splats, SplatGradBlock.unpack(every), unit.cameras[view])
                seen[view].append((part.rows[splats.index[came]], returned, splats.radii[came]))
            rows.append(part.rows[of_part])
            sums.append({name: gradient[of_part] for name, gradient in gradients_of(part.values, self._params).items()})
        order = torch.argsort(torch.cat(rows))
        values = {name: torch.cat([each[name] for each in sums])[order] for name in self._params}
        returned_to = [tuple(map(torch.cat, zip(*of, strict=True))) for of in seen]
        statistics = [self._statistics(unit, view, *of) for view, of in enumerate(returned_to)]
        written = [
            Touched(rank, rows, (gradients != 0).any(1))
            for rank, (rows, gradients, _) in zip(unit.ranks, returned_to, strict=True)
        ]
        return RowGradients(torch.cat(rows)[order], values, is_active(values), statistics, written)

    def _places(self, unit: SplatUnit, kept: list[Tensor], rank: int) -> list[tuple[Part, Tensor, int]]:
        """Part, kept rows and view of each piece in what a renderer and this owner exchange, in its order."""
        return [(part, rows, view) for part, rows in zip(unit.parts, kept, strict=True) for view in unit.views_of(rank)]

    def _pieces(self, unit: SplatUnit, kept: list[Tensor], rank: int, block: Tensor) -> Iterator[Tensor]:
        """The gradients that a renderer returned, piece by piece."""
        counts = [int(rows[part.splats[view].index].sum()) for part, rows, view in self._places(unit, kept, rank)]
        return iter(block.split(counts) if counts else ())

    def _select(self, unit: SplatUnit, part: Part, kept: Tensor) -> Part:
        """The kept rows of a part ((R,) bool), with the same values and splats and a graph of their own."""
        fields = {name: getattr(part.values, name).detach()[kept].requires_grad_() for name in self._params}
        values = Rows(part.values.ids[kept], **fields)
        return Part(part.rows[kept], values, self._project(values, unit.cameras, unit.step))

    def _statistics(
        self, unit: SplatUnit, view: int, rows: Tensor, gradients: Tensor, radii: Tensor
    ) -> SplatStatistics:
        block, camera = SplatGradBlock.unpack(gradients), unit.cameras[view]
        grad2d = block.absgrad if self._model.strategy.absgrad else block.means2d
        return SplatStatistics(rows, grad2d, radii, camera.width, camera.height, views=len(unit.ranks))


def _kept(unit: Unit, part: Part, first: bool) -> Tensor:
    """(R,) bool: rows of a part whose gradients are in the first push, or in the second."""
    if unit.wanted is None:
        return torch.full_like(part.rows, first, dtype=torch.bool)
    return unit.wanted.contains(part.rows) == first
