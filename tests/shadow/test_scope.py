"""Scopes contain whatever the exact render touches, also after late rows have moved."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scope_cases import SETTINGS, packed, random_camera, random_params, touched

from odin_nerfstudio.shadow.bitmap import Bitmap
from odin_nerfstudio.shadow.optimizer import LazyAdam
from odin_nerfstudio.shadow.scope import Drift, in_scope, views_in_scope
from odin_nerfstudio.splat.raster.protocol import PinholeCamera


def scope(params: dict[str, torch.Tensor], camera: PinholeCamera, **drift: torch.Tensor | None) -> torch.Tensor:
    return in_scope(
        params["means"],
        params["scales"],
        camera.viewmat,
        camera.K,
        camera.width,
        camera.height,
        near=SETTINGS.near,
        far=SETTINGS.far,
        eps2d=SETTINGS.eps2d,
        **drift,
    )


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_scope_contains_what_is_rendered(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    params, camera = random_params(generator, 400), random_camera(generator)
    assert scope(params, camera)[touched(params, camera)].all()


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**31), lr=st.floats(1e-3, 0.3), late=st.integers(1, 60))
def test_scope_contains_what_is_rendered_after_the_catch_up(seed: int, lr: float, late: int) -> None:
    """Aggressive learning rates, rows that have missed many steps; the scope is taken before they catch up."""
    generator = torch.Generator().manual_seed(seed)
    params = {k: torch.nn.Parameter(v) for k, v in random_params(generator, 300).items()}
    optimizers = {name: LazyAdam([params[name]], lr=lr) for name in ("means", "scales", "quats")}
    for step in range(5 + late):
        rows = torch.arange(300 if step < 5 else 10)
        for name, optimizer in optimizers.items():
            grad = torch.randn(len(rows), params[name].shape[1], dtype=torch.float64, generator=generator) + 0.5
            params[name].grad = torch.sparse_coo_tensor(
                rows[None], grad * 2.0**step, params[name].shape, is_coalesced=True, check_invariants=False
            )
            optimizer.step()
    camera = random_camera(generator)
    drift = {f"{name}_drift": optimizers[name].drift() for name in ("means", "scales")}
    values = {name: param.detach() for name, param in params.items()}
    before = scope(values, camera, **drift)
    for optimizer in optimizers.values():
        optimizer.catch_up()
    assert before[touched(values, camera)].all()


def test_scope_is_not_everything() -> None:
    """A distant camera with a narrow view leaves out most of a large scene."""
    generator = torch.Generator().manual_seed(0)
    params = random_params(generator, 5000)
    params["means"] = torch.rand(5000, 3, dtype=torch.float64, generator=generator) * 100 - 50
    params["scales"] = torch.full((5000, 3), -2.0, dtype=torch.float64)
    K = torch.tensor([[100.0, 0, 32], [0, 100.0, 24], [0, 0, 1]], dtype=torch.float64)
    camera = PinholeCamera(torch.eye(4, dtype=torch.float64), K, 64, 48)
    inside, exact = scope(params, camera), touched(params, camera)
    assert len(exact) <= inside.sum() <= 1.2 * len(exact) + 5
    assert len(exact) < 500


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), count=st.sampled_from([0, 1, 63, 64, 65, 300]), views=st.integers(0, 4))
def test_scopes_of_several_views_are_those_of_each(seed: int, count: int, views: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    params, cameras = random_params(generator, count), [random_camera(generator) for _ in range(views)]
    late = torch.randint(0, 7, (count,), generator=generator)  # some beyond the table
    table = torch.rand(5, dtype=torch.float64, generator=generator)
    sets = views_in_scope(
        params["means"],
        params["scales"],
        packed(cameras),
        near=SETTINGS.near,
        far=SETTINGS.far,
        eps2d=SETTINGS.eps2d,
        means_drift=Drift(late.float(), table, 2.0),
    )
    assert sets.shape == (views, -(-count // 64))
    for words, camera in zip(sets, cameras, strict=True):
        expected = scope(params, camera, means_drift=2 * table[late.clamp_max(4)])
        assert torch.equal(Bitmap(words, count).rows(), expected.nonzero()[:, 0])


def test_bounds_are_never_rounded_down() -> None:
    generator = torch.Generator().manual_seed(0)
    table, step = torch.rand(100, dtype=torch.float64, generator=generator), torch.arange(120.0)
    drift = Drift(step, table, 7.3)
    exact = 7.3 * table[step.long().clamp_max(99)]
    assert torch.equal(drift.bounds(torch.float64), exact)
    bounds = drift.bounds(torch.float32)
    assert bounds.dtype == torch.float32
    assert ((bounds >= exact) & (bounds <= exact * (1 + 2**-22))).all()
    assert torch.equal(Drift(step, torch.ones(1, dtype=torch.float64)).bounds(torch.float32), torch.ones(120))
