"""Scopes contain whatever the exact render touches, also after late rows have moved."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from odin_nerfstudio.shadow.optimizer import LazyAdam
from odin_nerfstudio.shadow.scope import in_scope
from odin_nerfstudio.splat.raster.protocol import PinholeCamera, RasterSettings, Rows
from odin_nerfstudio.splat.raster.reference import ReferenceRasterizer

SETTINGS = RasterSettings(sh_degree=0)


def random_camera(generator: torch.Generator, dtype: torch.dtype = torch.float64) -> PinholeCamera:
    """Anywhere near the scene, also inside it, with an off-centre principal point."""
    rotation, _ = torch.linalg.qr(torch.randn(3, 3, dtype=dtype, generator=generator))
    viewmat = torch.eye(4, dtype=dtype)
    viewmat[:3, :3] = rotation * torch.sign(torch.det(rotation))
    viewmat[:3, 3] = torch.randn(3, dtype=dtype, generator=generator) * 2
    size = 20 + torch.randint(0, 60, (2,), generator=generator)
    focal = size.to(dtype) * (0.3 + 2 * torch.rand(2, dtype=dtype, generator=generator))
    centre = size * (0.2 + 0.6 * torch.rand(2, dtype=dtype, generator=generator))
    K = torch.tensor([[focal[0], 0, centre[0]], [0, focal[1], centre[1]], [0, 0, 1]], dtype=dtype)
    return PinholeCamera(viewmat, K, int(size[0]), int(size[1]))


def random_params(generator: torch.Generator, count: int) -> dict[str, torch.Tensor]:
    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(count, *shape, dtype=torch.float64, generator=generator)

    return {
        "means": draw(3) * 3,
        "scales": draw(3) * 1.5 - 2,
        "quats": draw(4),
        "features_dc": draw(3),
        "features_rest": draw(0, 3),
        "opacities": draw(1),
    }


def touched(params: dict[str, torch.Tensor], camera: PinholeCamera) -> torch.Tensor:
    rows = Rows(ids=torch.arange(len(params["means"])), **params)
    return ReferenceRasterizer().project(rows, camera, SETTINGS).ids


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
