"""The CUDA kernels against the float64 twin."""

from __future__ import annotations

import shutil

import pytest
import torch
from hash_grid_cases import assert_agrees_with_twin, assert_within, derivatives, dyadic

from odin_nerfstudio import kernels
from odin_nerfstudio.nerfxl.hash_grid import HashGrid, HashGridConfig, reference

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(scope="module")
def encode():
    from odin_nerfstudio.nerfxl.hash_grid import cuda

    cuda.prepare(torch.device("cuda", torch.cuda.current_device()))
    return cuda.encode


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@needs_cuda
@pytest.mark.parametrize("features", [1, 2, 4, 8])
@pytest.mark.parametrize(("levels", "log2_table_size", "base_resolution"), [(1, 3, 2), (5, 9, 4), (4, 15, 3)])
@pytest.mark.parametrize("n", [0, 1, 300])
def test_values_and_gradients_are_the_twins(encode, features, levels, log2_table_size, base_resolution, n) -> None:
    assert_agrees_with_twin(encode, dyadic(levels, features, log2_table_size, base_resolution), n, rng(n), "cuda")


@needs_cuda
def test_the_default_grid_is_the_twins(encode) -> None:
    layout = HashGridConfig().layout
    n = 20_000
    positions, table = torch.rand(n, 3, generator=rng()), torch.rand(layout.entries, 2, generator=rng(1)) * 2 - 1
    grad = torch.randn(n, layout.out_dim, generator=rng(2))
    expected = derivatives(reference.encode, layout, *(tensor.double().cuda() for tensor in (positions, table, grad)))
    found = derivatives(encode, layout, *(tensor.cuda() for tensor in (positions, table, grad)))
    # x·scale + ½ is rounded once, by up to 2⁻²⁴ · 2,048: a weight changes by that along an axis, a value by twice that.
    fraction = 2.0**-24 * 2048
    assert_within(found.encoding, expected.encoding.cpu(), torch.tensor(6 * fraction))
    assert (found.table - expected.table).norm() < 3 * fraction * expected.table.norm()


@needs_cuda
def test_gradient_of_positions_is_deterministic(encode) -> None:
    layout = HashGridConfig(log2_table_size=14).layout
    inputs = [torch.rand(*shape, device="cuda") for shape in ((5000, 3), (layout.entries, 2), (5000, layout.out_dim))]
    first, second = (derivatives(encode, layout, *inputs) for _ in range(2))
    assert torch.equal(first.encoding, second.encoding)
    assert torch.equal(first.positions, second.positions)


@needs_cuda
def test_operators_keep_torchs_rules(encode) -> None:
    layout = dyadic(2, 2, 8, 4).layout
    arguments = (
        torch.rand(10, 3, device="cuda", requires_grad=True),
        torch.rand(layout.entries, 2, device="cuda", requires_grad=True),
        *(2, 2, 8, 4, 8),
    )
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.odin_nerfstudio.hash_grid.default, arguments, test_utils=tests)


@needs_cuda
def test_the_module_runs_on_the_device(encode) -> None:
    grid = HashGrid(HashGridConfig(log2_table_size=12), rng()).cuda()
    positions = torch.rand(100, 3, generator=rng()).cuda()
    expected = reference.encode(positions.double(), grid.table.double(), grid.layout)
    torch.testing.assert_close(grid(positions).double(), expected, rtol=0, atol=1e-6)


@needs_cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_device_that_is_not_the_current_one(encode) -> None:
    assert_agrees_with_twin(encode, dyadic(3, 2, 9, 4), 100, rng(), "cuda:1")
    assert torch.cuda.current_device() == 0


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_the_source_compiles_and_exports_its_functions(capability, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    library = kernels.load.__wrapped__("hash_grid", capability)
    for name in ("hash_grid_forward", "hash_grid_table_backward", "hash_grid_positions_backward"):
        assert hasattr(library, name)
