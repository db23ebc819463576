"""The kernel for what densification knows of rows, and its torch twin on a GPU."""

from __future__ import annotations

import shutil

import pytest
import torch
from statistics_cases import SIZES, assert_adds_up, random_view

from odin_nerfstudio import kernels
from odin_nerfstudio.splat.densify import statistics

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@needs_cuda
@pytest.mark.parametrize(("splats", "rows"), [*SIZES, (20_000, 700)])
def test_statistics_add_up(splats: int, rows: int) -> None:
    assert kernels.available("statistics", torch.device("cuda", torch.cuda.current_device()))
    assert_adds_up(statistics.add_up, splats, rows, "cuda")
    assert_adds_up(statistics._add_up, splats, rows, "cuda")


@needs_cuda
def test_nothing_waits_for_the_device() -> None:
    view, sums = random_view(100, 50, "cuda"), torch.zeros(3, 50, device="cuda")
    statistics.add_up(view, *sums)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        statistics.add_up(view, *sums)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_the_source_compiles_and_exports_its_function(capability, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    assert hasattr(kernels.load.__wrapped__("statistics", capability), "statistics_add")
