"""The sixteen-lane type against numpy."""

import numba
import numpy as np
import pytest

from odin_nerfstudio.splat.raster.numba.lanes import (
    WIDTH,
    count,
    exponential,
    fill,
    load,
    magnitude,
    multiply_add,
    ramp,
    select,
    store,
    total,
)


@numba.njit
def _exponentials(x, out):
    for i in range(0, x.shape[0], WIDTH):
        store(out, i, exponential(load(x, i)))


@numba.njit
def _arithmetic(x, y, scalar, out):
    a, b = load(x, 0), load(y, 0)
    store(out, 0 * WIDTH, a + b)
    store(out, 1 * WIDTH, scalar - a)
    store(out, 2 * WIDTH, a * scalar)
    store(out, 3 * WIDTH, a / b)
    store(out, 4 * WIDTH, multiply_add(a, scalar, b))
    store(out, 5 * WIDTH, select((a < b) & (a >= scalar), a, scalar))
    store(out, 6 * WIDTH, magnitude(a))
    store(out, 7 * WIDTH, fill(scalar) + ramp())
    return count(a > b), total(a)


def test_exponential_is_accurate() -> None:
    x = np.linspace(-87, 0, 160000, dtype=np.float32)
    out = np.empty_like(x)
    _exponentials(x, out)
    truth = np.exp(x.astype(np.float64))
    assert np.max(np.abs(out - truth) / truth) < 2e-7


@pytest.mark.parametrize("x", [-88.0, -1e30, -np.inf, np.nan])
def test_exponential_of_what_is_far_below_is_negligible(x: float) -> None:
    out = np.empty(WIDTH, np.float32)
    _exponentials(np.full(WIDTH, x, np.float32), out)
    assert np.all((out > 0) & (out < 1e-37))


def test_arithmetic_is_numpys() -> None:
    random = np.random.default_rng(0)
    x, y = random.normal(size=(2, WIDTH)).astype(np.float32)
    scalar = np.float32(0.1)
    out = np.empty(8 * WIDTH, np.float32)
    larger, sum_of_lanes = _arithmetic(x, y, scalar, out)
    expected = [x + y, scalar - x, x * scalar, x / y, x * scalar + y, np.where((x < y) & (x >= scalar), x, scalar)]
    expected += [np.abs(x), scalar + np.arange(WIDTH, dtype=np.float32)]
    np.testing.assert_allclose(out.reshape(8, WIDTH), expected, rtol=1e-6, atol=1e-7)
    assert larger == np.sum(x > y)
    halves = x
    while len(halves) > 1:
        halves = halves[: len(halves) // 2] + halves[len(halves) // 2 :]
    assert sum_of_lanes == halves[0]
