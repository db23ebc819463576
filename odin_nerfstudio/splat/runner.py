"""Runs task units: read, send, render, push, publish (design §3.1).

While unit t is rendered and its backward runs, the rows of unit t + 1 that t cannot change are read and travel. Of t's
gradients those that t + 1 waits for travel first; the others follow while t + 1 is rendered, and are published before
its backward. What goes when never shows in the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from odin_nerfstudio.comm.exchange import Exchange, Link, Signal, Transfer
from odin_nerfstudio.comm.world import World
from odin_nerfstudio.runs.memory import peak_memory
from odin_nerfstudio.shadow.contention import Contention
from odin_nerfstudio.shadow.graph import ShadowGraph
from odin_nerfstudio.shadow.optimizer import LazyAdam
from odin_nerfstudio.shadow.policy import Quality
from odin_nerfstudio.shadow.timeline import Timeline
from odin_nerfstudio.splat.datamanager import OdinDataManager
from odin_nerfstudio.splat.densify import catch_up
from odin_nerfstudio.splat.model import OdinSplatfactoModel
from odin_nerfstudio.splat.raster import PinholeCamera, Splats
from odin_nerfstudio.splat.sparse_exchange import SparseExchange
from odin_nerfstudio.splat.splat_exchange import SplatExchange
from odin_nerfstudio.splat.unit import RowGradients, Unit, UnitExchange

FEW = 0.5
"""Share of a scope up to which wanted gradients travel apart from the rest; above it nothing would be left to hide."""


class UnitRunner:
    """The units of one rank, at most two in flight.

    Args:
        model: the rows of this rank, their optimizers and the renderer.
        datamanager: the schedule and the cameras.
        world: the ranks.
        policy: what may be read while another unit is in flight.
        replicated: whether every rank has all rows, rather than a shard.
        link: a slower network to imitate.
    """

    def __init__(
        self,
        model: OdinSplatfactoModel,
        datamanager: OdinDataManager,
        world: World,
        policy: Quality,
        replicated: bool = False,
        link: Link | None = None,
    ) -> None:
        self._model = model
        self._datamanager = datamanager
        self._world = world
        exchange = Exchange(world, link, self._record)
        self.timeline = Timeline(world.rank)
        """Where the time of this rank goes."""
        self._exchange: UnitExchange = (SparseExchange if replicated else SplatExchange)(model, exchange, self.timeline)
        self.graph = ShadowGraph(model.num_points, self._commit, policy, model.device)
        self.contention = Contention(model.num_points, world.size, model.device)
        """Who met whom at which rows of this rank."""
        self._replicated = replicated
        self._ids = model.ids
        self.request = Signal.NONE
        """What this rank wants all of them to know; see ``signal``."""
        self.signal = Signal.NONE
        """What any rank has requested, on all ranks from the same unit on."""
        self._next: Unit | None = None
        self._current: Unit | None = None
        self._pushed: Unit | None = None
        self._read_ahead = torch.empty(0, dtype=torch.int64, device=model.device)

    @property
    def versions(self) -> Tensor:
        """(N,) int32 the unit that published each row last, -1 where that is not known. No unit is in flight."""
        self._follow()
        return self.graph.versions

    @property
    def conflict(self) -> Tensor:
        """(N,) float32 in [0, 1]: in which part of the last units each row was contended. No unit is in flight."""
        self._follow()
        return self.contention.share

    @property
    def is_drained(self) -> bool:
        """Whether no unit is in flight, so that rows may change or move."""
        return self._next is None and self._current is None and self._pushed is None

    def begin(self, step: int) -> None:
        """Hook 1, before reading: finds the scope of a unit and, if another one is in flight, reads what is early."""
        if self._next is not None:
            return
        self._follow()
        group = self._datamanager.plan.schedule.group(step)
        views = [self._datamanager.train_camera(int(view)) for view in group.views]
        cameras = [self._model.pinhole(camera, step) for camera in views]
        scope = self._model.scope(cameras, step)
        unit = self._exchange.unit_type(step, group.ranks.tolist(), cameras, self.graph.admit(step, scope))
        self._next = unit
        # A rank without others has nothing to send ahead, and projects a unit's rows together.
        if self._current is not None and self._world.size > 1 and self.graph.policy.overlaps:
            self._want(self._current, unit)
            early = self.graph.early(unit.locks)
            catch_up(self._model.optimizers, early)
            self._exchange.read(unit, early, "early splats")

    def receive(self, step: int) -> list[Splats]:
        """Reads what was late and waits for the splats of this rank's views.

        Returns:
            For each view of this rank, in the order of the group, leaves in ascending order of id.
        """
        self.begin(step)
        self._settle_first()
        unit, self._next = self._next, None
        assert unit is not None
        self._current = unit
        with self.timeline.span("compute", step, "late splats"):
            rest = torch.cat([self.graph.early(unit.locks), self.graph.late(unit.locks)])
            catch_up(self._model.optimizers, rest)
            # Those read ahead of their publication are read as they are: its step is not one that they have missed.
            rest = torch.cat([rest, self._read_ahead]).sort().values
            self._read_ahead = rest[:0]
            self._exchange.read(unit, rest, "late splats")
        if self._pushed is not None:
            self._exchange.push(self._pushed, first=False)
        unit.leaves = self._exchange.leaves(unit)
        if self.timeline.recording:
            self.timeline.count(step, **vars(unit.locks.counts))
            self.contention.read(step, unit.locks.scope, unit.locks.stale, unit.reads())
        return unit.leaves

    def look(self, cameras: Sequence[PinholeCamera], ranks: Sequence[int]) -> list[Splats]:
        """Splats of views outside training units, such as those of an evaluation. All ranks call it together.

        Args:
            cameras: of the views.
            ranks: which of them renders each.

        Returns:
            For each view of this rank, in order.
        """
        return self._exchange.look(cameras, ranks)

    def publish(self) -> None:
        """Hook 2, after the backward: pushes the gradients of this rank's splats. Publishes them too, if no other unit
        has begun."""
        unit, self._current = self._current, None
        assert unit is not None
        for name, param in self._model.gauss_params.items():
            if param.grad is not None:
                unit.dense[name], param.grad = param.grad, None
            self._model.optimizers[name].step()
        self._push = self._exchange.push(unit, first=True, signal=self.request)
        self._pushed = unit
        if unit.wanted is None:
            self._settle_first()

    def settle(self) -> None:
        """Hook 3: publishes what was pushed, all of it."""
        self._settle_first()
        unit, self._pushed = self._pushed, None
        if unit is not None:
            found = self._exchange.gradients(unit, first=False)
            if not unit.locks.finished:  # else what was wanted was all there is
                self._publish(unit, found)
            self._watch(unit, found)
            self._finish(unit)

    def _want(self, unit: Unit, follower: Unit) -> None:
        """Finds out for which rows of a unit the one after it waits, and lets the other ranks know."""
        wanted = unit.locks.scope & follower.locks.scope
        if wanted.count() > FEW * unit.locks.counts.scope:
            wanted = unit.locks.scope
        unit.wanted = torch.zeros(self.graph.num_rows, dtype=torch.bool, device=self._model.device)
        unit.wanted[wanted.rows()] = True
        self._exchange.want(unit)

    def _settle_first(self) -> None:
        """Publishes the gradients that were pushed first, once."""
        unit = self._pushed
        if unit is None or unit.locks.active is not None:
            return
        found = self._exchange.gradients(unit, first=True)
        self.signal |= self._push.signal
        self._publish(unit, found, unit.wanted)
        self._watch(unit, found)
        if unit.wanted is None:
            self._pushed = None
            self._finish(unit)

    def _publish(self, unit: Unit, found: RowGradients, among: Tensor | None = None) -> None:
        """Publishes the active rows; the rest of the scope has a zero gradient and catches up when it is read again.

        Args:
            unit: whose gradients were found.
            found: those of some of its rows; the others' are zero.
            among: (N,) bool, the rows in question; None: all that are left.
        """
        with self.timeline.span("compute", unit.step, "publish"):
            settled = None if among is None else among.nonzero()[:, 0]
            if unit.dense:
                found = _with_dense(found, unit, settled)
            active = found.select(torch.stack([(v.flatten(1) != 0).any(1) for v in found.values.values()]).any(0))
            delays = self.graph.policy.delays
            magnitudes = active.values["means"].norm(dim=1) if delays else None
            if not unit.locks.is_settled:
                self.graph.backward(unit.locks, active.rows, magnitudes, settled)
            if unit.postponed is not None:
                active = active.join(unit.postponed)
            elif delays and among is not None and self._next is not None:
                self._read_ahead = self.graph.late(self._next.locks)
                postponed = torch.isin(active.rows, self._read_ahead)
                unit.postponed, active = active.select(postponed), active.select(~postponed)
            self.graph.stage(unit.locks, active.values, active.rows)
            self.graph.publish(unit.locks)

    def _watch(self, unit: Unit, found: RowGradients) -> None:
        if self._model.strategy.watches(unit.step):
            self._model.watch(found.statistics)
        if self.timeline.recording:
            for rank, rows in zip(unit.ranks, found.written, strict=True):
                self.contention.wrote(unit.step, rank, rows)

    def _finish(self, unit: Unit) -> None:
        """Everything of a unit is published: keeps what was counted of it."""
        if not self.timeline.recording:
            return
        conflicts = self.contention.finish(unit.step)
        if conflicts is not None and self._replicated:
            conflicts = conflicts.as_replica(self._world.rank)
        self.timeline.count(unit.step, primitives=self._model.num_points, memory=peak_memory(self._model.device))
        self.timeline.finish(unit.step, conflicts)

    def _follow(self) -> None:
        """Follows the model to other rows; of those that this rank had before it still knows the versions."""
        before, versions, ids = self._ids, self.graph.versions, self._model.ids
        if before is ids:
            return
        known = versions.new_full((len(ids),), -1)
        if len(before):
            place = torch.searchsorted(before, ids).clamp_(max=len(before) - 1)
            known = torch.where(before[place] == ids, versions[place], known)
        self.graph.resize(len(ids), known)
        self.contention.resize(len(ids))
        self._ids = ids

    def _commit(self, step: int, rows: Tensor, gradients: Mapping[str, Tensor]) -> None:
        for name in self._model.gauss_params:
            cast(LazyAdam, self._model.optimizers[name]).take(rows, gradients[name])

    def _record(self, transfer: Transfer) -> None:
        begin, end = int(transfer.start * 1e9), int(transfer.end * 1e9)
        self.timeline.add("communication", transfer.unit, begin, end, transfer.name)
        self.timeline.count(transfer.unit, bytes=transfer.sent, busier=max(transfer.sent, transfer.received))


def _with_dense(found: RowGradients, unit: Unit, rows: Tensor | None) -> RowGradients:
    """The gradients of ``rows`` (None: of all that are left of the scope) with those of regularisers added."""
    if rows is None:
        rows = (unit.locks.scope - unit.locks.settled).rows()
    place = torch.searchsorted(rows, found.rows)
    values = {}
    for name, value in found.values.items():
        dense = unit.dense.get(name)
        values[name] = value.new_zeros(len(rows), *value.shape[1:]) if dense is None else dense[rows]
        values[name].index_add_(0, place, value)
    return replace(found, rows=rows, values=values)
