"""3DGS as Markov chain Monte Carlo (Kheradmand et al. 2024) with gsplat 1.4.0's schedule, in plain torch, on shards."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from gsplat.strategy import MCMCStrategy
from torch import Tensor

from odin_nerfstudio.draws import normal, uniform
from odin_nerfstudio.shadow.optimizer import catch_up_rows
from odin_nerfstudio.splat.densify.rowwise import conjugate, logit, rotate, sigmoid
from odin_nerfstudio.splat.densify.shard import Shard
from odin_nerfstudio.splat.densify.statistics import SplatStatistics

_MOST_COPIES = 51
"""Larger counts are treated as this one, as gsplat does."""


@dataclass
class MonteCarlo(MCMCStrategy):
    """gsplat's MCMC strategy. Its noise moves every row, so each step is a fence.

    Every ``refine_every`` steps the ids and opacities of all primitives travel (12 bytes each, twice), and nothing
    else: a primitive that is relocated or added is made by the rank that owns the one whose place it shares.
    """

    seed: int = 0
    """Seed of the noise and of the choice of rows."""
    absgrad: bool = False
    """MCMC needs no screen-space gradients."""

    def is_fence(self, step: int) -> bool:
        """Whether ``step`` changes rows: always."""
        return True

    def watches(self, step: int) -> bool:
        """Whether the statistics of ``step`` are needed: never."""
        return False

    def watch(self, shard: Shard, views: list[SplatStatistics]) -> None:
        """Nothing to remember of any view."""

    @torch.no_grad()
    def step_post_backward(self, shard: Shard, step: int) -> None:
        """Relocates dead primitives and adds new ones every ``refine_every`` steps, then lets the positions diffuse.

        Args:
            shard: rows of this rank; changed in place.
            step: of the run, the same on every rank.
        """
        catch_up_rows(shard.optimizers)
        if self.refine_start_iter < step < self.refine_stop_iter and step % self.refine_every == 0:
            relocated, added = self._relocate(shard, step), self._add(shard, step)
            if self.verbose:
                print(f"Step {step}: {relocated} GSs relocated, {added} added. Now having {shard.total} GSs.")
        self._diffuse(shard, step)

    def _relocate(self, shard: Shard, step: int) -> int:
        """Moves dead primitives onto living ones drawn in proportion to opacity; returns how many."""
        ids, opacity = shard.gather_by_id(shard.ids, shard.opacity())
        alive = opacity > self.min_opacity
        dead = ids[~alive]
        if not len(dead) or len(dead) == len(ids):
            return 0
        draws = uniform(self.seed, "relocate", step, dead, 1)[:, 0]
        self._share(shard, ids[alive][_sample(opacity[alive], draws)], dead)
        return len(dead)

    def _add(self, shard: Shard, step: int) -> int:
        """Adds primitives to places drawn in proportion to opacity; returns how many."""
        ids, opacity = shard.gather_by_id(shard.ids, shard.opacity())
        count = max(0, min(self.cap_max, int(1.05 * len(ids))) - len(ids))
        if count:
            born = torch.arange(shard.next_id, shard.next_id + count, device=ids.device)
            draws = uniform(self.seed, "add", step, born, 1)[:, 0]
            self._share(shard, ids[_sample(opacity, draws).sort().values], born)
            shard.next_id += count
            shard.total += count
        return count

    def _share(self, shard: Shard, sources: Tensor, children: Tensor) -> None:
        """Lets the primitive ``children[i]`` share the place of ``sources[i]``; both forget their moments.

        Args:
            shard: rows of this rank.
            sources: (C,) int64 ids that exist, on any rank; they may repeat.
            children: (C,) int64 ids, all different: new ones, or existing ones that leave their old place.
        """
        ids, params = shard.ids, shard.params
        parents, copies = torch.unique(sources, return_counts=True)
        here = torch.isin(parents, ids)
        rows = torch.searchsorted(ids, parents[here])
        opacity, scale = relocated_shape(shard.opacity()[rows], shard.scale()[rows], copies[here] + 1)
        opacity = opacity.clamp(self.min_opacity, 1 - torch.finfo(opacity.dtype).eps)
        params["opacities"][rows] = logit(opacity)[:, None]
        params["scales"][rows] = torch.log(scale)

        kept = (~torch.isin(ids, children)).nonzero()[:, 0]
        mine = torch.isin(sources, ids)
        source = torch.cat([kept, torch.searchsorted(ids, sources[mine])])
        names, order = torch.cat([ids[kept], children[mine]]).sort()
        shard.select(source[order], names, torch.isin(ids[source[order]], parents))

    def _diffuse(self, shard: Shard, step: int) -> None:
        """Adds noise with each primitive's covariance, damped for opaque ones (Kheradmand et al. 2024, eq. 8)."""
        means, quats = shard.params["means"], shard.params["quats"]
        scaler = shard.optimizers["means"].param_groups[0]["lr"] * self.noise_lr
        damping = sigmoid(-100 * (shard.opacity() - 0.005))[:, None]
        noise = normal(self.seed, "noise", step, shard.ids, 3).to(means) * damping * scaler
        scale = shard.scale()
        means.add_(rotate(quats, scale * scale * rotate(conjugate(quats), noise)))


def relocated_shape(opacity: Tensor, scale: Tensor, copies: Tensor) -> tuple[Tensor, Tensor]:
    """Opacity and scale of each of n primitives that together look like one (Kheradmand et al. 2024, eq. 9).

    The paper's double sum is Σⱼ C(n, j) (−1)ʲ⁺¹ oʲ / √j over j = 1…n, since Σᵢ C(i − 1, j − 1) = C(n, j).

    Args:
        opacity: (R,) of the one.
        scale: (R, 3) standard deviations of the one.
        copies: (R,) int64, n ≥ 1; counts beyond 51 are treated as 51, as gsplat does.

    Returns:
        (R,) opacities and (R, 3) scales.
    """
    n = copies.clamp(1, _MOST_COPIES).double()
    one = opacity.double().clamp_max(1 - torch.finfo(torch.float32).eps)
    each = -torch.expm1(torch.log1p(-one) / n)
    term, denominator = torch.full_like(each, -1), torch.zeros_like(each)
    for j in range(1, _MOST_COPIES + 1):
        term = -term * each * (n - j + 1) / j
        denominator += term / j**0.5
    return each.to(opacity.dtype), ((one / denominator)[:, None] * scale).to(scale.dtype)


def _sample(weights: Tensor, draws: Tensor) -> Tensor:
    """(C,) indices in proportion to ``weights`` (R,), each at most 1, by ``draws`` (C,) from [0, 1).

    Sums are of integers (units of 2⁻³²), hence the same on every device.
    """
    cumulative = (weights.double() * 2**32).long().cumsum(0)
    at = (draws * cumulative[-1]).long().clamp_max(cumulative[-1] - 1)
    return torch.searchsorted(cumulative, at, right=True)
