"""The second stage, blending, on its own: against float64 torch, and properties of any image."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from raster_scenes import FIELDS, Scene, relative_error

from odin_nerfstudio.splat.raster.numba import NumbaRasterizer
from odin_nerfstudio.splat.raster.protocol import Rasterizer, Splats
from odin_nerfstudio.splat.raster.reference import ReferenceRasterizer


def _splats(scene: Scene) -> Splats:
    rows, camera = scene.build()
    return NumbaRasterizer().project(rows, camera, scene.settings)


def _leaves(splats: Splats, dtype: torch.dtype) -> Splats:
    return replace(splats, **{n: getattr(splats, n).to(dtype).clone().requires_grad_() for n in FIELDS})


def _gradients(
    rasterizer: Rasterizer, splats: Splats, scene: Scene, outputs: tuple[int, ...]
) -> dict[str, torch.Tensor]:
    """Image and gradients of the outputs named, as after a journey between ranks: splats are leaves."""
    image = rasterizer.rasterize(splats, scene.width, scene.height, absgrad=True)
    weights = scene.upstream()
    torch.stack([(image[i] * weights[i].to(image.rgb)).sum() for i in outputs]).sum().backward()
    values = image._asdict() | {f"grad_{n}": getattr(splats, n).grad for n in FIELDS} | {"absgrad": splats.absgrad}
    return {name: value.detach() for name, value in values.items() if value is not None}


@pytest.mark.parametrize("outputs", [(0,), (1,), (2,), (0, 1, 2)])
@pytest.mark.parametrize("size", [(48, 32), (45, 31), (17, 16)])
def test_values_and_gradients(size: tuple[int, int], outputs: tuple[int, ...]) -> None:
    scene = Scene(150, *size, seed=11)
    splats = _splats(scene)
    values = _gradients(NumbaRasterizer(), _leaves(splats, torch.float32), scene, outputs)
    truth = _gradients(ReferenceRasterizer(), _leaves(splats, torch.float64), scene, outputs)
    errors = {name: relative_error(values[name], truth[name]) for name in truth}
    assert max(errors.values()) < 2e-5, errors


def test_absgrad_bounds_the_gradient() -> None:
    scene = Scene(200, 60, 44)
    splats = _leaves(_splats(scene), torch.float32)
    values = _gradients(NumbaRasterizer(), splats, scene, (0, 1, 2))
    assert bool((values["absgrad"] >= values["grad_means2d"].abs() * (1 - 1e-5)).all())


def test_absgrad_only_on_request() -> None:
    splats = _leaves(_splats(Scene(20, 20, 20)), torch.float32)
    NumbaRasterizer().rasterize(splats, 20, 20).rgb.sum().backward()
    assert splats.absgrad is None


@given(seed=st.integers(0, 10**6), opacities=st.sampled_from([(0.01, 0.2), (0.2, 0.99), (0.99, 0.99999)]))
@settings(max_examples=25, deadline=None)
def test_alpha_is_a_fraction_and_depth_lies_between(seed: int, opacities: tuple[float, float]) -> None:
    scene = Scene(80, 33, 21, seed=seed, opacities=opacities)
    splats = _splats(scene)
    image = NumbaRasterizer().rasterize(splats, 33, 21)
    assert bool(((image.alpha >= 0) & (image.alpha <= 1)).all())
    drawn = image.alpha > 0
    assert bool((image.depth[drawn] >= splats.depths.min() * (1 - 1e-6)).all())
    assert bool((image.depth[drawn] <= splats.depths.max() * (1 + 1e-6)).all())
    assert not image.depth[~drawn].any() and not image.rgb[~drawn[..., 0]].any()


@given(seed=st.integers(0, 10**6), tied=st.booleans())
@settings(max_examples=25, deadline=None)
def test_order_of_splats_does_not_matter(seed: int, tied: bool) -> None:
    scene = Scene(80, 33, 21, seed=seed)
    splats = _splats(scene)
    if tied:
        splats.depths = splats.depths.round()
    order = torch.randperm(len(splats.ids), generator=torch.Generator().manual_seed(seed))
    shuffled = Splats(**{n: getattr(splats, n)[order] for n in (*FIELDS, "ids", "index", "radii")})
    one, other = _leaves(splats, torch.float32), _leaves(shuffled, torch.float32)
    first = _gradients(NumbaRasterizer(), one, scene, (0, 1, 2))
    second = _gradients(NumbaRasterizer(), other, scene, (0, 1, 2))
    for name, value in first.items():
        moved = value[order] if name.startswith("grad") or name == "absgrad" else value
        assert torch.equal(second[name], moved), name


@given(seed=st.integers(0, 10**6))
@settings(max_examples=15, deadline=None)
def test_transparent_splats_have_no_effect(seed: int) -> None:
    scene = Scene(60, 33, 21, seed=seed)
    splats = _splats(scene)
    clear = torch.rand(len(splats.ids), generator=torch.Generator().manual_seed(seed)) < 0.4
    splats.opacities = torch.where(clear, 0.0, splats.opacities)
    rest = Splats(**{n: getattr(splats, n)[~clear] for n in (*FIELDS, "ids", "index", "radii")})
    one, other = _leaves(splats, torch.float32), _leaves(rest, torch.float32)
    first = _gradients(NumbaRasterizer(), one, scene, (0, 1, 2))
    second = _gradients(NumbaRasterizer(), other, scene, (0, 1, 2))
    for name, value in second.items():
        of_rest = first[name][~clear] if name.startswith("grad") or name == "absgrad" else first[name]
        assert torch.equal(of_rest, value), name
        if name.startswith("grad"):
            assert not first[name][clear].any(), name
