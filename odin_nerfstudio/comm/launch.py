"""One process for each rank, on torchrun's agent, and a sentence about the rank that ended them all (design §5)."""

from __future__ import annotations

import logging
import os
import pickle
import pkgutil
import re
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure, get_error_handler
from torch.distributed.launcher.api import LaunchConfig, launch_agent

from odin_nerfstudio.comm.world import PATIENCE, World
from odin_nerfstudio.errors import UserError

SECONDS_TO_SAVE = 300
"""After Ctrl-C ranks may take this long to save what they learned; a second Ctrl-C ends them at once."""
INTERRUPTED = 128 + signal.SIGINT
"""Exit status after Ctrl-C, as shells have it."""
_LOST_PEER = r"PeerError|Dist\w*Error|RuntimeError: (?s:.*)(Connection (closed|reset) by peer|NCCL)"
"""What an exception says where a rank ended because another one had."""


@dataclass(frozen=True)
class Layout:
    """Which ranks there are, and where. Rank r of node n is global rank n · ranks_per_node + r."""

    ranks_per_node: int = 1
    nodes: int = 1
    node: int = 0
    """Number of this machine."""
    endpoint: str = ""
    """HOST:PORT of node 0, where nodes meet; only for more than one."""
    device_type: Literal["cpu", "cuda"] = "cpu"
    """gloo joins CPUs, NCCL joins GPUs."""

    def check(self) -> None:
        """Checks what can be known before anything starts.

        Raises:
            UserError: naming the flag of ``odin-train``.
        """
        if self.ranks_per_node < 1:
            raise UserError(f"--nproc-per-node {self.ranks_per_node}: at least one process is needed.")
        if self.nodes < 1 or not 0 <= self.node < self.nodes:
            raise UserError(f"--node-rank {self.node}: with --nnodes {self.nodes} it must be 0 … {self.nodes - 1}.")
        if self.nodes > 1 and not re.fullmatch(r"\S+:\d+", self.endpoint):
            raise UserError(f"--nnodes {self.nodes} needs --rdzv-endpoint HOST:PORT, a free port of node 0.")
        if self.device_type == "cuda" and self.ranks_per_node > torch.cuda.device_count():
            raise UserError(
                f"--nproc-per-node {self.ranks_per_node}: torch sees {torch.cuda.device_count()} GPUs here, "
                "and every process needs its own. --machine.device-type cpu trains on CPUs."
            )


def launch(target: str, args: tuple[Any, ...], layout: Layout) -> None:
    """Calls ``target(world, *args)`` on every rank and returns when all have returned.

    A single rank runs in this process, without torch.distributed. Otherwise only global rank 0 prints, the threads of
    a node's cores are divided among its ranks unless OMP_NUM_THREADS is set, and when one rank fails the others of its
    node are ended, within 30 s. Signals to this process reach every rank.

    Args:
        target: ``package.module:function``.
        args: anything that can be pickled.
        layout: which ranks.

    Raises:
        UserError: naming the rank that failed and how.
        SystemExit: after a signal, with the status that shells give and a word about it on stderr.
    """
    layout.check()
    if layout.ranks_per_node * layout.nodes == 1:
        pkgutil.resolve_name(target)(World.current(_device(layout.device_type, 0)), *args)
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // layout.ranks_per_node)))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SECONDS_TO_SAVE))
    if layout.nodes == 1 and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with TemporaryDirectory(prefix="odin-ranks-") as folder:
        job = Path(folder) / "job"
        job.write_bytes(pickle.dumps((target, args, layout.device_type)))
        try:
            launch_agent(_launch_config(layout, folder), sys.executable, ["-m", __spec__.name, str(job)])
        except ChildFailedError as error:
            cause = _first(error.failures)
            if error.failures[cause].exitcode not in (INTERRUPTED, -signal.SIGINT):
                raise UserError(_sentence(cause, error.failures[cause], Path(folder))) from None
            ending = signal.SIGINT  # which reached a rank, not this process
        except SignalException as error:
            ending = error.sigval
        else:
            return
    print("interrupted" if ending == signal.SIGINT else f"ended by {ending.name}", "on all ranks.", file=sys.stderr)
    raise SystemExit(128 + ending)


