"""The union of the shards is the same scene, to the last bit, however many there are and whoever owns what."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch
from gsplat.strategy import DefaultStrategy
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter, ParameterDict

from odin_nerfstudio.draws import normal, uniform
from odin_nerfstudio.shadow.optimizer import LazyAdam
from odin_nerfstudio.splat.densify import Gather, GrowAndPrune, MonteCarlo, Shard, SplatStatistics, grow_and_prune

Strategy = GrowAndPrune | MonteCarlo
SHAPES = {"means": (3,), "scales": (3,), "quats": (4,), "features_dc": (3,), "features_rest": (3, 3), "opacities": (1,)}
RATES = {"means": 1e-3, "scales": 2e-2, "quats": 1e-2, "features_dc": 1e-2, "features_rest": 1e-3, "opacities": 5e-2}


def values(purpose: str, step: int, ids: Tensor, shape: tuple[int, ...]) -> Tensor:
    """(R, *shape) float32 that follow from the ids alone."""
    return normal(0, purpose, step, ids, torch.Size(shape).numel()).float().view(len(ids), *shape)


def make_shard(ids: Tensor, total: int, strategy: Strategy, gather: Gather) -> Shard:
    params = ParameterDict({name: Parameter(values(name, 0, ids, shape)) for name, shape in SHAPES.items()})
    params["scales"].data.mul_(0.5).sub_(3)
    params["opacities"].data.sub_(1)
    optimizers = {name: LazyAdam([param], lr=RATES[name], eps=1e-15) for name, param in params.items()}
    state = strategy.initialize_state() if isinstance(strategy, GrowAndPrune) else {}
    return Shard(params, optimizers, state, ids, total, total, gather)


def take_step(shard: Shard, strategy: Strategy, step: int) -> None:
    """Gradients for some rows, two views' statistics for some, and the strategy, all keyed by id."""
    seen = (uniform(0, "seen", step, shard.ids, 1)[:, 0] < 0.4).nonzero()[:, 0]
    for name, param in shard.params.items():
        grad = values(f"grad {name}", step, shard.ids[seen], SHAPES[name])
        param.grad = torch.sparse_coo_tensor(seen[None], grad, param.shape, check_invariants=False)
        shard.optimizers[name].step()
    info = []
    for view in range(2):
        index = (uniform(0, "view", 10 * step + view, shard.ids, 1)[:, 0] < 0.7).nonzero()[:, 0]
        draws = uniform(0, "splat", 10 * step + view, shard.ids[index], 3).float()
        info.append(SplatStatistics(index, draws[:, :2] * 1e-4, (draws[:, 2] * 200).int(), 1000, 800, 2))
    if strategy.watches(step):
        strategy.watch(shard, info)
    strategy.step_post_backward(shard, step)


def run(owners: Tensor, ranks: int, steps: int, make: Callable[[], Strategy]) -> list[Shard]:
    """The shards after ``steps`` steps; rank r starts with the rows whose owner it is."""
    barrier, slots = Barrier(ranks, timeout=60), [torch.empty(0)] * ranks

    def work(rank: int) -> Shard:
        def gather(rows: Tensor) -> Tensor:
            slots[rank] = rows
            barrier.wait()
            everything = torch.cat(slots)
            barrier.wait()
            return everything

        try:
            strategy = make()
            shard = make_shard((owners == rank).nonzero()[:, 0], len(owners), strategy, gather)
            for step in range(1, steps + 1):
                take_step(shard, strategy, step)
            return shard
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(work, range(ranks)))


def merged(shards: list[Shard]) -> dict[str, Tensor]:
    """Everything that has rows, in the order of the ids."""
    ids, order = torch.cat([shard.ids for shard in shards]).sort()
    table = {"ids": ids}
    for name in SHAPES:
        table[name] = torch.cat([shard.params[name].detach() for shard in shards])[order]
        for key in ("exp_avg", "exp_avg_sq", "row_step"):
            states = [shard.optimizers[name].state[shard.params[name]][key] for shard in shards]
            table[f"{name} {key}"] = torch.cat(states)[order]
    for key, value in shards[0].state.items():
        if isinstance(value, Tensor):
            table[key] = torch.cat([shard.state[key] for shard in shards])[order]
    return table


