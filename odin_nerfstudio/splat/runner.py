"""Runs task units: read, send, render, push, publish, over the shards of all ranks (design §3.1).

A rank plays two parts. As an *owner* it reads rows of its shard, projects them for every view of a group and sends the
splats to the ranks that render; later it takes their gradients back and steps its rows. As a *renderer* it merges the
splats of all owners into the leaves of its own graph. What is sent for the next unit before the current one is
published are the rows that the current one cannot change; the order of arrival never shows in the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from odin_nerfstudio.comm.exchange import Exchange, Job, Link, Transfer
from odin_nerfstudio.comm.splat_block import SplatBlock, SplatGradBlock
from odin_nerfstudio.comm.world import World
from odin_nerfstudio.shadow.graph import ShadowGraph
from odin_nerfstudio.shadow.policy import Quality
from odin_nerfstudio.shadow.timeline import Timeline
from odin_nerfstudio.shadow.unit import TaskUnit as ShadowUnit
from odin_nerfstudio.splat.datamanager import OdinDataManager
from odin_nerfstudio.splat.densify import SplatStatistics, catch_up
from odin_nerfstudio.splat.model import OdinSplatfactoModel
from odin_nerfstudio.splat.raster import PinholeCamera, Rows, Splats

DIFFERENTIATED = ("means2d", "depths", "conics", "opacities", "colors")
"""Fields of a splat that have a gradient."""


@dataclass
class Part:
    """Rows of a unit that an owner read together, and what it made of them."""

    rows: Tensor
    """(R,) int64 rows of the shard, ascending."""
    values: Rows
    """Copies of the rows, leaves of the projection's graph: a publication cannot change them."""
    splats: list[Splats]
    """For each view of the group."""
    job: Job
    """The exchange in which these splats left, and those of all owners for this rank's views arrive."""


@dataclass
class Unit:
    """One group on one rank."""

    step: int
    """The optimizer step."""
    ranks: list[int]
    """The rank that renders each view of the group."""
    cameras: list[PinholeCamera]
    """The camera of each view."""
    locks: ShadowUnit
    """What the Shadow Graph knows of it: its scope, and what it has read and published."""
    parts: list[Part] = field(default_factory=list)
    """Early rows, then late ones."""
    leaves: list[Splats] = field(default_factory=list)
    """Splats of the views that this rank renders."""
    order: Tensor | None = None
    """(M,) where each splat of the leaves, one after the other, lay among those that arrived."""

    def views_of(self, rank: int) -> list[int]:
        """Numbers within the group of the views that a rank renders."""
        return [view for view, renderer in enumerate(self.ranks) if renderer == rank]


