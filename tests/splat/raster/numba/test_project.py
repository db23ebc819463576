"""The first stage, projection and shading, against float64 torch: values and gradients."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from raster_scenes import FIELDS, PARAMETERS, Scene, relative_error

from odin_nerfstudio.splat.raster.numba import NumbaRasterizer
from odin_nerfstudio.splat.raster.protocol import PinholeCamera, Rasterizer, Rows
from odin_nerfstudio.splat.raster.reference import ReferenceRasterizer


def _gradient(leaf: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def _stage(
    rasterizer: Rasterizer, scene: Scene, dtype: torch.dtype, only: str | None = None
) -> dict[str, torch.Tensor]:
    """Splats, and gradients of a random functional of all their fields, or of ``only`` one."""
    rows, camera = scene.build()
    rows = Rows(rows.ids, *(t.to(dtype).requires_grad_() for t in rows[1:]))
    viewmat = camera.viewmat.to(dtype).requires_grad_()
    camera = PinholeCamera(viewmat, camera.K.to(dtype), camera.width, camera.height)
    splats = rasterizer.project(rows, camera, scene.settings)
    random = torch.Generator().manual_seed(7)
    loss = torch.zeros((), dtype=dtype)
    for name in FIELDS:
        field = getattr(splats, name)
        weights = torch.randn(field.shape, generator=random).to(dtype)
        if only in (None, name):
            loss = loss + (field * weights).sum()
    loss.backward()
    values = {name: getattr(splats, name).detach() for name in (*FIELDS, "ids", "index", "radii")}
    for name in PARAMETERS:
        values[f"grad_{name}"] = _gradient(getattr(rows, name))
    return values | {"grad_viewmat": _gradient(viewmat)[:3]}


def _compare(scene: Scene, only: str | None = None) -> None:
    values = _stage(NumbaRasterizer(), scene, torch.float32, only)
    truth = _stage(ReferenceRasterizer(), scene, torch.float64, only)
    for name in ("ids", "index", "radii"):
        assert torch.equal(values[name], truth[name])
    errors = {name: relative_error(values[name], truth[name]) for name in truth}
    assert max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize("degree", [None, 0, 1, 2, 3])
def test_degrees(degree: int | None) -> None:
    _compare(Scene(200, 50, 40, sh_degree=degree))


@pytest.mark.parametrize("only", FIELDS)
@pytest.mark.parametrize("mode", ["classic", "antialiased"])
def test_each_field(mode: str, only: str) -> None:
    _compare(Scene(200, 50, 40, mode=mode, deviations=(0.02, 0.2)), only)


def test_behind_the_camera_and_beyond_the_edges() -> None:
    _compare(Scene(400, 47, 33, deviations=(0.02, 0.4), spread=4.0, distance=1.0))


def test_coefficients_above_the_degree_are_ignored() -> None:
    rows, camera = Scene(50, 40, 30, sh_degree=3).build()
    settings_of_two = Scene(50, 40, 30, sh_degree=2).settings
    more = NumbaRasterizer().project(rows, camera, settings_of_two)
    fewer = NumbaRasterizer().project(rows._replace(features_rest=rows.features_rest[:, :8]), camera, settings_of_two)
    assert torch.equal(more.colors, fewer.colors)


def test_near_and_far_planes() -> None:
    rows, camera = Scene(200, 40, 30).build()
    splats = NumbaRasterizer().project(rows, camera, replace(Scene(1, 1, 1).settings, near=3.5, far=4.5))
    assert 0 < len(splats.ids) < 200
    assert bool(((splats.depths >= 3.5) & (splats.depths <= 4.5)).all())


@given(st.randoms(use_true_random=False))
@settings(max_examples=20, deadline=None)
def test_a_row_never_sees_another(random) -> None:
    rows, camera = Scene(60, 40, 30, spread=3.0).build()
    order = list(range(60))
    random.shuffle(order)
    subset = torch.tensor(sorted(order[: random.randint(1, 59)], key=lambda _: random.random()))
    full = NumbaRasterizer().project(rows, camera, Scene(1, 1, 1).settings)
    part = NumbaRasterizer().project(Rows(*(t[subset] for t in rows)), camera, Scene(1, 1, 1).settings)
    assert np.array_equal(part.ids.numpy(), np.intersect1d(full.ids.numpy(), rows.ids[subset].numpy()))
    assert torch.equal(rows.ids[subset][part.index], part.ids)
    where = torch.searchsorted(full.ids, part.ids)
    for name in (*FIELDS, "radii"):
        assert torch.equal(getattr(part, name), getattr(full, name)[where])


def test_other_types_are_refused() -> None:
    rows, camera = Scene(5, 20, 10).build()
    with pytest.raises(TypeError, match="float32 tensors on the CPU"):
        NumbaRasterizer().project(rows._replace(means=rows.means.double()), camera, Scene(1, 1, 1).settings)