def assert_same(expected: list[Shard], shards: list[Shard]) -> None:
    assert {shard.next_id for shard in shards} == {expected[0].next_id}
    assert {shard.total for shard in shards} == {sum(len(shard) for shard in shards)}
    for shard in shards:
        assert (shard.ids.diff() > 0).all()
    ours, theirs = merged(shards), merged(expected)
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


def growing(**options: Any) -> Callable[[], GrowAndPrune]:
    """Refines at 6, 8, 14 and 16 and resets opacities at 10."""
    defaults: dict[str, Any] = {
        "refine_start_iter": 5,
        "refine_every": 2,
        "reset_every": 10,
        "pause_refine_after_reset": 3,
        "refine_scale2d_stop_iter": 15,
        "grow_scale2d": 0.19,
        "prune_scale2d": 0.197,
        "prune_scale3d": 0.5,
        "prune_opa": 0.07,
        "grow_grad2d": 0.085,
        "grow_scale3d": 0.06,
        "absgrad": True,
    }
    return lambda: GrowAndPrune(**(defaults | options))


def chain() -> MonteCarlo:
    return MonteCarlo(cap_max=430, noise_lr=1e6, min_opacity=0.1, refine_start_iter=3, refine_every=4)


def owners_of(count: int, ranks: int, seed: int = 0) -> Tensor:
    return torch.randint(ranks, (count,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("options", [{}, {"max_primitives": 450}, {"revised_opacity": True}])
def test_growing_on_shards(ranks: int, options: dict[str, Any]) -> None:
    whole = run(torch.zeros(400), 1, 17, growing(**options))
    assert_same(whole, run(owners_of(400, ranks), ranks, 17, growing(**options)))
    born = len(whole[0]) - int((whole[0].ids < 400).sum())
    assert born > 20 and (whole[0].ids < 400).sum() < 380  # both growing and removing took place


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_mcmc_on_shards(ranks: int) -> None:
    whole = run(torch.zeros(400), 1, 13, chain)
    assert_same(whole, run(owners_of(400, ranks), ranks, 13, chain))
    assert len(whole[0]) == 430


@pytest.mark.parametrize("make", [growing(), chain])
def test_a_rank_may_be_without_rows(make: Callable[[], Strategy]) -> None:
    assert_same(run(torch.zeros(60), 1, 9, make), run(2 * owners_of(60, 2), 3, 9, make))


@settings(max_examples=25, deadline=None)
@given(
    count=st.integers(1, 80),
    ranks=st.integers(1, 4),
    seed=st.integers(0, 1000),
    threshold=st.floats(0.0, 0.1),
    cap=st.none() | st.integers(0, 120),
)
def test_growing_loses_no_row(count: int, ranks: int, seed: int, threshold: float, cap: int | None) -> None:
    """Without pruning, a primitive is kept as it is or replaced by its two samples, and new ids leave no gap."""
    never = {"prune_opa": 0.0, "prune_scale3d": 1e9, "prune_scale2d": 1e9, "reset_every": 1000}
    make = growing(grow_grad2d=threshold, max_primitives=cap, seed=seed, pause_refine_after_reset=0, **never)
    owners = owners_of(count, ranks, seed)
    before, after = merged(run(owners, ranks, 5, make)), run(owners, ranks, 6, make)
    table, next_id = merged(after), after[0].next_id
    kept = table["ids"] < count
    assert torch.equal(table["ids"][~kept], torch.arange(count, next_id))
    split = count - int(kept.sum())
    grown = len(table["ids"]) - count
    assert next_id - count == grown + split
    assert cap is None or len(table["ids"]) <= max(cap, count)
    assert len(before["ids"]) == count
    for shard in after:
        assert (shard.ids.diff() > 0).all()
        for param in shard.params.values():
            assert len(param) == len(shard)
    for name in SHAPES:
        assert not table[f"{name} exp_avg"][~kept].any() and not table[f"{name} exp_avg_sq"][~kept].any()
        assert (table[f"{name} row_step"] == 6).all()


@settings(max_examples=25, deadline=None)
@given(count=st.integers(2, 60), ranks=st.integers(1, 4), seed=st.integers(0, 1000), least=st.floats(0.01, 0.9))
def test_mcmc_loses_no_row(count: int, ranks: int, seed: int, least: float) -> None:
    """Relocation keeps every id; adding follows them without a gap."""
    shards = run(
        owners_of(count, ranks, seed),
        ranks,
        2,
        lambda: MonteCarlo(seed=seed, min_opacity=least, refine_start_iter=1, refine_every=2, noise_lr=1.0),
    )
    assert torch.equal(merged(shards)["ids"], torch.arange(int(1.05 * count)))
    assert shards[0].next_id == int(1.05 * count)


@pytest.mark.parametrize(("make", "step"), [(growing(), 6), (chain, 4)])
def test_new_ids_follow_the_parents(make: Callable[[], Strategy], step: int) -> None:
    strategy = make()
    shard = make_shard(torch.arange(200), 200, strategy, lambda rows: rows)
    shard.params["features_dc"].data[:, 0] = torch.arange(200.0)
    take_step(shard, strategy, step)
    parents = shard.params["features_dc"][shard.ids >= 200, 0]
    assert len(parents) >= 10
    assert (parents.diff() > -0.5).all()  # a step of the optimizer moves them by 0.01


def test_the_cap_prefers_large_gradients() -> None:
    strategy = growing(max_primitives=53, prune_opa=0.0, prune_scale3d=1e9, refine_scale2d_stop_iter=0)()
    shard = make_shard(torch.arange(50), 50, strategy, lambda rows: rows)
    grad = torch.full((50, 2), 1e-2)
    grad[[3, 11, 40]] = 2e-2
    grad[[20, 30]] = 1.5e-2
    shard.state["scene_scale"] = 1e9  # every primitive is small: all growth is copying
    radii = torch.ones(50, dtype=torch.int32)
    strategy.watch(shard, [SplatStatistics(torch.arange(50), grad, radii, 100, 80)])
    strategy.step_post_backward(shard, 6)
    assert torch.equal(shard.params["means"][50:], shard.params["means"][[3, 11, 40]])


def test_growing_and_pruning_are_gsplats(monkeypatch: pytest.MonkeyPatch) -> None:
    """With draws of zero both strategies give the same rows; which order they are in is ours."""
    ours = growing(reset_every=4, refine_start_iter=3, prune_opa=0.3, pause_refine_after_reset=0)()
    theirs = DefaultStrategy(
        **{name: getattr(ours, name) for name in DefaultStrategy.__dataclass_fields__ if name != "verbose"}
    )
    monkeypatch.setattr(torch, "randn", lambda *size, **options: torch.zeros(size, **options))
    monkeypatch.setattr(
        grow_and_prune, "normal", lambda seed, purpose, step, ids, n: torch.zeros(len(ids), n, dtype=torch.float64)
    )
    shards = [make_shard(torch.arange(300), 300, ours, lambda rows: rows) for _ in range(2)]
    for shard in shards:
        shard.params["features_dc"].data[:, 0] = torch.arange(300.0)  # names the row that a row comes from
    index, draws = torch.arange(300), uniform(0, "splat", 0, torch.arange(300), 3).float()
    grad, radii = draws[:, :2] * 2e-4, (draws[:, 2] * 200).int()
    means2d = torch.zeros(300, 2)
    means2d.absgrad = grad  # type: ignore[attr-defined]
    info = {"width": 1000, "height": 800, "n_cameras": 1, "radii": radii, "gaussian_ids": index, "means2d": means2d}
    ours.watch(shards[0], [SplatStatistics(index, grad, radii, 1000, 800)])
    ours.step_post_backward(shards[0], 8)
    theirs.step_post_backward(shards[1].params, shards[1].optimizers, shards[1].state, 8, info, packed=True)

    tables = []
    for shard in shards:
        columns = [param.detach().flatten(1) for param in shard.params.values()]
        rows = torch.cat([shard.params["features_dc"][:, :1].detach(), shard.scale().sum(1, keepdim=True), *columns], 1)
        tables.append(torch.tensor(sorted(rows.tolist())))
    litters = tables[0][:, 0].unique(return_counts=True)[1]
    assert len(litters) < 300 and set(litters.tolist()) == {1, 2, 3}  # pruned; copied or split; copied and split
    torch.testing.assert_close(*tables)
