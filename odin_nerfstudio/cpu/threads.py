"""Kernels on several threads without numba's threading layers.

Python threads run kernels that release the GIL and draw the numbers of their work items from one atomic counter.
Unlike numba's own layers this may be called from several threads at once (a viewer beside a training loop), survives a
fork, takes the thread count from ``torch.get_num_threads()`` (which torchrun sets to 1), and compiles in a fraction of
the time. Which thread does an item never shows in the result: items write to places of their own.
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


def run(kernel: Callable[..., None], items: int, *args: object) -> None:
    """Calls ``kernel(counter, items, *args)`` on this thread and on up to ``torch.get_num_threads() − 1`` others.

    Args:
        kernel: releases the GIL, as ``cpu.jit`` compiles it, and loops ``i = take(counter)`` until ``i >= items``.
        items: number of work items.
        args: passed on.
    """
    counter = np.zeros(1, dtype=np.int64)
    helpers = min(torch.get_num_threads(), items) - 1
    futures = [_pool().submit(kernel, counter, items, *args) for _ in range(helpers)]
    kernel(counter, items, *args)
    for future in futures:
        # One that has not begun would find nothing left to do.
        if not future.cancel():
            future.result()
