"""Growing and pruning after Kerbl et al. 2023, §5.2, with gsplat 1.4.0's conditions, on shards."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from gsplat.strategy import DefaultStrategy
from gsplat.strategy.ops import reset_opa
from torch import Tensor

from odin_nerfstudio.draws import normal
from odin_nerfstudio.shadow.optimizer import catch_up_rows
from odin_nerfstudio.splat.densify.rowwise import logit, rotate, sigmoid
from odin_nerfstudio.splat.densify.shard import Shard
from odin_nerfstudio.splat.densify.statistics import SplatStatistics, add_up


@dataclass
class GrowAndPrune(DefaultStrategy):
    """gsplat's default strategy, on shards; :meth:`watch` gathers what it decides by.

    Of what the ranks know, the ids, mean gradients and kinds of the primitives that grow travel, at a fence only.
    """

    seed: int = 0
    """Seed of the positions that splits draw."""
    max_primitives: int | None = None
    """Growing stops at this many primitives of all ranks, those with the largest gradients first; None: no bound."""

    def is_fence(self, step: int) -> bool:
        """Whether ``step`` changes rows."""
        return self.watches(step) and (self._refines(step) or step % self.reset_every == 0)

    def watches(self, step: int) -> bool:
        """Whether the statistics of ``step`` are needed."""
        return step < self.refine_stop_iter

    def _refines(self, step: int) -> bool:
        paused = step % self.reset_every < self.pause_refine_after_reset
        return step > self.refine_start_iter and step % self.refine_every == 0 and not paused

    @torch.no_grad()
    def step_post_backward(self, shard: Shard, step: int) -> None:
        """Grows, prunes and resets opacities at fences, when the views of every step so far have been watched.

        Args:
            shard: rows of this rank; changed in place.
            step: of the run, the same on every rank.
        """
        if not self.is_fence(step):
            return
        self.watch(shard, [])
        catch_up_rows(shard.optimizers)
        if self._refines(step):
            before = shard.total
            grown = self._grow(shard, step)
            self._prune(shard, step)
            shard.count()
            if self.verbose:
                pruned = before + grown - shard.total
                print(f"Step {step}: {grown} GSs added, {pruned} pruned. Now having {shard.total} GSs.")
            for name in self._statistics():
                shard.state[name].zero_()
        if step % self.reset_every == 0:
            reset_opa(shard.params, dict(shard.optimizers), shard.state, self.prune_opa * 2)

    def _statistics(self) -> list[str]:
        return ["grad2d", "count", "radii"] if self.refine_scale2d_stop_iter > 0 else ["grad2d", "count"]

    @torch.no_grad()
    def watch(self, shard: Shard, views: list[SplatStatistics]) -> None:
        """Adds up, for each row, gradient lengths in normalised screen space and views; keeps the largest radius."""
        state = shard.state
        for name in self._statistics():
            if state[name] is None:
                state[name] = torch.zeros(len(shard), device=shard.ids.device)
        for view in views:
            add_up(view, *(state[name] for name in self._statistics()))

    def _grow(self, shard: Shard, step: int) -> int:
        """Copies small and splits large primitives with large gradients; returns by how many the ranks' rows grew.

        A parent's children get consecutive ids, its copy first, in the order of the parents' ids.
        """
        state, ids = shard.state, shard.ids
        grad = state["grad2d"] / state["count"].clamp_min(1)
        high = grad > self.grow_grad2d
        small = shard.scale().amax(dim=1) <= self.grow_scale3d * state["scene_scale"]
        copied, split = high & small, high & ~small
        if step < self.refine_scale2d_stop_iter:
            split |= state["radii"] > self.grow_scale2d
        children = copied.long() + 2 * split.long()

        rows = children.nonzero()[:, 0]
        parents, litters, grads = shard.gather_by_id(ids[rows], children[rows], grad[rows])
        growth = (litters + 1) // 2  # a split replaces its parent
        if self.max_primitives is not None:
            chosen = _largest(grads, growth, self.max_primitives - shard.total)
            parents, litters, growth = parents[chosen], litters[chosen], growth[chosen]
        first = shard.next_id + litters.cumsum(0) - litters
        shard.next_id += int(litters.sum())

        rows = rows[torch.isin(ids[rows], parents)]
        count = children[rows]
        source = rows.repeat_interleave(count)
        number = torch.arange(len(source), device=ids.device) - (count.cumsum(0) - count).repeat_interleave(count)
        born = first[torch.searchsorted(parents, ids[rows])].repeat_interleave(count) + number
        stays = torch.ones_like(split)
        stays[rows] = ~split[rows]
        kept = stays.nonzero()[:, 0]
        fresh = torch.arange(len(kept) + len(source), device=ids.device) >= len(kept)
        shard.select(torch.cat([kept, source]), torch.cat([ids[kept], born]), fresh)
        self._place_samples(shard, len(kept) + (number >= copied[source].long()).nonzero()[:, 0], step)
        return int(growth.sum())

    def _place_samples(self, shard: Shard, rows: Tensor, step: int) -> None:
        """Moves ``rows``, so far copies of primitives that split, to positions drawn from these, 1.6 times smaller."""
        params = shard.params
        scales, quats = params["scales"][rows], params["quats"][rows]
        draws = normal(self.seed, "split", step, shard.ids[rows], 3).to(scales)
        params["means"][rows] += rotate(quats, torch.exp(scales) * draws)
        params["scales"][rows] = scales - math.log(1.6)
        if self.revised_opacity:
            params["opacities"][rows] = logit(1 - torch.sqrt(1 - sigmoid(params["opacities"][rows])))

    def _prune(self, shard: Shard, step: int) -> None:
        """Removes primitives that are nearly transparent and, after the first reset of opacities, too large ones."""
        pruned = shard.opacity() < self.prune_opa
        if step > self.reset_every:
            pruned |= shard.scale().amax(dim=1) > self.prune_scale3d * shard.state["scene_scale"]
            if step < self.refine_scale2d_stop_iter:
                pruned |= shard.state["radii"] > self.prune_scale2d
        kept = (~pruned).nonzero()[:, 0]
        shard.select(kept, shard.ids[kept])


def _largest(grads: Tensor, growth: Tensor, room: int) -> Tensor:
    """(R,) bool: candidates by falling gradient, the first of equal ones first, as long as their growth fits."""
    order = torch.sort(grads, descending=True, stable=True).indices
    chosen = torch.zeros_like(grads, dtype=torch.bool)
    chosen[order] = growth[order].cumsum(0) <= room
    return chosen
