"""gsplat's densification strategies, fed from splat gradients and free of CUDA.

Both replace rows of parameters and of optimizer state, so they are fences: every row is caught up before they run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from gsplat.strategy import DefaultStrategy, MCMCStrategy
from gsplat.strategy.ops import _update_param_with_optimizer
from gsplat.utils import normalized_quat_to_rotmat
from torch import Tensor
from torch.nn import Parameter

from odin_nerfstudio.shadow.optimizer import LazyAdam
from odin_nerfstudio.splat.draws import keyed_generator

Params = torch.nn.ParameterDict
Optimizers = Mapping[str, torch.optim.Optimizer]


@dataclass(frozen=True)
class SplatStatistics:
    """What the backward of one view says about its splats."""

    index: Tensor
    """(M,) int64 rows."""
    grad2d: Tensor
    """(M, 2) gradient with respect to the splats' centres in pixels; summed absolute values for absgrad."""
    radii: Tensor
    """(M,) screen radii in pixels."""
    width: int
    """Image width in pixels."""
    height: int
    """Image height in pixels."""


def catch_up(optimizers: Optimizers, rows: Tensor | None = None) -> None:
    """Brings ``rows`` (None: all) of every lazy optimizer up to date."""
    for optimizer in optimizers.values():
        if isinstance(optimizer, LazyAdam):
            optimizer.catch_up(rows)


@dataclass
class GrowAndPrune(DefaultStrategy):
    """gsplat's default strategy (Kerbl et al. 2023, §5.2), given a list of :class:`SplatStatistics` as ``info``."""

    seed: int = 0
    """Seed of the positions that splits draw."""

    def is_fence(self, step: int) -> bool:
        """Whether ``step`` changes rows."""
        if step >= self.refine_stop_iter:
            return False
        refines = step > self.refine_start_iter and step % self.refine_every == 0
        return step % self.reset_every == 0 or (refines and step % self.reset_every >= self.pause_refine_after_reset)

    def step_post_backward(
        self,
        params: Params,
        optimizers: Optimizers,
        state: dict[str, Any],
        step: int,
        info: list[SplatStatistics],
        packed: bool = True,
    ) -> None:
        """Gathers statistics every step; grows, prunes and resets opacities at fences."""
        if not self.is_fence(step):
            return super().step_post_backward(params, optimizers, state, step, info, packed)
        catch_up(optimizers)
        with _global_draws(params, keyed_generator(self.seed, "refine", step)):
            super().step_post_backward(params, optimizers, state, step, info, packed)

    def _update_state(
        self, params: Params, state: dict[str, Any], info: list[SplatStatistics], packed: bool = True
    ) -> None:
        for view in info:
            # gsplat reads the gradient from an attribute of the tensor it differentiated.
            means2d = torch.empty_like(view.grad2d)
            means2d.absgrad = means2d.grad = view.grad2d  # type: ignore[attr-defined]
            described = {
                "means2d": means2d,
                "gaussian_ids": view.index,
                "radii": view.radii,
                "width": view.width,
                "height": view.height,
                "n_cameras": len(info),
            }
            super()._update_state(params, state, described, packed=True)


@dataclass
class MonteCarlo(MCMCStrategy):
    """gsplat's MCMC strategy (Kheradmand et al. 2024) in plain torch.

    Its noise moves every row, so each step is a fence.
    """

    seed: int = 0
    """Seed of the noise and of the choice of rows."""
    absgrad: bool = False
    """MCMC needs no screen-space gradients."""

    def is_fence(self, step: int) -> bool:
        """Whether ``step`` changes rows: its noise always does."""
        return True

    def step_post_backward(
        self,
        params: Params,
        optimizers: Optimizers,
        state: dict[str, Any],
        step: int,
        info: list[SplatStatistics],
        packed: bool = True,
    ) -> None:
        """Relocates dead rows and adds new ones every ``refine_every`` steps, then lets the positions diffuse."""
        catch_up(optimizers)
        generator = keyed_generator(self.seed, "mcmc", step)
        if self.refine_start_iter < step < self.refine_stop_iter and step % self.refine_every == 0:
            relocated = _relocate(params, optimizers, self.min_opacity, generator)
            target = min(self.cap_max, int(1.05 * len(params["means"])))
            added = _add(params, optimizers, max(0, target - len(params["means"])), self.min_opacity, generator)
            if self.verbose:
                print(f"Step {step}: {relocated} GSs relocated, {added} added. Now having {len(params['means'])} GSs.")
        lr = optimizers["means"].param_groups[0]["lr"]
        _diffuse(params, lr * self.noise_lr, generator)


