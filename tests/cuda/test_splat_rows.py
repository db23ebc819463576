"""The CUDA kernels from rows to splats and back, against the float64 twin and against gsplat."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch
from splat_rows_cases import FIELDS, Scene, assert_agrees, assert_close, assert_subsets_agree

from odin_nerfstudio import kernels
from odin_nerfstudio.comm.splat_block import SplatBlock
from odin_nerfstudio.splat.raster.camera_table import camera_of, camera_table
from odin_nerfstudio.splat.raster.fused import project_rows, pull_back_rows, reference

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def kernel() -> None:
    """Without it the twin would be compared with itself."""
    assert kernels.available("splat_rows", torch.device("cuda", torch.cuda.current_device()))


@needs_cuda
@pytest.mark.parametrize("mode", ["classic", "antialiased"])
@pytest.mark.parametrize(
    ("degree", "terms"), [(None, 1), (None, 16), (0, 1), (0, 4), (1, 4), (1, 16), (2, 9), (2, 16), (3, 16), (3, 25)]
)
def test_values_and_gradients_are_the_twins(kernel, degree, terms, mode) -> None:
    assert_agrees(project_rows, pull_back_rows, Scene(degree=degree, terms=terms, mode=mode, seed=terms), "cuda")


@needs_cuda
@pytest.mark.parametrize("pairs", [(0,), (1,), (0, 0, 3), (128,), (127, 2), (129, 1, 0), tuple(range(64))])
def test_numbers_of_pairs(kernel, pairs) -> None:
    scene = Scene(pairs=pairs, rows=130, seed=len(pairs))
    assert_agrees(project_rows, pull_back_rows, scene, "cuda")
    if sum(pairs):
        assert_subsets_agree(project_rows, pull_back_rows, scene, "cuda")


@needs_cuda
def test_many_rows(kernel) -> None:
    assert_agrees(project_rows, pull_back_rows, Scene(20_000, (15_000, 9001, 19_999), seed=5), "cuda")


@needs_cuda
@pytest.mark.parametrize(("degree", "terms"), [(None, 1), (1, 16), (2, 9), (3, 16)])
def test_chosen_pairs_and_sums(kernel, degree, terms) -> None:
    assert_subsets_agree(project_rows, pull_back_rows, Scene(degree=degree, terms=terms, seed=3), "cuda")


@needs_cuda
def test_gradients_without_absgrad(kernel) -> None:
    pairs = Scene().build().to("cuda")
    values = project_rows(pairs.params, pairs.rows, *pairs.views).values
    one = pull_back_rows(values, *pairs.views, pairs.grads)
    other = pull_back_rows(values, *pairs.views, pairs.grads[:, :10])
    assert all(torch.equal(one[name], other[name]) for name in one)


@needs_cuda
@pytest.mark.parametrize("mode", ["classic", "antialiased"])
@pytest.mark.parametrize(("degree", "terms"), [(None, 1), (3, 16)])
def test_splats_are_gsplats(kernel, degree, terms, mode) -> None:
    rasterizer = pytest.importorskip("odin_nerfstudio.splat.raster.gsplat").GsplatRasterizer()
    pairs = Scene(5000, (4000, 3001), degree=degree, terms=terms, mode=mode, seed=8).build().to("cuda")
    arguments = pairs.params, pairs.rows, *pairs.views
    found = SplatBlock.unpack(project_rows(*arguments).block)
    expected = SplatBlock.unpack(reference.project_rows(*arguments, rasterizer)[0])
    assert torch.equal(found.ids, expected.ids)
    # 3·√λ may lie so close to an integer that the roundings differ.
    differ = found.radii != expected.radii
    assert differ.sum() <= len(differ) // 1000
    for name in FIELDS:
        assert_close(getattr(found, name)[~differ], getattr(expected, name)[~differ], 1e-4, name)


@needs_cuda
def test_near_and_far(kernel) -> None:
    pairs = Scene().build()
    pairs = replace(pairs, settings=replace(pairs.settings, near=1.5, far=2.5)).to("cuda")
    block = SplatBlock.unpack(project_rows(pairs.params, pairs.rows, *pairs.views).block)
    seen = block.radii > 0
    assert seen.any() and bool(((block.depths[seen] >= 1.5) & (block.depths[seen] <= 2.5)).all())


@needs_cuda
def test_what_is_refused(kernel) -> None:
    pairs = Scene(pairs=(1,) * 65).build().to("cuda")
    with pytest.raises(ValueError, match="at most 64 views"):
        project_rows(pairs.params, pairs.rows, *pairs.views)
    pairs = Scene(degree=2, terms=4).build().to("cuda")
    with pytest.raises(ValueError, match="SH degree 2"):
        project_rows(pairs.params, pairs.rows, *pairs.views)


@needs_cuda
def test_parameters_that_require_gradients(kernel) -> None:
    pairs = Scene().build().to("cuda")
    params = type(pairs.params)(pairs.params.ids, *(field.requires_grad_() for field in pairs.params[1:]))
    block, values = project_rows(params, pairs.rows, *pairs.views)
    assert not block.requires_grad and not any(field.requires_grad for field in values)


@needs_cuda
def test_nothing_waits_for_the_device(kernel) -> None:
    pairs = Scene().build().to("cuda")
    into = pairs.sums()
    cameras = [camera_of(row) for row in pairs.table]
    camera_table(cameras)  # now it has seen the sizes
    torch.cuda.set_sync_debug_mode("error")
    try:
        table = camera_table(cameras)
        values = project_rows(pairs.params, pairs.rows, *pairs.views).values
        pull_back_rows(values, *pairs.views, pairs.grads)
        pull_back_rows(values, *pairs.views, pairs.grads, None, pairs.rows, into)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(table, pairs.table)


@needs_cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_device_that_is_not_the_current_one() -> None:
    assert_agrees(project_rows, pull_back_rows, Scene(), "cuda:1")
    assert torch.cuda.current_device() == 0


@needs_cuda
def test_operators_keep_torchs_rules(kernel) -> None:
    from odin_nerfstudio.splat.raster.fused import cuda  # noqa: F401

    pairs = Scene(pairs=(30, 12)).build().to("cuda")
    views = (pairs.offsets, pairs.table, 3, False, 0.01, 1e10, 0.3)
    fields, operators = pairs.values[1:], torch.ops.odin_nerfstudio
    values, active, index = pairs.sums()
    places = pairs.rows, index.words, index.prefix
    sums = [values[name] for name in reference.PARAMETERS]
    tests = ("test_schema", "test_faketensor")
    for operator, arguments in (
        (operators.splat_rows_project, (pairs.rows, *views, *pairs.params)),
        (operators.splat_rows_pull_back, (pairs.grads, None, *views, *fields)),
        (operators.splat_rows_add_pulled_back, (pairs.grads, None, *places, *views, *fields, *sums, active)),
    ):
        torch.library.opcheck(operator.default, arguments, test_utils=tests)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_the_source_compiles_and_exports_its_functions(capability, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    library = kernels.load.__wrapped__("splat_rows", capability)
    assert hasattr(library, "splat_rows_project") and hasattr(library, "splat_rows_pull_back")
