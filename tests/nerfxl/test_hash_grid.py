"""The hash grid's table, its torch twin, and the module that uses them."""

from __future__ import annotations

import itertools
import sys
import types
from contextlib import nullcontext

import pytest
import torch
from hash_grid_cases import derivatives
from torch import Tensor, nn

from odin_nerfstudio.errors import UserError
from odin_nerfstudio.kernels import KernelUnavailable
from odin_nerfstudio.nerfxl import hash_grid
from odin_nerfstudio.nerfxl.hash_grid import HashGrid, HashGridConfig, reference, select, select_encoder

SMALL = HashGridConfig(levels=4, features=2, log2_table_size=8, base_resolution=4, max_resolution=32)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_the_default_table_is_as_large_as_tiny_cuda_nns() -> None:
    # What tinycudann 1.7 reports for nerfacto's grid.
    assert HashGridConfig().layout.entries * 2 == 12_196_240


def test_levels_follow_each_other_and_only_the_coarse_ones_are_dense() -> None:
    layout = SMALL.layout
    end = 0
    for level in layout.levels:
        assert level.offset == end
        assert level.entries % 8 == 0 and level.entries <= 2**SMALL.log2_table_size
        assert level.hashed == (level.resolution**3 > level.entries)
        end += level.entries
    assert layout.entries == end
    assert [level.resolution for level in layout.levels] == [4, 8, 16, 32]
    assert [level.hashed for level in layout.levels] == [False, True, True, True]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"features": 3}, "not 3"),
        ({"levels": 0}, "not 0"),
        ({"levels": 33}, "not 33"),
        ({"log2_table_size": 2}, "not 2"),
        ({"base_resolution": 1}, "base_resolution"),
        ({"max_resolution": 8}, "max_resolution"),
    ],
)
def test_impossible_sizes_are_named(change: dict[str, int], named: str) -> None:
    with pytest.raises(UserError, match=named):
        _ = HashGridConfig(**change).layout


def test_a_dense_level_interpolates_affine_functions_exactly() -> None:
    layout = HashGridConfig(levels=3, features=1, log2_table_size=15, base_resolution=5, max_resolution=20).layout
    slope = torch.tensor([0.3, -1.7, 2.9], dtype=torch.float64)
    table = torch.zeros(layout.entries, 1, dtype=torch.float64)
    for level in layout.levels:
        assert not level.hashed
        for z, y, x in itertools.product(range(level.resolution), repeat=3):
            vertex = torch.tensor([x, y, z], dtype=torch.float64)
            at = (vertex - 0.5) / level.scale
            table[level.offset + x + level.resolution * (y + level.resolution * z)] = slope @ at + 0.25
    positions = torch.rand(50, 3, generator=rng(), dtype=torch.float64) * layout.extent
    encoding = reference.encode(positions, table, layout)
    torch.testing.assert_close(encoding, (positions @ slope + 0.25)[:, None].expand(-1, 3), rtol=0, atol=1e-13)


def test_a_hashed_level_reads_the_entries_of_equation_4() -> None:
    layout = HashGridConfig(levels=1, features=1, log2_table_size=5, base_resolution=9, max_resolution=9).layout
    table = torch.rand(layout.entries, 1, generator=rng(), dtype=torch.float64)
    x, y, z = 3, 5, 6
    position = (torch.tensor([[x, y, z]], dtype=torch.float64) - 0.5) / layout.levels[0].scale
    entry = (x ^ (y * 2654435761 % 2**32) ^ (z * 805459861 % 2**32)) % 32
    assert reference.encode(position, table, layout).item() == pytest.approx(table[entry].item(), abs=1e-14)


def test_derivatives_of_the_twin() -> None:
    layout = SMALL.layout
    positions = torch.rand(5, 3, generator=rng(3), dtype=torch.float64, requires_grad=True)
    table = torch.rand(layout.entries, 2, generator=rng(), dtype=torch.float64, requires_grad=True)
    # A step of finite differences must not leave the cell.
    for level in layout.levels:
        fraction = (positions * level.scale + 0.5) % 1
        assert bool(((fraction > 1e-4) & (fraction < 1 - 1e-4)).all())
    assert torch.autograd.gradcheck(lambda p, t: reference.encode(p, t, layout), (positions, table), fast_mode=True)


