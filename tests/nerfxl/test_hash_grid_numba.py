"""The CPU kernels against the float64 twin, and against themselves with other numbers of threads."""

from __future__ import annotations

import pytest
import torch
from hash_grid_cases import ROUNDOFF, assert_agrees_with_twin, assert_within, derivatives, dyadic
from hypothesis import given, settings
from hypothesis import strategies as st

from odin_nerfstudio.nerfxl.hash_grid import HashGridConfig, numba, reference


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@settings(max_examples=60, deadline=None)
@given(
    levels=st.integers(1, 5),
    features=st.sampled_from([1, 2, 4, 8]),
    log2_table_size=st.integers(3, 15),
    base_resolution=st.integers(2, 9),
    n=st.integers(0, 60),
    seed=st.integers(0, 2**31),
)
def test_values_and_gradients_are_the_twins(levels, features, log2_table_size, base_resolution, n, seed) -> None:
    config = dyadic(levels, features, log2_table_size, base_resolution)
    assert_agrees_with_twin(numba.encode, config, n, rng(seed))


def test_more_positions_than_a_block() -> None:
    assert_agrees_with_twin(numba.encode, dyadic(3, 2, 10, 6), 2 * 4096 + 17, rng())


def test_values_on_the_default_grid() -> None:
    layout = HashGridConfig().layout
    positions = torch.rand(500, 3, generator=rng())
    table = torch.rand(layout.entries, 2, generator=rng(1)) * 2 - 1
    found = numba.encode(positions, table, layout)
    expected = reference.encode(positions.double(), table.double(), layout)
    # x·scale + ½ is rounded twice, and a value changes by at most 2 per cell along each axis.
    scales = torch.tensor([level.scale for level in layout.levels]).double().repeat_interleave(2)
    assert_within(found, expected, 6 * 2 * ROUNDOFF * (scales + 1) + 12 * ROUNDOFF)


@pytest.fixture
def restored_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_the_bits_do_not_depend_on_threads(restored_threads) -> None:
    layout = HashGridConfig(levels=5, features=2, log2_table_size=11, base_resolution=8, max_resolution=200).layout
    n = 3 * 4096 + 5
    inputs = (torch.rand(n, 3, generator=rng()), torch.rand(layout.entries, 2), torch.randn(n, layout.out_dim))
    runs = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        runs.append(derivatives(numba.encode, layout, *inputs))
    for other in runs[1:]:
        assert torch.equal(other.encoding, runs[0].encoding)
        assert torch.equal(other.table, runs[0].table)
        assert torch.equal(other.positions, runs[0].positions)


def test_any_layout_of_memory_is_taken() -> None:
    layout = dyadic(2, 2, 8, 4).layout
    positions, table = torch.rand(6, 3, generator=rng()), torch.rand(layout.entries, 2, generator=rng(1))
    grad = torch.rand(6, layout.out_dim, generator=rng(2))
    plain = derivatives(numba.encode, layout, positions, table, grad)
    strided = [tensor.t().contiguous().t() for tensor in (positions, table, grad)]
    other = derivatives(numba.encode, layout, *strided)
    assert torch.equal(plain.encoding, other.encoding)
    assert torch.equal(plain.table, other.table)
    assert torch.equal(plain.positions, other.positions)


def test_positions_outside_read_no_foreign_memory() -> None:
    layout = dyadic(4, 2, 9, 4).layout
    table = torch.rand(layout.entries, 2, generator=rng())
    grad = torch.ones(6, layout.out_dim)
    far = torch.tensor([-0.1, 1.7, -1e6, 1e9, float("inf"), float("nan")])[:, None].expand(6, 3)
    found = derivatives(numba.encode, layout, far, table, grad)
    assert bool((found.encoding[:4] >= 0).all()) and bool((found.encoding[:4] <= 1).all())
    assert bool(found.encoding[4:].isnan().all())
