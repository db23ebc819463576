"""Replicated placement: every rank holds all primitives, and gradient rows of active sets travel (design §3.2).

A rank renders its views from copies of the rows in their scope. All ranks add the same gradients in the order of the
views and take the same steps, so that the replicas stay equal to the last bit.
"""

from __future__ import annotations

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
from odin_nerfstudio.splat.look import ReplicatedLook
from odin_nerfstudio.splat.raster import Splats
from odin_nerfstudio.splat.unit import Part, RowGradients, Unit, gradients_of, is_active, pull_back, read_rows


@dataclass
class SparseUnit(Unit):
    """A unit whose gradient rows are on their way."""

    active: Tensor | None = None
    """(A, 2 + D): row, view and gradient of this rank's active rows; the first two are the bits of integers."""
    visible: Tensor | None = None
    """(V, 5): row, view, gradient of the centre (2) and radius of this rank's splats."""
    pushed: list[Job] = field(default_factory=list)
    """The exchanges of gradients, and of what densification needs to know, that are under way."""


class SparseExchange(HostPlanning, ReplicatedLook):
    """Renders from this rank's own rows and hands gradient rows to everyone."""

    unit_type = SparseUnit

    # ------------------------------------------------------------------------------------------------ splats

    def begin(self, unit: SparseUnit, before: SparseUnit | None) -> Signal:
        """Nothing to tell: every rank knows the scopes of all."""
        if unit.early is not None and before is not None:
            self._want(unit, before)
        return Signal.NONE  # it travels with the gradients

    def read(self, unit: SparseUnit, rows: Bitmap, stale: Bitmap | None, name: str) -> None:
        """Copies the rows that this rank's views may touch, and projects them; all are brought up to date, to stay the
        same on all ranks."""
        chosen = rows.rows()
        catch_up_rows(self._model.optimizers, chosen if stale is None else (rows - stale).rows())
        views = unit.views_of(self._world.rank)
        chosen = self._model.scope([unit.cameras[view] for view in views], unit.step, among=chosen)
        values, settings = read_rows(self._model, chosen), self._model.raster_settings(unit.step)
        project = self._model.rasterizer.project
        splats = {view: project(values, unit.cameras[view], settings) for view in views}
        unit.parts.append(Part(chosen, values, splats))

    def leaves(self, unit: SparseUnit) -> list[Splats]:
        """The splats of this rank's views."""
        views = unit.views_of(self._world.rank)
        blocks = [pack(part.splats, views, part.rows.device) for part in unit.parts]
        merged, unit.order = merge(torch.cat(blocks), len(unit.ranks))
        return [as_leaves(merged[view]) for view in views]

    # --------------------------------------------------------------------------------------------- gradients

    def push(self, unit: SparseUnit, first: bool, signal: Signal = Signal.NONE) -> Job:
        """Sends gradient rows to all ranks; what densification needs goes with the last of them."""
        if first:
            self._pull_back(unit)
        assert unit.active is not None and unit.visible is not None
        active, last = unit.active, not first or unit.wanted is None
        if unit.wanted is not None:
            active = active[unit.wanted.contains(_integers(active[:, 0])) == first]
        name = "gradients" if last else "wanted gradients"
        unit.pushed = [self._to_all(active, name, unit, signal)]
        if last and self._model.strategy.watches(unit.step):
            unit.pushed.append(self._to_all(unit.visible, "statistics", unit))
        return unit.pushed[0]

    def gradients(self, unit: SparseUnit, first: bool) -> RowGradients:
        """Adds up the gradient rows of all ranks, view by view."""
        with self._timeline.span("wait", unit.step, unit.pushed[0].name):
            blocks, *seen = [torch.cat(self._exchange.wait(job)) for job in unit.pushed]
        every, views = _integers(blocks[:, 0]), _integers(blocks[:, 1])
        rows, place = every.unique(return_inverse=True)
        sums = blocks.new_zeros(len(rows), blocks.shape[1] - 2)
        for view in range(len(unit.ranks)):  # one after the other: within a view all rows are different
            of_view = views == view
            sums.index_add_(0, place[of_view], blocks[of_view, 2:])
        params = self._model.gauss_params
        widths = [params[name][0].numel() for name in self._params]
        columns = zip(self._params, sums.split(widths, dim=1), strict=True)
        values = {name: column.reshape(-1, *params[name].shape[1:]).contiguous() for name, column in columns}
        written = [Touched(rank, every, views == view) for view, rank in enumerate(unit.ranks)]
        statistics = [s for block in seen for s in self._statistics(unit, block)]
        return RowGradients(rows, values, is_active(values), statistics, written)

    def _to_all(self, block: Tensor, name: str, unit: SparseUnit, signal: Signal = Signal.NONE) -> Job:
        return self._exchange.all_to_all([block] * self._world.size, name, unit.step, signal)

    def _pull_back(self, unit: SparseUnit) -> None:
        """Gradients of the rows of every part for each of this rank's views by itself."""
        assert unit.order is not None
        views = unit.views_of(self._world.rank)
        arrived = gradients_as_arrived(unit.leaves, unit.order)
        pieces = iter(arrived.split([len(part.splats[view].ids) for part in unit.parts for view in views]))
        active, visible = [], []
        for part in unit.parts:
            for view in views:
                splats, gradients = part.splats[view], SplatGradBlock.unpack(next(pieces))
                if len(splats.ids):
                    pull_back(splats, gradients, unit.cameras[view])
                rows = torch.cat([g.flatten(1) for g in gradients_of(part.values, self._params).values()], dim=1)
                for name in self._params:
                    getattr(part.values, name).grad = None
                chosen = (rows != 0).any(dim=1).nonzero()[:, 0]
                active.append(_with_numbers(part.rows[chosen], view, rows[chosen]))
                grad2d = gradients.absgrad if self._model.strategy.absgrad else gradients.means2d
                radii = splats.radii.view(-1, 1).view(torch.float32)
                visible.append(_with_numbers(part.rows[splats.index], view, torch.cat([grad2d, radii], dim=1)))
        unit.active, unit.visible = torch.cat(active), torch.cat(visible)

    def _statistics(self, unit: SparseUnit, block: Tensor) -> list[SplatStatistics]:
        rows, views = _integers(block[:, 0]), _integers(block[:, 1])
        radii = block[:, 4].contiguous().view(torch.int32)
        found = []
        for view, camera in enumerate(unit.cameras):
            of_view = views == view
            grad2d, views_per_step = block[of_view, 2:4], len(unit.ranks)
            size = camera.width, camera.height
            found.append(SplatStatistics(rows[of_view], grad2d, radii[of_view], *size, views=views_per_step))
        return found


def _with_numbers(rows: Tensor, view: int, columns: Tensor) -> Tensor:
    """(R, 2 + D) float32: ``rows`` and ``view`` as the bits of integers before (R, D) ``columns``."""
    numbers = torch.stack([rows, torch.full_like(rows, view)], dim=1).int()
    return torch.cat([numbers.view(torch.float32), columns], dim=1)


def _integers(column: Tensor) -> Tensor:
    """(R,) int64 of the bits in a float32 column."""
    return column.contiguous().view(torch.int32).long()