def test_a_module_begins_as_its_generator_says_and_keeps_its_table() -> None:
    grid, twin = HashGrid(SMALL, rng(1)), HashGrid(SMALL, rng(1))
    assert torch.equal(grid.table, twin.table)
    assert 0 < grid.table.abs().max() <= 1e-4
    assert list(grid.state_dict()) == ["table"]
    positions = torch.rand(7, 3)
    assert grid(positions).shape == (7, grid.out_dim) == (7, 8)
    assert grid.double()(positions.double()).dtype == torch.float64


def test_backends_by_device_and_type() -> None:
    from odin_nerfstudio.nerfxl.hash_grid import numba

    assert select_encoder(torch.device("cpu"), torch.float32) is numba.encode
    assert select_encoder(torch.device("cpu"), torch.float64) is reference.encode
    assert select_encoder(torch.device("meta"), torch.float32) is reference.encode


@pytest.fixture
def no_choice_made():
    def forget() -> None:
        select._on_cuda.cache_clear()
        sys.modules.pop("odin_nerfstudio.nerfxl.hash_grid.tiny_cuda_nn", None)
        vars(hash_grid).pop("tiny_cuda_nn", None)

    forget()
    yield
    forget()


def test_without_a_compiler_one_warning_and_the_twin(monkeypatch: pytest.MonkeyPatch, no_choice_made) -> None:
    from odin_nerfstudio.nerfxl.hash_grid import cuda

    def prepare(device: torch.device) -> None:
        raise KernelUnavailable("There is no CUDA compiler.")

    monkeypatch.setitem(sys.modules, "tinycudann", None)
    monkeypatch.setattr(cuda, "prepare", prepare)
    with pytest.warns(UserWarning, match="There is no CUDA compiler") as caught:
        for _ in range(3):
            assert select_encoder(torch.device("cuda:0"), torch.float32) is reference.encode
    assert len(caught) == 1


def test_operators_have_shapes_without_data() -> None:
    from odin_nerfstudio.nerfxl.hash_grid import cuda

    layout = SMALL.layout
    positions, table = torch.empty(6, 3, device="meta"), torch.empty(layout.entries, 2, device="meta")
    grad = torch.empty(6, layout.out_dim, device="meta")
    found = derivatives(cuda.encode, layout, positions, table, grad)
    assert found.encoding.shape == (6, 8)
    assert found.encoding.t().is_contiguous()
    assert found.table.shape == table.shape
    assert found.positions.shape == positions.shape


class _FakeEncoding(nn.Module):
    """What tinycudann.Encoding is to a caller, computed by the twin."""

    extra = 0

    def __init__(self, n_input_dims: int, encoding_config: dict, dtype: torch.dtype) -> None:
        super().__init__()
        assert (n_input_dims, encoding_config["otype"], dtype) == (3, "HashGrid", torch.float32)
        assert encoding_config["per_level_scale"] == 2.0
        names = ("n_levels", "n_features_per_level", "log2_hashmap_size", "base_resolution")
        self.layout = HashGridConfig(*(encoding_config[name] for name in names), max_resolution=32).layout
        self.params = nn.Parameter(torch.zeros(self.layout.entries * self.layout.features + self.extra))

    def forward(self, x: Tensor) -> Tensor:
        return reference.encode(x, self.params.view(-1, self.layout.features), self.layout)


@pytest.fixture
def fake_tinycudann(monkeypatch: pytest.MonkeyPatch, no_choice_made):
    fake = types.ModuleType("tinycudann")
    fake.Encoding = _FakeEncoding  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tinycudann", fake)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    return fake


def test_tiny_cuda_nn_is_used_with_our_table(fake_tinycudann) -> None:
    encode = select_encoder(torch.device("cuda:0"), torch.float32)
    assert encode.__module__.endswith("tiny_cuda_nn")
    layout = SMALL.layout
    for n in (9, 0):
        positions, table = torch.rand(n, 3, generator=rng()), torch.rand(layout.entries, 2, generator=rng(1))
        grad = torch.rand(n, layout.out_dim, generator=rng(2))
        expected = derivatives(reference.encode, layout, positions, table, grad)
        positions.requires_grad_()
        table.requires_grad_()
        encoding = encode(positions, table, layout)
        encoding.backward(grad)
        assert torch.equal(encoding, expected.encoding)
        assert torch.equal(table.grad, expected.table)


def test_another_layout_of_tiny_cuda_nn_is_refused(fake_tinycudann, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_FakeEncoding, "extra", 8)
    encode = select_encoder(torch.device("cuda:0"), torch.float32)
    with pytest.raises(RuntimeError, match="tiny-cuda-nn has"):
        encode(torch.rand(1, 3), torch.rand(SMALL.layout.entries, 2), SMALL.layout)