def _launch_config(layout: Layout, folder: str) -> LaunchConfig:
    # What the agent logs speaks of its own workings; every message of its modules passes this logger.
    logging.getLogger("torch.distributed.elastic").propagate = False
    logging.getLogger("torch.distributed.elastic").addHandler(logging.NullHandler())
    silent = [rank for rank in range(layout.ranks_per_node) if layout.node or rank]
    meeting: dict[str, Any] = {"rdzv_backend": "c10d", "rdzv_endpoint": "127.0.0.1:0", "local_addr": "127.0.0.1"}
    if layout.nodes > 1:
        meeting = {"rdzv_backend": "static", "rdzv_endpoint": layout.endpoint, "rdzv_configs": {"rank": layout.node}}
    return LaunchConfig(
        min_nodes=layout.nodes,
        max_nodes=layout.nodes,
        nproc_per_node=layout.ranks_per_node,
        run_id="odin",
        role="rank",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=folder, redirects=dict.fromkeys(silent, Std.ALL)),
        **meeting,
    )


def _first(failures: dict[int, ProcessFailure]) -> int:
    """The rank whose failure the others followed from."""
    # Ranks that lost a peer often notice before the agent notices the peer; those the agent ended come last.
    return min(failures, key=lambda rank: (_is_consequence(failures[rank]), failures[rank].timestamp))


def _sentence(rank: int, failure: ProcessFailure, folder: Path) -> str:
    """What is to be said of a rank's failure; where it came unexpected, prints its traceback."""
    if failure.exitcode < 0:
        hint = " The kernel does that when memory runs out." if failure.exitcode == -signal.SIGKILL else ""
        return f"rank {rank} was killed by {failure.signal_name()}.{hint}"
    message, trace = _recorded(failure)
    if mistake := re.match(r"SystemExit: error: |UserError: ", message):
        return f"rank {rank}: {message[mistake.end() :]}"
    if _is_consequence(failure):  # the cause is on another node
        return f"rank {rank} lost another rank. {message}"
    if not message:
        logs = folder.glob(f"*/attempt_0/{failure.local_rank}/stderr.log")
        trace = "".join(log.read_text(errors="replace") for log in logs).rstrip()
        message = trace.rpartition("\n")[2]
    if trace:
        print(trace, file=sys.stderr)
    return f"rank {rank} ended with status {failure.exitcode}" + (f": {message}" if message else ".")


def _is_consequence(failure: ProcessFailure) -> int:
    if failure.exitcode == -signal.SIGTERM:
        return 2
    return int(re.match(_LOST_PEER, _recorded(failure)[0]) is not None)


def _recorded(failure: ProcessFailure) -> tuple[str, str]:
    """The exception's line and traceback that a rank left behind; empty where it left none."""
    message: Any = failure.message
    return (message["message"], message["extraInfo"]["py_callstack"]) if isinstance(message, dict) else ("", "")


def run_rank(file: Path) -> None:
    """What the agent starts: joins the process group and calls the target. Never returns where that fails."""
    try:
        target, args, device_type = pickle.loads(file.read_bytes())
        local_rank = int(os.environ["LOCAL_RANK"])
        device = _device(device_type, local_rank)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=PATIENCE)
        pkgutil.resolve_name(target)(World.current(device, local_rank), *args)
        dist.destroy_process_group()
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            return
        interrupted = isinstance(error, KeyboardInterrupt)
        if not interrupted:
            get_error_handler().record_exception(error)
        sys.stdout.flush()
        sys.stderr.flush()
        # At once: threads that wait for other ranks or for a viewer would keep a failed rank from ending.
        os._exit(INTERRUPTED if interrupted else 1)


def _device(device_type: str, local_rank: int) -> torch.device:
    if device_type == "cuda":
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    return torch.device("cpu")


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]))
