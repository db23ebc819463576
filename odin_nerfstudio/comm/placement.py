"""Which rank owns which primitive, and how primitives move when that changes (design §2, §3.1, §3.5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from odin_nerfstudio.comm.world import World, as_bytes
from odin_nerfstudio.plan.partition import Partition

TOLERANCE = 1.1
"""Shards are rebalanced when the largest exceeds the mean by this factor."""
SAMPLED_ROWS = 50_000
"""Positions, evenly thinned over all ranks, from which space is split; a rank's share of eight is then within 2 %."""


@dataclass(frozen=True)
class Shard:
    """Primitives with all that belongs to them: values, moments, the step they are up to date with, statistics."""

    ids: Tensor
    """(n,) int64 global ids, ascending."""
    rows: dict[str, Tensor]
    """(n, ...) each; ``means`` (n, 3) among them. Names and types are the same on all ranks."""

    def __len__(self) -> int:
        return len(self.ids)

    def select(self, index: Tensor) -> Shard:
        """The rows that ``index`` (a mask, or numbers in ascending order) names."""
        return Shard(self.ids[index], {name: row.detach()[index] for name, row in self.rows.items()})


class Placement:
    """Ownership by the cells of a KD-tree, one for each rank.

    Every method but :meth:`owner`, :meth:`keeps` and :meth:`shard` is called by all ranks together, at a fence.

    Args:
        world: the ranks.
        points: (N, 3) positions to split space by, the same on all ranks, such as the seed points.
    """

    def __init__(self, world: World, points: Tensor) -> None:
        self.world = world
        self.partition = _split(points[:: _stride(len(points))], world.size)

    def keeps(self, means: Tensor) -> Tensor:
        """(N, 3) positions of all primitives → (N,) bool: which of them this rank has."""
        return self.owner(means) == self.world.rank

    def owner(self, means: Tensor) -> Tensor:
        """(N, 3) positions → (N,) int64 the rank that owns what is there."""
        return torch.from_numpy(self.partition.owner(means.detach().cpu().numpy())).to(means.device)

    def shard(self, everything: Shard) -> Shard:
        """This rank's part of primitives that all ranks hold alike."""
        return everything.select(self.keeps(everything.rows["means"]))

    def rebalance(self, shard: Shard) -> Shard:
        """Splits space anew and moves every primitive to its owner, if the shards have become too unequal.

        Returns:
            This rank's new shard; the same object where nothing had to move.
        """
        counts = self._counts(len(shard))
        total = sum(counts)
        if max(counts) * self.world.size <= TOLERANCE * total:
            return shard
        means = shard.rows["means"].detach()
        partition = _split(self.world.all_gather_rows(means[:: _stride(total)]), self.world.size)
        owner = torch.from_numpy(partition.owner(means.cpu().numpy()))
        outgoing = torch.bincount(owner, minlength=self.world.size)
        table = self.world.all_gather_rows(outgoing[None].to(self.world.device)).cpu()
        # Primitives that no face separates cannot be balanced; then they need not move at every fence.
        if table.sum(0).max() >= max(counts):
            return shard
        self.partition = partition
        incoming = table[:, self.world.rank].tolist()
        order = owner.argsort(stable=True).to(means.device)
        ids = _all_to_all(shard.ids[order], outgoing.tolist(), incoming)
        ascending = ids.argsort()
        moved = {}
        for name, row in shard.rows.items():
            moved[name] = _all_to_all(row.detach()[order], outgoing.tolist(), incoming)[ascending]
        return Shard(ids[ascending], moved)

    def merge(self, shard: Shard) -> Shard | None:
        """All primitives in ascending order of id, on rank 0's CPU; None on the other ranks.

        What one rank holds of one tensor travels at a time, so no more than that is needed beside the result.
        """
        if self.world.size == 1:
            return Shard(shard.ids.cpu(), {name: row.detach().cpu() for name, row in shard.rows.items()})
        counts = self._counts(len(shard))
        ids = self._collect(shard.ids, counts, torch.arange(sum(counts)))
        order = ids.argsort()
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order))
        rows = {name: self._collect(row, counts, place) for name, row in shard.rows.items()}
        return Shard(ids[order], rows) if self.world.rank == 0 else None

    def scatter(self, everything: Shard | None) -> Shard:
        """Splits space by what rank 0 holds and gives every rank its shard: the inverse of :meth:`merge`.

        Args:
            everything: ids in ascending order, on rank 0; ignored on the others.

        Returns:
            The shard, on the world's device.
        """
        owner = torch.zeros(0, dtype=torch.int64)
        plan: Any = None
        if self.world.rank == 0:
            if everything is None:
                raise ValueError("rank 0 must hold what is scattered")
            means = everything.rows["means"]
            self.partition = _split(means[:: _stride(len(means))], self.world.size)
            owner = self.owner(means)
            kinds = {name: (row.dtype, row.shape[1:]) for name, row in everything.rows.items()}
            plan = self.partition, torch.bincount(owner, minlength=self.world.size).tolist(), kinds
        self.partition, counts, kinds = self.world.broadcast_object(plan)
        ids, rows = (everything.ids, everything.rows) if everything is not None else (torch.zeros(0), {})
        ids = self._deal(ids, owner, counts, torch.int64, ())
        return Shard(ids, {name: self._deal(rows.get(name, ids), owner, counts, *kind) for name, kind in kinds.items()})

    def _counts(self, count: int) -> list[int]:
        """``count`` of every rank."""
        return self.world.all_gather_rows(torch.tensor([count], device=self.world.device)).tolist()

    def _collect(self, row: Tensor, counts: list[int], place: Tensor) -> Tensor:
        """On rank 0, on the CPU: the ranks' rows, each where ``place`` says; (0, ...) on the others."""
        if self.world.rank > 0:
            _send(row.detach(), 0)
            return row.new_empty((0, *row.shape[1:]), device="cpu")
        collected = row.new_empty((sum(counts), *row.shape[1:]), device="cpu")
        for source, places in enumerate(place.split(counts)):
            if source == 0:
                collected[places] = row.detach().cpu()
            else:
                collected[places] = _receive(row.new_empty((len(places), *row.shape[1:])), source).cpu()
        return collected

    def _deal(
        self, row: Tensor, owner: Tensor, counts: list[int], dtype: torch.dtype, shape: tuple[int, ...]
    ) -> Tensor:
        """Rank 0's rows to their owners; (n, ...) on this rank's device."""
        if self.world.rank > 0:
            mine = torch.empty((counts[self.world.rank], *shape), dtype=dtype, device=self.world.device)
            return _receive(mine, 0)
        row = row.detach()
        for destination in range(1, self.world.size):
            _send(row[owner == destination].to(self.world.device), destination)
        return row[owner == 0].to(self.world.device)


def _stride(total: int) -> int:
    return max(total // SAMPLED_ROWS, 1)


def _split(points: Tensor, cells: int) -> Partition:
    return Partition.build(points.detach().cpu().numpy(), cells)


def _all_to_all(rows: Tensor, outgoing: list[int], incoming: list[int]) -> Tensor:
    """(Σ outgoing, ...) rows in order of destination → (Σ incoming, ...) in order of source."""
    arrived = rows.new_empty((sum(incoming), *rows.shape[1:]))
    if rows.shape[1:].numel():
        dist.all_to_all_single(as_bytes(arrived), as_bytes(rows), incoming, outgoing)
    return arrived


def _send(rows: Tensor, destination: int) -> None:
    _pass(dist.isend, rows.contiguous(), destination)


def _receive(rows: Tensor, source: int) -> Tensor:
    _pass(dist.irecv, rows, source)
    return rows


def _pass(operation: Any, rows: Tensor, peer: int) -> None:
    # As a batch, for which NCCL needs no communicator of the two ranks alone.
    for work in dist.batch_isend_irecv([dist.P2POp(operation, as_bytes(rows), peer)]) if rows.numel() else ():
        work.wait()