class UnitRunner:
    """Owner and renderer of one rank.

    Args:
        model: the shard, its optimizers and the renderer.
        datamanager: the schedule and the cameras.
        world: the ranks.
        policy: what may be read while another unit is in flight.
        link: a slower network to imitate.
    """

    def __init__(
        self,
        model: OdinSplatfactoModel,
        datamanager: OdinDataManager,
        world: World,
        policy: Quality,
        link: Link | None = None,
    ) -> None:
        self._model = model
        self._datamanager = datamanager
        self._world = world
        self._exchange = Exchange(world, link, self._record)
        self.timeline = Timeline(world.rank)
        """Where the time of this rank goes."""
        self.graph = ShadowGraph(model.num_points, self._commit, policy, model.device)
        self._next: Unit | None = None
        self._current: Unit | None = None

    @property
    def is_drained(self) -> bool:
        """Whether no unit is in flight, so that rows may change or move."""
        return self._next is None and self._current is None

    def begin(self, step: int) -> None:
        """Hook 1, before reading: finds the scope of a unit and, if another one is in flight, sends what is early."""
        if self._next is not None:
            return
        if self.graph.num_rows != self._model.num_points:
            self.graph.resize(self._model.num_points)
        group = self._datamanager.plan.schedule.group(step)
        views = [self._datamanager.train_camera(int(view)) for view in group.views]
        cameras = [self._model.pinhole(camera, step) for camera in views]
        locks = self.graph.admit(step, self._model.scope(cameras, step))
        self._next = Unit(step, group.ranks.tolist(), cameras, locks)
        if locks.producer is not None:
            early = self.graph.early(locks)
            catch_up(self._model.optimizers, early)
            self._send(self._next, early, "early splats")

    def receive(self, step: int) -> list[Splats]:
        """Sends what was late and waits for the splats of this rank's views.

        Returns:
            For each view of this rank, in the order of the group, leaves in ascending order of id.
        """
        self.begin(step)
        unit, self._next = self._next, None
        assert unit is not None
        self._current = unit
        with self.timeline.span("compute", step, "late splats"):
            rest = torch.cat([self.graph.early(unit.locks), self.graph.late(unit.locks)]).sort().values
            catch_up(self._model.optimizers, rest)
            self._send(unit, rest, "late splats")
        with self.timeline.span("wait", step, "splats"):
            arrived = torch.cat([block for part in unit.parts for block in self._exchange.wait(part.job)])
        with self.timeline.span("compute", step, "merge"):
            views, unit.order = _by_view(arrived, len(unit.ranks))
            for view in unit.views_of(self._world.rank):
                for name in DIFFERENTIATED:
                    getattr(views[view], name).requires_grad_()
                unit.leaves.append(views[view])
        self.timeline.count(step, **vars(unit.locks.counts))
        return unit.leaves

    @torch.no_grad()
    def look(self, cameras: Sequence[PinholeCamera], ranks: Sequence[int]) -> list[Splats]:
        """Splats of views outside training units, such as those of an evaluation. All ranks call it together.

        Args:
            cameras: of the views.
            ranks: which of them renders each.

        Returns:
            For each view of this rank, in order.
        """
        step, model = self._model.step, self._model
        rows = model.scope(cameras, step)
        catch_up(model.optimizers, rows)
        splats = self._project(rows, cameras, step)[1]
        blocks = [_pack(splats, [v for v, r in enumerate(ranks) if r == rank]) for rank in range(self._world.size)]
        arrived = torch.cat(self._exchange.wait(self._exchange.all_to_all(blocks, "evaluation", step)))
        views, _ = _by_view(arrived, len(ranks))
        return [views[view] for view, rank in enumerate(ranks) if rank == self._world.rank]

    def publish(self) -> list[SplatStatistics]:
        """Hooks 2 and 3: pushes the gradients of this rank's splats to their owners, takes those of its own rows, and
        steps them.

        Returns:
            For each view of the group, what its backward says about rows of this shard.
        """
        unit, self._current = self._current, None
        assert unit is not None
        returned = self._push(unit)
        with self.timeline.span("compute", unit.step, "publish"):
            return self._publish(unit, returned)

    def _publish(self, unit: Unit, returned: list[Iterator[Tensor]]) -> list[SplatStatistics]:
        statistics = []
        for view, (rank, camera) in enumerate(zip(unit.ranks, unit.cameras, strict=True)):
            seen = []
            for part in unit.parts:
                splats, gradients = part.splats[view], SplatGradBlock.unpack(next(returned[rank]))
                if len(splats.ids):
                    torch.autograd.backward(
                        [getattr(splats, name) for name in DIFFERENTIATED],
                        [getattr(gradients, name) for name in DIFFERENTIATED],
                        retain_graph=camera.viewmat.requires_grad,
                    )
                grad2d = gradients.absgrad if self._model.strategy.absgrad else gradients.means2d
                seen.append((part.rows[splats.index], grad2d, splats.radii))
            index, grad2d, radii = (torch.cat(each) for each in zip(*seen, strict=True))
            statistics.append(SplatStatistics(index, grad2d, radii, camera.width, camera.height, views=len(unit.ranks)))
        self._step(unit)
        return statistics

    def _send(self, unit: Unit, rows: Tensor, name: str) -> None:
        """Reads rows as they are and sends their splats of every view to the rank that renders it."""
        values, splats = self._project(rows, unit.cameras, unit.step)
        blocks = [_pack(splats, unit.views_of(rank)) for rank in range(self._world.size)]
        unit.parts.append(Part(rows, values, splats, self._exchange.all_to_all(blocks, name, unit.step)))

    def _project(self, rows: Tensor, cameras: Sequence[PinholeCamera], step: int) -> tuple[Rows, list[Splats]]:
        model = self._model
        params = model.gauss_params.items()
        values = Rows(model.ids[rows], **{k: p.detach().index_select(0, rows).requires_grad_() for k, p in params})
        settings = model.raster_settings(step)
        return values, [model.rasterizer.project(values, camera, settings) for camera in cameras]

    def _record(self, transfer: Transfer) -> None:
        begin, end = int(transfer.start * 1e9), int(transfer.end * 1e9)
        self.timeline.add("communication", transfer.unit, begin, end, transfer.name)
        self.timeline.count(transfer.unit, bytes=transfer.sent)

    def _push(self, unit: Unit) -> list[Iterator[Tensor]]:
        """Returns the gradients of the leaves to their owners.

        Returns:
            From each rank, the gradients of its views, and of each view those of early and late splats.
        """
        assert unit.order is not None
        gradients = torch.cat([torch.empty(0, 12, device=unit.order.device), *map(_pack_gradients, unit.leaves)])
        arrival = torch.empty_like(gradients)
        arrival[unit.order] = gradients
        arrived = [block for part in unit.parts for block in self._exchange.wait(part.job)]
        blocks = arrival.split([len(block) for block in arrived])
        size = self._world.size
        job = self._exchange.all_to_all(
            [torch.cat(blocks[rank::size]) for rank in range(size)], "splat gradients", unit.step
        )
        with self.timeline.span("wait", unit.step, "splat gradients"):
            returned = self._exchange.wait(job)
        readers = []
        for rank, block in enumerate(returned):
            views = unit.views_of(rank)
            pieces = block.split([len(part.splats[view].ids) for part in unit.parts for view in views])
            readers.append(
                iter([pieces[p * len(views) + v] for v in range(len(views)) for p in range(len(unit.parts))])
            )
        return readers

    def _step(self, unit: Unit) -> None:
        """Publishes the active rows; the rest of the scope has a zero gradient and catches up when it is read again."""
        rows = torch.cat([part.rows for part in unit.parts])
        order = torch.argsort(rows)
        rows = rows[order]
        gradients, active = {}, torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
        for name, param in self._model.gauss_params.items():
            values = [getattr(part.values, name) for part in unit.parts]
            gradient = torch.cat([torch.zeros_like(v) if v.grad is None else v.grad for v in values])[order]
            if param.grad is not None:  # a regulariser's, over every row
                gradient, param.grad = gradient + param.grad[rows], None
            gradients[name] = gradient
            active |= (gradient.flatten(1) != 0).any(dim=1)
        delays = self.graph.policy.delays
        magnitudes = gradients["means"][active].norm(dim=1) if delays else None
        self.graph.backward(unit.locks, rows[active], magnitudes)
        if delays and self._next is not None:
            self._read_ahead(self._next)
        self.graph.stage(unit.locks, {name: gradient[active] for name, gradient in gradients.items()})
        self.graph.publish(unit.locks)

    def _read_ahead(self, unit: Unit) -> None:
        """Sends what the backward has freed, and rows that the policy reads before they are published.

        The latter are read as they are: the step that they are about to take must not be taken for a missed one.
        """
        freed = self.graph.early(unit.locks)
        catch_up(self._model.optimizers, freed)
        self._send(unit, torch.cat([freed, self.graph.late(unit.locks)]).sort().values, "delayed splats")

    def _commit(self, step: int, rows: Tensor, gradients: Mapping[str, Tensor]) -> None:
        for name, param in self._model.gauss_params.items():
            param.grad = torch.sparse_coo_tensor(
                rows[None], gradients[name], param.shape, is_coalesced=True, check_invariants=False
            )
            self._model.optimizers[name].step()
            param.grad = None


