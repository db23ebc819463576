"""Runs a function of a test on several real processes joined by gloo."""

from __future__ import annotations

import inspect
import multiprocessing
import pickle
import runpy
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from odin_nerfstudio.comm.world import World

# A server that has imported everything forks ranks in no time, and unlike pytest's process it has no threads.
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["nerfstudio.scripts.train", "odin_nerfstudio.methods", "odin_nerfstudio.comm.world"])


def run_ranks(
    size: int, work: Callable[..., Any], *args: Any, timeout: float = 60.0, dying: tuple[int, ...] = ()
) -> list[Any]:
    """What ``work(world, *args)`` returned on each of ``size`` ranks; None from those that are meant to die.

    ``work`` is a function at the top of a test module; a failure on any rank fails the test with its traceback.
    """
    with TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(size):
            ours, theirs = _SERVER.Pipe(duplex=False)
            target = (inspect.getfile(work), work.__name__, args)
            process = _SERVER.Process(
                target=_run, args=(theirs, rank, size, f"file://{folder}/meeting", timeout, *target)
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        deadline = time.monotonic() + timeout
        results: list[Any] = [None] * size
        failures = []
        for rank, pipe in enumerate(pipes):
            try:
                in_time = pipe.poll(max(0.0, deadline - time.monotonic()))
                done, value = pickle.loads(pipe.recv_bytes()) if in_time else (False, "timed out")
            except EOFError:
                done, value = rank in dying, None
            results[rank] = value
            if not done:
                failures.append(f"rank {rank}: {value}")
        for process in processes:
            process.join(max(0.5, deadline - time.monotonic()) if not failures else 0.5)
            if process.is_alive():
                process.kill()
                failures.append("a process did not end")
    assert not failures, "\n".join(failures)
    return results


def _run(
    pipe: Connection, rank: int, size: int, meeting: str, timeout: float, file: str, name: str, args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    try:
        # A world of one must do without torch.distributed.
        if size > 1:
            dist.init_process_group(
                "gloo", init_method=meeting, rank=rank, world_size=size, timeout=timedelta(seconds=timeout)
            )
        value = runpy.run_path(file, run_name=Path(file).stem)[name](World.current(), *args)
        # Connections would send handles of shared memory, which dies with this process.
        pipe.send_bytes(pickle.dumps((True, value)))
        if size > 1:
            dist.destroy_process_group()
    except BaseException:
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
