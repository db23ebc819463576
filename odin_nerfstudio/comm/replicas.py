"""The placement in which every rank has every primitive (design §3.2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from odin_nerfstudio.comm.placement import Shard
from odin_nerfstudio.comm.world import World


@dataclass(frozen=True)
class Replicas:
    """What :class:`~odin_nerfstudio.comm.placement.Placement` is for shards. Nothing ever moves."""

    world: World

    def keeps(self, means: Tensor) -> Tensor:
        """(N, 3) positions of all primitives → (N,) bool: all of them."""
        return torch.ones(len(means), dtype=torch.bool, device=means.device)

    def shard(self, everything: Shard) -> Shard:
        """All primitives."""
        return everything

    def rebalance(self, shard: Shard) -> Shard:
        """The same: there is nothing to balance."""
        return shard

    def merge(self, shard: Shard) -> Shard | None:
        """All primitives, on rank 0's CPU; None on the other ranks."""
        if self.world.rank > 0:
            return None
        return Shard(shard.ids.cpu(), {name: row.detach().cpu() for name, row in shard.rows.items()})