class _global_draws:
    """Lets code that draws from torch's global generators draw from ``generator``, and restores them after."""

    def __init__(self, params: Params, generator: torch.Generator) -> None:
        device = params["means"].device
        self._fork = torch.random.fork_rng([device] if device.type == "cuda" else [])
        self._seed = generator.initial_seed()

    def __enter__(self) -> None:
        self._fork.__enter__()
        torch.manual_seed(self._seed)

    def __exit__(self, *error: Any) -> None:
        self._fork.__exit__(*error)


def relocated_shape(opacity: Tensor, scale: Tensor, copies: Tensor) -> tuple[Tensor, Tensor]:
    """Opacity and scale of each of n primitives that together look like one (Kheradmand et al. 2024, eq. 9).

    Args:
        opacity: (R,) of the one.
        scale: (R, 3) standard deviations of the one.
        copies: (R,) int64, n ≥ 1; counts beyond 51 are treated as 51, as gsplat does.

    Returns:
        (R,) opacities and (R, 3) scales.
    """
    n = copies.clamp(1, 51)
    new_opacity = 1 - (1 - opacity.double()) ** (1 / n)
    denominator = torch.zeros_like(new_opacity)
    for i in range(1, int(n.max()) + 1):
        terms = sum(math.comb(i - 1, k) * (-1) ** k / math.sqrt(k + 1) * new_opacity ** (k + 1) for k in range(i))
        denominator += torch.where(i <= n, terms, 0)
    new_scale = (opacity.double() / denominator)[:, None] * scale
    return new_opacity.to(opacity.dtype), new_scale.to(scale.dtype)


@torch.no_grad()
def _relocate(params: Params, optimizers: Optimizers, min_opacity: float, generator: torch.Generator) -> int:
    """Moves rows below ``min_opacity`` onto rows drawn in proportion to opacity; returns how many."""
    opacity = torch.sigmoid(params["opacities"].flatten())
    dead, alive = (opacity <= min_opacity).nonzero()[:, 0], (opacity > min_opacity).nonzero()[:, 0]
    if not len(dead) or not len(alive):
        return 0
    source = alive[_sample(opacity[alive], len(dead), generator)]
    _share(params, optimizers, source, dead, min_opacity)
    return len(dead)


@torch.no_grad()
def _add(params: Params, optimizers: Optimizers, count: int, min_opacity: float, generator: torch.Generator) -> int:
    """Adds ``count`` rows, each sharing the place of a row drawn in proportion to opacity; returns how many."""
    if count:
        source = _sample(torch.sigmoid(params["opacities"].flatten()), count, generator)
        _share(params, optimizers, source, None, min_opacity)
    return count


def _share(params: Params, optimizers: Optimizers, source: Tensor, target: Tensor | None, min_opacity: float) -> None:
    """Lets row ``target[i]`` (None: a new row) share the place of row ``source[i]``; both forget their moments."""
    opacity = torch.sigmoid(params["opacities"].flatten())[source]
    copies = torch.bincount(source, minlength=len(params["means"]))[source] + 1
    opacity, scale = relocated_shape(opacity, torch.exp(params["scales"][source]), copies)
    opacity = opacity.clamp(min_opacity, 1 - torch.finfo(opacity.dtype).eps)

    def values(name: str, param: Tensor) -> Parameter:
        new = param.detach().clone()
        if name == "opacities":
            new[source] = torch.logit(opacity)[:, None]
        elif name == "scales":
            new[source] = torch.log(scale)
        if target is None:
            return Parameter(torch.cat([new, new[source]]))
        new[target] = new[source]
        return Parameter(new)

    def moments(_: str, state: Tensor) -> Tensor:
        state[source] = 0
        if target is None:
            return torch.cat([state, state.new_zeros((len(source), *state.shape[1:]))])
        state[target] = 0
        return state

    _update_param_with_optimizer(values, moments, params, dict(optimizers), names=list(params.keys()))


@torch.no_grad()
def _diffuse(params: Params, scaler: float, generator: torch.Generator) -> None:
    """Adds noise with each primitive's covariance, damped for opaque ones (Kheradmand et al. 2024, eq. 8)."""
    damping = torch.sigmoid(-100 * (torch.sigmoid(params["opacities"]) - 0.005))
    noise = torch.randn(params["means"].shape, generator=generator).to(params["means"].device) * damping * scaler
    rotation = normalized_quat_to_rotmat(torch.nn.functional.normalize(params["quats"], dim=-1))
    variances = torch.exp(2 * params["scales"])
    local = variances * torch.einsum("nji,nj->ni", rotation, noise)
    params["means"].add_(torch.einsum("nij,nj->ni", rotation, local))


def _sample(weights: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """(count,) indices drawn with replacement in proportion to ``weights``, any number of them."""
    cumulative = weights.double().cumsum(0)
    draws = torch.rand(count, dtype=torch.float64, generator=generator).to(weights.device) * cumulative[-1]
    return torch.searchsorted(cumulative, draws, right=True).clamp_max(len(weights) - 1)
