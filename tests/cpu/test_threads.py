"""Work items are done once each, whatever calls."""

import multiprocessing
from concurrent.futures import ThreadPoolExecutor

import numba
import numpy as np
import pytest
import torch

from odin_nerfstudio.cpu.threads import claim, count, run, take, use


@numba.njit(nogil=True)
def _tally(counter, items, tally):
    while True:
        i = take(counter)
        if i >= items:
            break
        tally[i] += 1


def _tallied(items: int) -> np.ndarray:
    tally = np.zeros(items, np.int64)
    run(_tally, items, tally)
    return tally


@pytest.fixture(params=[1, 2, 5])
def threads(request):
    before = count()
    use(request.param)
    yield request.param
    use(before)


@pytest.mark.parametrize("items", [0, 1, 2, 1000])
def test_every_item_once(threads: int, items: int) -> None:
    assert np.all(_tallied(items) == 1)


def test_concurrent_callers(threads: int) -> None:
    with ThreadPoolExecutor(8) as pool:
        assert all(np.all(tally == 1) for tally in pool.map(_tallied, [500] * 64))


def _in_child() -> None:
    use(2)
    assert np.all(_tallied(100) == 1)


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="this system cannot fork")
def test_after_a_fork(threads: int) -> None:
    _tallied(100)
    child = multiprocessing.get_context("fork").Process(target=_in_child)
    child.start()
    child.join(60)
    assert child.exitcode == 0


def test_an_error_in_a_kernel_reaches_the_caller(threads: int) -> None:
    with pytest.raises(numba.TypingError):
        run(_tally, 3, "not an array")


def test_torch_keeps_one_thread_when_kernels_claim_the_others(threads: int) -> None:
    before = torch.get_num_threads()
    try:
        claim()
        assert (torch.get_num_threads(), count()) == (1, threads)
    finally:
        torch.set_num_threads(before)
