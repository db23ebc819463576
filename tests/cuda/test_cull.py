"""The kernel that culls for several views, against the float64 twin and the exact render."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
import torch
from scope_cases import SETTINGS, packed, random_camera, random_params, touched
from torch import Tensor

from odin_nerfstudio import kernels
from odin_nerfstudio.shadow.bitmap import Bitmap
from odin_nerfstudio.shadow.bitmap import reference as bitmaps
from odin_nerfstudio.shadow.scope import Drift, reference, views_in_scope

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
BOUNDS = {"near": SETTINGS.near, "far": 6.0, "eps2d": SETTINGS.eps2d}


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def inputs(n: int, views: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Means, scales and cameras, float32."""
    generator = rng(seed)
    params = random_params(generator, n)
    cameras = packed([random_camera(generator) for _ in range(views)])
    return params["means"].float().cuda(), params["scales"].float().cuda(), cameras.float().cuda()


def contained(a: Tensor, b: Tensor) -> bool:
    return not bool((a & ~b).any())


@needs_cuda
@pytest.mark.parametrize("views", [0, 1, 5, 33, 64])
@pytest.mark.parametrize("n", [0, 1, 31, 32, 33, 64, 65, 256, 257, 3001])
def test_sets_are_the_twins_within_rounding(n: int, views: int) -> None:
    rows = inputs(n, views, seed=n + views)
    steps = [torch.randint(0, 9, (n,), generator=rng(n)).float().cuda() for _ in range(2)]  # some beyond the tables
    tables = [torch.rand(size, generator=rng(size), dtype=torch.float64).cuda() * 0.2 + 0.002 for size in (7, 5)]

    def drifts(margin: float) -> Iterator[Drift]:
        return (Drift(step, table + 2 * margin, 0.5) for step, table in zip(steps, tables, strict=True))

    def twin(margin: float) -> Tensor:
        means_drift, scales_drift = drifts(margin)
        doubles = (tensor.double() for tensor in rows)
        return reference.views_in_scope(*doubles, **BOUNDS, means_drift=means_drift, scales_drift=scales_drift)

    means_drift, scales_drift = drifts(0)
    found = views_in_scope(*rows, **BOUNDS, means_drift=means_drift, scales_drift=scales_drift)
    assert found.shape == (views, -(-n // 64))
    assert contained(twin(-1e-4), found)
    assert contained(found, twin(1e-4))


@needs_cuda
def test_almost_all_rows_are_the_twins_to_the_bit() -> None:
    n, views = 200_003, 4
    rows = inputs(n, views, seed=1)
    found = views_in_scope(*rows, **BOUNDS)
    expected = reference.views_in_scope(*(tensor.double() for tensor in rows), **BOUNDS)
    different = bitmaps.count(found ^ expected)
    assert different.max() < 1e-3 * n
    assert bitmaps.count(expected).min() > 0


@needs_cuda
@pytest.mark.parametrize("seed", range(20))
def test_sets_contain_what_is_rendered(seed: int) -> None:
    generator = rng(seed)
    params, camera = random_params(generator, 400), random_camera(generator)
    params = {name: value.float().double() for name, value in params.items()}
    rows = (tensor.float().cuda() for tensor in (params["means"], params["scales"], packed([camera])))
    words = views_in_scope(*rows, near=SETTINGS.near, far=SETTINGS.far, eps2d=SETTINGS.eps2d)
    assert Bitmap(words[0], 400).mask().cpu()[touched(params, camera)].all()


@needs_cuda
def test_nothing_waits_for_the_device() -> None:
    rows = inputs(1000, 3, seed=0)
    drift = Drift(torch.zeros(1000, device="cuda"), torch.ones(1, device="cuda", dtype=torch.float64))
    views_in_scope(*rows, **BOUNDS)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        views_in_scope(*rows, **BOUNDS, means_drift=drift)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_cuda
@pytest.mark.parametrize("late", [False, True])
def test_the_operator_keeps_torchs_rules(late: bool) -> None:
    rows = inputs(100, 3, seed=0)
    views_in_scope(*rows, **BOUNDS)
    table = torch.ones(2, device="cuda", dtype=torch.float64)
    drift = Drift(torch.zeros(100, device="cuda"), table, 0.5) if late else (None, None, 1.0)
    arguments = (*rows, *drift, *drift, *BOUNDS.values())
    operator = torch.ops.odin_nerfstudio.cull_views.default
    torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_the_source_compiles_and_exports_its_function(capability, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    assert hasattr(kernels.load.__wrapped__("cull", capability), "cull_views")
