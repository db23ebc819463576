"""The kernels for tables of versions, and their torch twins on a GPU."""

from __future__ import annotations

import shutil

import pytest
import torch
from versions_cases import SIZES, assert_hands_out, assert_publishes

from odin_nerfstudio import kernels
from odin_nerfstudio.shadow import versions
from odin_nerfstudio.shadow.bitmap import Bitmap

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@needs_cuda
@pytest.mark.parametrize("size", [*SIZES, 300_007])
def test_tables_are_changed_as_they_should(size: int) -> None:
    assert kernels.available("versions", torch.device("cuda", torch.cuda.current_device()))
    assert_hands_out(versions.hand_out, size, "cuda")
    assert_publishes(versions.publish, size, "cuda")
    assert_hands_out(versions._hand_out, size, "cuda")
    assert_publishes(versions._publish, size, "cuda")


@needs_cuda
def test_nothing_waits_for_the_device() -> None:
    rows = Bitmap.from_mask(torch.ones(100, dtype=torch.bool, device="cuda"))
    read, now = torch.zeros(2, 100, dtype=torch.int32, device="cuda")
    versions.hand_out(rows, now, read)
    torch.cuda.set_sync_debug_mode("error")
    try:
        versions.hand_out(rows, now, read)
        versions.publish(rows, rows, read, now, 3)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_the_source_compiles_and_exports_its_functions(capability, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    library = kernels.load.__wrapped__("versions", capability)
    for name in ("hand_out", "publish"):
        assert hasattr(library, f"versions_{name}")
