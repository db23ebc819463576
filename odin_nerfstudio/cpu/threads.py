"""Kernels on several threads without numba's threading layers.

Python threads run kernels that release the GIL and draw the numbers of their work items from one atomic counter.
Unlike numba's own layers this may be called from several threads at once (a viewer beside a training loop), survives a
fork, takes the thread count from torch (which a launcher sets for every rank), and compiles in a fraction of the time.
Which thread does an item never shows in the result: items write to places of their own.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic


@intrinsic
def take(typingctx, counter):
    """The next work item: adds one to ``counter`` (int64 array of one) atomically and returns what was there."""

    def codegen(context, builder, sig, args):
        data = context.make_array(sig.args[0])(context, builder, args[0]).data
        return builder.atomic_rmw("add", data, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(counter), codegen


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=os.cpu_count(), thread_name_prefix="odin-kernel")


if hasattr(os, "register_at_fork"):  # not on Windows
    # The threads of a pool do not survive a fork.
    os.register_at_fork(after_in_child=_pool.cache_clear)


_count: int | None = None


def count() -> int:
    """Number of threads that kernels use: what :func:`use` said last, or as many as torch."""
    return _count or torch.get_num_threads()


def use(number: int | None) -> None:
    """Sets the number of threads that kernels use, at least 1; None: as many as torch."""
    global _count
    _count = number


def claim() -> None:
    """Leaves this process's threads to kernels, and torch's own operations one of them.

    The threads of OpenMP, which would share the many small operations between kernels, wait for each other by spinning:
    as soon as anything else runs on the machine a training step takes ten times as long.
    """
    use(count())
    torch.set_num_threads(1)


def run(kernel: Callable[..., None], items: int, *args: object) -> None:
    """Calls ``kernel(counter, items, *args)`` on this thread and on up to ``count() − 1`` others.

    Args:
        kernel: releases the GIL, as ``cpu.jit`` compiles it, and loops ``i = take(counter)`` until ``i >= items``.
        items: number of work items.
        args: passed on.
    """
    counter = np.zeros(1, dtype=np.int64)
    helpers = min(count(), items) - 1
    futures = [_pool().submit(kernel, counter, items, *args) for _ in range(helpers)]
    kernel(counter, items, *args)
    for future in futures:
        # One that has not begun would find nothing left to do.
        if not future.cancel():
            future.result()
