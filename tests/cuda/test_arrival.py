"""The kernels that merge splats and order their gradients, against their torch twins."""

from __future__ import annotations

import shutil

import pytest
import torch
from arrival_cases import SIZES, assert_merges, assert_returns, make_pieces

from odin_nerfstudio import kernels
from odin_nerfstudio.splat.arrival import as_leaves
from odin_nerfstudio.splat.fused.leaves import gradients_in_order, merge, reference
from odin_nerfstudio.splat.unit import DIFFERENTIATED

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def kernel() -> None:
    """Without it the twin would be compared with itself."""
    assert kernels.available("arrival", torch.device("cuda", torch.cuda.current_device()))


@needs_cuda
@pytest.mark.parametrize("huge", [False, True])
@pytest.mark.parametrize("sizes", [*SIZES, (200_003, 0, 99_999, 1), (300_000,), (1,) * 65])
def test_splats_ascend_in_id_and_gradients_go_back(kernel, sizes: tuple[int, ...], huge: bool) -> None:
    pieces = make_pieces(sizes, "cuda", huge)
    merged, twin = assert_merges(merge, pieces), assert_merges(reference.merge, pieces)
    assert torch.equal(merged.splats.index, twin.splats.index)
    assert_returns(gradients_in_order, merged)
    assert_returns(reference.gradients_in_order, twin)


@needs_cuda
@pytest.mark.parametrize("sizes", [(50,), (20, 30)])
def test_missing_gradients_are_zero(kernel, sizes: tuple[int, ...]) -> None:
    merged = assert_merges(merge, make_pieces(sizes, "cuda"))
    for name in (*DIFFERENTIATED, "absgrad"):
        assert_returns(gradients_in_order, merged, name)
    assert_returns(gradients_in_order, merged, *DIFFERENTIATED, "absgrad")


@needs_cuda
def test_gradients_may_lie_apart(kernel) -> None:
    splats, place = merge(make_pieces((20, 30), "cuda"))
    leaves = as_leaves(splats)
    leaves.colors.grad, leaves.depths.grad = torch.randn(50, 4, device="cuda").split((3, 1), dim=1)[0], None
    expected = reference.gradients_in_order(leaves, place)
    assert torch.equal(gradients_in_order(leaves, place), expected)


@needs_cuda
def test_nothing_waits_for_the_device(kernel) -> None:
    pieces = make_pieces((20, 30, 0), "cuda")
    merge(pieces)
    torch.cuda.set_sync_debug_mode("error")
    try:
        splats, place = merge(pieces)
        gradients_in_order(as_leaves(splats), place)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_the_source_compiles_and_exports_its_functions(capability, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    library = kernels.load.__wrapped__("arrival", capability)
    for name in ("merge", "gradients"):
        assert hasattr(library, f"arrival_{name}")
