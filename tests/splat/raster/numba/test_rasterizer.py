"""Both stages together: agreement with the reference, the same bits always, and what lies at the edge of the domain."""

from dataclasses import replace

import pytest
import torch
from raster_scenes import PARAMETERS, Scene, evaluate, relative_error

from odin_nerfstudio.cpu import threads
from odin_nerfstudio.splat.raster.numba import NumbaRasterizer
from odin_nerfstudio.splat.raster.reference import ReferenceRasterizer

# Enough rows for several blocks of work, and tiles in several rows and columns.
LARGE = Scene(3000, 150, 110, deviations=(0.01, 0.1))


def _assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


@pytest.mark.parametrize("mode", ["classic", "antialiased"])
@pytest.mark.parametrize("degree", [None, 0, 1, 2, 3])
def test_image_and_gradients(mode: str, degree: int | None) -> None:
    scene = Scene(150, 40, 30, sh_degree=degree, mode=mode, deviations=(0.02, 0.3), seed=5)
    values = evaluate(NumbaRasterizer(), scene)
    truth = evaluate(ReferenceRasterizer(), scene, torch.float64)
    errors = {name: relative_error(values[name], truth[name]) for name in truth}
    assert max(errors.values()) < 2e-5, errors


def test_same_bits_every_time_and_with_any_number_of_threads() -> None:
    before = threads.count()
    try:
        threads.use(1)
        one = evaluate(NumbaRasterizer(), LARGE)
        for number in (1, 2, 3):
            threads.use(number)
            _assert_same(one, evaluate(NumbaRasterizer(), LARGE))
    finally:
        threads.use(before)


def test_same_bits_for_any_order_of_rows() -> None:
    one = evaluate(NumbaRasterizer(), LARGE)
    permutation = torch.randperm(LARGE.rows, generator=torch.Generator().manual_seed(1))
    _assert_same(one, evaluate(NumbaRasterizer(), LARGE, permutation=permutation))


def test_rows_that_no_pixel_sees_change_nothing() -> None:
    rows, camera = LARGE.build()
    splats = NumbaRasterizer().project(rows, camera, LARGE.settings)
    seen = type(rows)(*(t[splats.index] for t in rows))
    one = NumbaRasterizer().rasterize(splats, camera.width, camera.height)
    other = NumbaRasterizer().rasterize(
        NumbaRasterizer().project(seen, camera, LARGE.settings), camera.width, camera.height
    )
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    "scene",
    [
        pytest.param(Scene(0, 20, 10), id="no rows"),
        pytest.param(Scene(20, 20, 10, distance=-8.0, spread=0.5), id="all behind the camera"),
        pytest.param(Scene(20, 20, 10, distance=1e6, deviations=(1e-6, 1e-5)), id="specks"),
        pytest.param(Scene(30, 1, 1), id="one pixel"),
        pytest.param(Scene(30, 16, 16), id="one tile"),
        pytest.param(Scene(30, 7, 50), id="narrow"),
        pytest.param(Scene(10, 40, 30, deviations=(50.0, 500.0)), id="huge"),
        pytest.param(Scene(40, 40, 30, deviations=(1e-4, 3.0), seed=2), id="needles"),
        pytest.param(Scene(100, 40, 30, opacities=(0.9999, 0.99999)), id="opaque"),
        pytest.param(Scene(60, 40, 30, opacities=(1e-6, 1e-4)), id="invisible"),
    ],
)
def test_edges_of_the_domain(scene: Scene) -> None:
    if scene.distance < 0:
        # The camera of a scene looks at the origin; turn it round.
        rows, camera = replace(scene, distance=8.0).build()
        camera = replace(camera, viewmat=torch.diag(torch.tensor([-1.0, 1, -1, 1])) @ camera.viewmat)
        assert not len(NumbaRasterizer().project(rows, camera, scene.settings).ids)
        return
    values = evaluate(NumbaRasterizer(), scene)
    truth = evaluate(ReferenceRasterizer(), scene, torch.float64)
    assert all(bool(torch.isfinite(value).all()) for value in values.values())
    assert torch.equal(values["ids"], truth["ids"])
    errors = {name: relative_error(values[name], truth[name]) for name in ("rgb", "alpha", "depth")}
    assert max(errors.values()) < 1e-4, errors


def test_pose_alone_can_be_optimised() -> None:
    rows, camera = Scene(60, 30, 20).build()
    viewmat = camera.viewmat.clone().requires_grad_()
    splats = NumbaRasterizer().project(rows, replace(camera, viewmat=viewmat), Scene(1, 1, 1).settings)
    NumbaRasterizer().rasterize(splats, 30, 20).rgb.square().sum().backward()
    assert viewmat.grad is not None and bool(viewmat.grad[:3].any())
    assert not any(getattr(rows, name).requires_grad for name in PARAMETERS)
