"""Strategies on the CPU: what they change, what they must not, and that their draws repeat."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import Parameter, ParameterDict

from odin_nerfstudio.shadow.optimizer import LazyAdam
from odin_nerfstudio.splat.densify import GrowAndPrune, MonteCarlo, Shard, SplatStatistics, relocated_shape

N = 60


def scene(seed: int = 0) -> tuple[ParameterDict, dict[str, torch.optim.Optimizer]]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Parameter:
        return Parameter(torch.randn(*shape, generator=generator))

    params = ParameterDict(
        {
            "means": draw(N, 3),
            "scales": Parameter(draw(N, 3).detach() * 0.3 - 3),
            "quats": draw(N, 4),
            "features_dc": draw(N, 3),
            "features_rest": draw(N, 15, 3),
            "opacities": draw(N, 1),
        }
    )
    optimizers: dict[str, torch.optim.Optimizer] = {k: LazyAdam([p], lr=1e-2) for k, p in params.items()}
    step_all(params, optimizers, generator)
    return params, optimizers


def step_all(params: ParameterDict, optimizers: dict[str, torch.optim.Optimizer], generator: torch.Generator) -> None:
    """A few steps on a few rows, so that moments exist and some rows are late."""
    for _ in range(3):
        rows = torch.randperm(N, generator=generator)[: N // 3].sort().values
        for name, param in params.items():
            values = torch.randn(len(rows), *param.shape[1:], generator=generator)
            param.grad = torch.sparse_coo_tensor(
                rows[None], values, param.shape, is_coalesced=True, check_invariants=False
            )
            optimizers[name].step()


def whole(params: ParameterDict, optimizers: dict[str, torch.optim.Optimizer], state: dict[str, Any]) -> Shard:
    """The shard of a rank that has all the rows, not densified yet."""
    count = len(params["means"])
    return Shard(params, optimizers, state, torch.arange(count), count, count)


def statistics(count: int = N, seed: int = 1, views: int = 1) -> list[SplatStatistics]:
    generator = torch.Generator().manual_seed(seed)
    grad = torch.rand(count, 2, generator=generator) * 1e-3
    return [SplatStatistics(torch.arange(count), grad, torch.full((count,), 5, dtype=torch.int32), 100, 80, views)]


def check_consistent(params: ParameterDict, optimizers: dict[str, torch.optim.Optimizer]) -> None:
    """Parameters, moments and steps have as many rows as each other, and the optimizer still steps."""
    count = len(params["means"])
    for name, param in params.items():
        (owned,) = optimizers[name].param_groups[0]["params"]
        assert owned is param
        assert len(param) == count
        for key in ("exp_avg", "exp_avg_sq", "row_step"):
            assert len(optimizers[name].state[param][key]) == count
        param.grad = torch.ones_like(param)
        optimizers[name].step()
        assert torch.isfinite(param).all()


def test_growing_repeats_with_its_seed_and_leaves_the_global_generator_alone() -> None:
    results = []
    for seed in (0, 0, 1):
        params, optimizers = scene()
        strategy = GrowAndPrune(
            refine_start_iter=1, refine_every=2, grow_grad2d=1e-2, grow_scale3d=0.05, absgrad=True, seed=seed
        )
        state = strategy.initialize_state()
        torch.manual_seed(len(results))
        expected = torch.rand(1)
        torch.manual_seed(len(results))
        for _ in range(2):
            strategy.watch(whole(params, optimizers, state), statistics())
        strategy.step_post_backward(whole(params, optimizers, state), 2)
        assert torch.equal(torch.rand(1), expected)
        assert len(params["means"]) > N
        results.append(params["means"].detach().clone())
        check_consistent(params, optimizers)
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_late_rows_are_caught_up_before_they_are_copied() -> None:
    params, optimizers = scene()
    expected, others = scene()
    for optimizer in others.values():
        optimizer.catch_up()  # type: ignore[attr-defined]
    strategy = GrowAndPrune(refine_start_iter=1, refine_every=2, prune_opa=0.4, grow_grad2d=1e9, absgrad=True)
    state = strategy.initialize_state()
    strategy.watch(whole(params, optimizers, state), statistics())
    strategy.step_post_backward(whole(params, optimizers, state), 2)
    kept = torch.sigmoid(expected["opacities"].flatten()) >= 0.4
    assert 0 < kept.sum() < N
    for name in params:
        assert torch.equal(params[name], expected[name][kept])


def test_pause_after_reset_does_not_depend_on_the_number_of_images() -> None:
    strategy = GrowAndPrune(reset_every=3000, refine_every=100, refine_start_iter=500, pause_refine_after_reset=200)
    fences = [step for step in range(3001, 6000) if strategy.is_fence(step)]
    assert fences[0] == 3200
    assert len(fences) == 28


def test_statistics_are_summed_over_views() -> None:
    params, optimizers = scene()
    strategy = GrowAndPrune(refine_start_iter=100, absgrad=True, refine_scale2d_stop_iter=10)
    together, apart = strategy.initialize_state(), strategy.initialize_state()
    first, second = statistics(seed=1, views=2) + statistics(seed=2, views=2)
    strategy.watch(whole(params, optimizers, together), [first, second])
    for view in statistics(seed=1) + statistics(seed=2):
        strategy.watch(whole(params, optimizers, apart), [view])
    # A loss that is the mean of two views has half the gradients, which gsplat's normalisation makes up for.
    torch.testing.assert_close(together["grad2d"], 2 * apart["grad2d"])
    torch.testing.assert_close(together["count"], apart["count"])


@pytest.mark.parametrize("copies", [1, 2, 5, 51])
def test_relocated_copies_look_like_the_one(copies: int) -> None:
    """Along a ray through the centres, n copies compose to the opacity of the one (the paper's condition)."""
    opacity, scale = torch.tensor([0.7, 0.2]), torch.tensor([[0.1, 0.2, 0.3], [0.5, 0.5, 0.5]])
    new_opacity, new_scale = relocated_shape(opacity, scale, torch.tensor([copies, copies]))
    torch.testing.assert_close(1 - (1 - new_opacity) ** copies, opacity, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(new_scale / scale, (new_scale / scale)[:, :1].expand(2, 3))
    # Equal integrals of the composed profile, in one dimension and by quadrature.
    x = torch.linspace(-8, 8, 20001, dtype=torch.float64)
    profile = torch.exp(-0.5 * x**2)
    ratio = (new_scale / scale)[:, 0].double()
    for i in range(2):
        one = (opacity[i].double() * profile).sum()
        narrow = torch.exp(-0.5 * (x / ratio[i]) ** 2)
        many = (1 - (1 - new_opacity[i].double() * narrow) ** copies).sum()
        torch.testing.assert_close(many, one, rtol=1e-5, atol=1e-6)


def test_mcmc_relocates_the_dead_grows_to_its_cap_and_repeats() -> None:
    results = []
    for _ in range(2):
        params, optimizers = scene()
        params["opacities"].data[:10] = -20
        strategy = MonteCarlo(cap_max=N + 2, refine_start_iter=1, refine_every=2, noise_lr=1.0)
        strategy.step_post_backward(whole(params, optimizers, {}), 2)
        assert len(params["means"]) == N + 2
        assert torch.sigmoid(params["opacities"]).min() >= 0.005 - 1e-6
        check_consistent(params, optimizers)
        results.append(params["means"].detach().clone())
    assert torch.equal(*results)


def test_mcmc_noise_follows_the_covariance() -> None:
    """A flat, nearly transparent primitive moves within its plane; an opaque one stays."""
    params, optimizers = scene()
    for optimizer in optimizers.values():
        optimizer.catch_up()  # type: ignore[attr-defined]
    with torch.no_grad():
        params["quats"][:] = torch.tensor([math.cos(0.4), 0, math.sin(0.4), 0])
        params["scales"][:] = torch.tensor([0.0, 0.0, -20.0])
        params["opacities"][:] = -20.0
        params["opacities"][::2] = 10.0
    before = params["means"].detach().clone()
    MonteCarlo(refine_start_iter=100, noise_lr=1.0).step_post_backward(whole(params, optimizers, {}), 1)
    moved = params["means"].detach() - before
    normal = torch.tensor([math.sin(0.8), 0.0, math.cos(0.8)])
    assert moved[1::2].norm(dim=1).min() > 1e-4
    assert (moved[1::2] @ normal).abs().max() < 1e-6
    assert moved[::2].abs().max() < 1e-6