def _by_view(arrived: Tensor, views: int) -> tuple[list[Splats], Tensor]:
    """What arrived ((M, 14), in any order) as the splats of each view in ascending order of id, and the order taken."""
    block, slots = SplatBlock.unpack(arrived[:, :-1]), arrived[:, -1].long()
    by_id = torch.argsort(block.ids, stable=True)
    order = by_id[torch.argsort(slots[by_id], stable=True)]
    counts = torch.bincount(slots, minlength=views).tolist()
    splats = []
    for chosen in order.split(counts):
        fields = {name: getattr(block, name)[chosen] for name in DIFFERENTIATED}
        splats.append(Splats(ids=block.ids[chosen], index=chosen, radii=block.radii[chosen], **fields))
    return splats, order


@torch.no_grad()
def _pack(splats: Sequence[Splats], views: Sequence[int]) -> Tensor:
    """(M, 14): splats of some views of a group, one view after the other; the last column is the view's number."""
    packed = [torch.empty(0, 14, device=splats[0].means2d.device)]
    for view in views:
        block = SplatBlock(**{name: getattr(splats[view], name) for name in SplatBlock._fields}).pack()
        packed.append(torch.nn.functional.pad(block, (0, 1), value=view))
    return torch.cat(packed)


def _pack_gradients(leaves: Splats) -> Tensor:
    """(M, 12) gradients of one view's leaves, zero where the image does not depend on them."""
    grads = {
        name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        for name, leaf in ((name, getattr(leaves, name)) for name in DIFFERENTIATED)
    }
    absgrad = torch.zeros_like(leaves.means2d) if leaves.absgrad is None else leaves.absgrad
    return SplatGradBlock(**grads, absgrad=absgrad).pack()
