"""Runs task units: read, send, render, push, publish (design §3.1).

While unit t is rendered and its backward runs, the rows of unit t + 1 that t cannot change are read and travel. Of t's
gradients those that t + 1 waits for travel first; the others follow while t + 1 is rendered, and are published before
its backward. What goes when never shows in the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from odin_nerfstudio import kernels
from odin_nerfstudio.comm.device_exchange import DeviceExchange, DeviceTransfer
from odin_nerfstudio.comm.exchange import Exchange, Link, Signal, Transfer
from odin_nerfstudio.comm.world import World
from odin_nerfstudio.runs.memory import peak_memory
from odin_nerfstudio.shadow.bitmap import Bitmap
from odin_nerfstudio.shadow.contention import Contention
from odin_nerfstudio.shadow.graph import ShadowGraph
from odin_nerfstudio.shadow.optimizer import announce_all, end_step, take_rows
from odin_nerfstudio.shadow.policy import Quality
from odin_nerfstudio.shadow.readback import counts_to_host
from odin_nerfstudio.shadow.stopwatch import stopwatch_of
from odin_nerfstudio.shadow.timeline import EVERY_UNIT, SAMPLED, Timeline
from odin_nerfstudio.splat.datamanager import OdinDataManager
from odin_nerfstudio.splat.fused import FusedSparseExchange, FusedSplatExchange
from odin_nerfstudio.splat.model import OdinSplatfactoModel
from odin_nerfstudio.splat.raster import PinholeCamera, Splats
from odin_nerfstudio.splat.sparse_exchange import SparseExchange
from odin_nerfstudio.splat.splat_exchange import SplatExchange
from odin_nerfstudio.splat.unit import RowGradients, Unit, UnitExchange, is_active


class UnitRunner:
    """The units of one rank, at most two in flight.

    :meth:`run` takes a step; the methods after it are its parts.

    Args:
        model: the rows of this rank, their optimizers and the renderer.
        datamanager: the schedule and the cameras.
        world: the ranks.
        policy: what may be read while another unit is in flight.
        replicated: whether every rank has all rows, rather than a shard.
        link: a slower network to imitate, between CPUs.
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
        sampling = SAMPLED if world.device.type == "cuda" else EVERY_UNIT
        self.timeline = Timeline(world.rank, stopwatch=stopwatch_of(world.device), sampling=sampling)
        """Where the time of this rank goes."""
        self._exchange = self._make_exchange(replicated, link)
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
        self._announced = -1

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

    def run(self, step: int, render: Callable[[], Tensor], is_fence: Callable[[], bool]) -> Tensor:
        """Takes one step: read → render → backward → push → publish, and the start of the next unit's reading.

        Args:
            step: of the unit; one after the other.
            render: from :meth:`leaves` to this rank's loss; a scalar.
            is_fence: whether the next unit must not read anything before this one is published; asked once, when this
                one was received.

        Returns:
            The loss.
        """
        self.receive(step)
        fence = is_fence()
        self.announce(step)
        if not fence and self._exchange.plans_ahead:
            self._plan(step + 1)
        loss = render()
        self.settle()
        if not fence:
            self.begin(step + 1)
        # On this thread: to hand over to one of torch's takes the host as long as some launches.
        with self.timeline.span("compute", step, "backward"), torch.autograd.set_multithreading_enabled(False):
            loss.backward()
        self.publish()
        return loss

    def receive(self, step: int) -> None:
        """Publishes what the unit before has changed of this unit's rows, and reads and sends what was late."""
        self.begin(step)
        self._settle_first()
        unit, self._next = self._next, None
        assert unit is not None
        self._current = unit
        if unit.has_late:
            self._read_late(unit)
        if self._pushed is not None and self._pushed.pushes[0]:
            self._exchange.push(self._pushed, first=False)

    def _read_late(self, unit: Unit) -> None:
        with self.timeline.span("compute", unit.step, "late splats"):
            locks = unit.locks
            self.graph.early(locks)
            self.graph.late(locks)
            rest = locks.handed if unit.early is None else locks.handed - unit.early
            self._exchange.read(unit, rest, locks.stale if self.graph.policy.delays else None, "late splats")

    def announce(self, step: int) -> None:
        """Fixes the learning rates of a unit's step. Its rows were read: they have caught up with all steps before."""
        announce_all(self._model.optimizers)
        self._announced = step

    def leaves(self, step: int) -> list[Splats]:
        """Waits for the splats of this rank's views.

        Returns:
            For each view of this rank, in the order of the group, leaves in ascending order of id.
        """
        unit = self._current
        assert unit is not None and unit.step == step
        unit.leaves = self._exchange.leaves(unit)
        if self.timeline.records(step):
            self.contention.read(step, unit.scope, unit.locks.stale, unit.reads())
        return unit.leaves

    def settle(self) -> None:
        """Hook 3: publishes what was pushed, all of it."""
        self._settle_first()
        unit, self._pushed = self._pushed, None
        if unit is not None:
            found = self._exchange.gradients(unit, first=False)
            self._publish(unit, found)
            self._watch(unit, found)
            self._finish(unit)

    def begin(self, step: int) -> None:
        """Hook 1, before reading: admits a unit and, if another one is in flight, reads what is early."""
        if self._next is None:
            self._plan(step)
        unit = self._next
        assert unit is not None
        if unit.begun:
            return
        unit.begun, unit.locks = True, self.graph.admit(step, unit.scope)
        self.signal |= self._exchange.begin(unit, self._current)
        if unit.early is not None:
            with self.timeline.span("compute", step, "early splats"):
                unit.early = self.graph.early(unit.locks)
                self._exchange.read(unit, unit.early, None, "early splats")

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
        end_step(self._model.optimizers)
        self._push = self._exchange.push(unit, unit.pushes[0], self.request)
        self._pushed = unit
        if unit.wanted is None:
            self._settle_first()

    def close(self) -> None:
        """Ends the communication of this runner. All ranks, with no unit in flight."""
        self._exchange.close()

    def _plan(self, step: int) -> None:
        self._follow()
        group = self._datamanager.group(step)
        views = [self._datamanager.train_camera(int(view)) for view in group.views]
        cameras = [self._model.pinhole(camera, step) for camera in views]
        policy = self.graph.policy
        before = self._current if policy.overlaps else None
        pending = (self._current is not None) + (self._pushed is not None)
        self._next = self._exchange.plan(step, group.ranks.tolist(), cameras, before, policy, pending, self.request)

    def _settle_first(self) -> None:
        """Publishes the gradients that were pushed first, once."""
        unit = self._pushed
        if unit is None or not unit.pushes[0] or unit.locks.active is not None:
            return
        found = self._exchange.gradients(unit, first=True)
        self.signal |= self._push.signal
        self._publish(unit, found, unit.wanted)
        self._watch(unit, found)
        if unit.wanted is None:
            self._pushed = None
            self._finish(unit)

    def _publish(self, unit: Unit, found: RowGradients, among: Bitmap | None = None) -> None:
        """Publishes the active rows; the rest of the scope has a zero gradient and catches up when it is read again.

        Args:
            unit: whose gradients were found.
            found: those of some of its rows; the others' are zero.
            among: the rows in question; None: all that are left.
        """
        with self.timeline.span("compute", unit.step, "publish"):
            locks, policy, size = unit.locks, self.graph.policy, self.graph.num_rows
            if unit.dense:
                found = _with_dense(found, unit, unit.locks.unsettled if among is None else among)
            negligible = None
            if policy.delays:
                small = policy.negligible(found.values["means"].norm(dim=1), found.active)
                negligible = Bitmap.from_rows(found.rows, size, small)
            active = Bitmap.from_rows(found.rows, size, found.active)
            self.graph.backward(locks, active, negligible, among)
            chosen, meant = found.active, active
            if unit.postponed is not None:
                before, kept = unit.postponed
                self.graph.stage(locks, before.rows, before.values, kept)
            elif policy.delays and among is not None and self._next is not None:
                self.graph.late(self._next.locks)
                stale = self._next.locks.stale
                kept = stale.contains(found.rows) & chosen
                unit.postponed, chosen, meant = (found, kept), chosen & ~kept, active - stale
            self.graph.stage(locks, found.rows, found.values, chosen, meant)
            self.graph.publish(locks, last=among is None)

    def _watch(self, unit: Unit, found: RowGradients) -> None:
        if self._model.strategy.watches(unit.step):
            self._model.watch(found.statistics)
        if self.timeline.records(unit.step):
            for touched in found.written:
                self.contention.wrote(unit.step, touched)

    def _finish(self, unit: Unit) -> None:
        """Everything of a unit is published: keeps what was counted of it."""
        step, locks = unit.step, unit.locks
        if not self.timeline.records(step):
            return
        sizes, conflicts = counts_to_host(locks.sizes()), self.contention.finish(step)
        self.timeline.count(step, primitives=self._model.num_points, memory=peak_memory(self._model.device))

        def record() -> None:
            self.timeline.count(step, **vars(self.graph.counts(locks, sizes.get())))
            met = None if conflicts is None else conflicts()
            self.timeline.finish(step, met.as_replica(self._world.rank) if met and self._replicated else met)

        self.timeline.defer(step, record)

    def _follow(self) -> None:
        """Follows the model to other rows; of those that this rank had before it still knows the versions."""
        before, versions, ids = self._ids, self.graph.versions, self._model.ids
        if before is ids:
            return
        source, known = torch.full_like(ids, -1), versions.new_full((len(ids),), -1)
        if len(before):
            place = torch.searchsorted(before, ids).clamp_(max=len(before) - 1)
            source = torch.where(before[place] == ids, place, source)
            known = torch.where(source < 0, known, versions[place])
        self.graph.resize(len(ids), known)
        self.contention.resize(source)
        self._ids = ids

    def _commit(self, step: int, rows: Tensor, gradients: Mapping[str, Tensor], chosen: Tensor | None) -> None:
        take_rows(self._model.optimizers, rows, gradients, chosen, age=self._announced - step)

    def _make_exchange(self, replicated: bool, link: Link | None) -> UnitExchange:
        """The way in which rows and gradients travel here."""
        device = self._model.device
        if device.type != "cuda":
            exchange = SparseExchange if replicated else SplatExchange
            return exchange(self._model, Exchange(self._world, link, self._record), self.timeline)
        moved = DeviceExchange(self._world, self._record_marked, self.timeline.records, self.timeline.stopwatch)
        if kernels.available("splat_rows", device) and self._model.config.camera_optimizer.mode == "off":
            fused = FusedSparseExchange if replicated else FusedSplatExchange
            return fused(self._model, moved, self.timeline)
        return (SparseExchange if replicated else SplatExchange)(self._model, moved, self.timeline)

    def _record(self, transfer: Transfer) -> None:
        begin, end = int(transfer.start * 1e9), int(transfer.end * 1e9)
        self.timeline.add("communication", transfer.unit, begin, end, transfer.name)
        self._count_bytes(transfer)

    def _record_marked(self, transfer: DeviceTransfer) -> None:
        self.timeline.add_marked("communication", transfer.unit, transfer.begin, transfer.end, transfer.name)
        self._count_bytes(transfer)

    def _count_bytes(self, transfer: Transfer | DeviceTransfer) -> None:
        busier = max(transfer.sent, transfer.received)
        self.timeline.count(transfer.unit, bytes=transfer.sent, busier=busier)


def _with_dense(found: RowGradients, unit: Unit, among: Bitmap) -> RowGradients:
    """The gradients of all rows in ``among`` with those of regularisers added."""
    rows = among.rows()
    place = torch.searchsorted(rows, found.rows)
    values = {}
    for name, value in found.values.items():
        dense = unit.dense.get(name)
        values[name] = value.new_zeros(len(rows), *value.shape[1:]) if dense is None else dense[rows]
        values[name].index_add_(0, place, value)
    return replace(found, rows=rows, values=values, active=is_active(values))
