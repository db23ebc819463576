"""Row blocks that travel between the CPUs of ranks while the compute thread goes on (design §3.1, §3.2)."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from enum import IntFlag
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from odin_nerfstudio.comm.world import PATIENCE, World, as_bytes


class PeerError(RuntimeError):
    """Another rank ended, fell out of step or kept this one waiting; the message says which, and for what."""


@dataclass(frozen=True)
class Link:
    """A network to imitate between ranks of one machine: full duplex, the same in and out of every rank."""

    gbps: float | None = None
    """10⁹ bits per second, each way; None for no limit."""
    latency_us: float = 0.0
    """Microseconds that every job takes at least."""

    def seconds(self, sent: int, received: int) -> float:
        """The least time that a job with so many bytes out and in takes."""
        transfer = 0.0 if self.gbps is None else max(sent, received) * 8 / (self.gbps * 1e9)
        return transfer + self.latency_us * 1e-6


class Signal(IntFlag):
    """What a rank may want all of them to know after the same job; it travels with the job's counts."""

    NONE = 0
    STOP = 1
    """The run should end."""
    MEET = 2
    """The ranks should come together: somebody looks at the run, or wants to change how it goes on."""


@dataclass(frozen=True)
class Transfer:
    """What a finished job was, for a timeline."""

    name: str
    unit: int
    start: float
    """``time.perf_counter()`` when this rank began it, seconds. Waiting for the other ranks to begin it is part."""
    end: float
    """When its last block had arrived."""
    sent: int
    """Bytes to other ranks."""
    received: int
    """Bytes from other ranks."""


class Job(Future[list[Tensor]]):
    """The future of one exchange: the blocks that arrived, one for each source rank."""

    def __init__(self, name: str, unit: int, blocks: Sequence[Tensor], signal: Signal) -> None:
        super().__init__()
        self.name = name
        self.unit = unit
        self.signal = signal
        """This rank's; once the job is done, that of all ranks together."""
        self.blocks = [block.detach().contiguous() for block in blocks]

    def __str__(self) -> str:
        return f"{self.name} of unit {self.unit}"


class Exchange:
    """Moves blocks between all ranks on one thread and a process group of its own.

    Jobs are done first in, first out, so every rank must ask for the same jobs in the same order, from one thread.
    All ranks construct and close it together. A world of one rank has neither thread nor group.

    Args:
        world: the ranks.
        link: a slower network to imitate; the time passes on the communication thread.
        on_transfer: called with every finished job, on the communication thread.
    """

    def __init__(
        self, world: World, link: Link | None = None, on_transfer: Callable[[Transfer], None] | None = None
    ) -> None:
        self.world = world
        self._link = link or Link()
        self._on_transfer = on_transfer
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._waiting_for = "no rank yet"
        self._closed = False
        if world.size > 1:
            self._group: Any = dist.new_group(timeout=PATIENCE)
            # A peer that never answers must not keep this process from ending.
            self._thread = threading.Thread(target=self._work, name="odin-exchange", daemon=True)
            self._thread.start()

    def all_to_all(self, blocks: Sequence[Tensor], name: str, unit: int, signal: Signal = Signal.NONE) -> Job:
        """Sends ``blocks[r]`` to rank r and receives one block from every rank, bit by bit.

        Nothing of autograd crosses. The blocks must not change until the job is done; the own one is handed through.

        Args:
            blocks: one (n_r, D) for each rank, n_r ≥ 0; D and type are the same in all blocks of all ranks.
            name: what they are, for messages and timelines.
            unit: the task unit they belong to.
            signal: what the other ranks should know once this job is done.

        Returns:
            A future of one (m_r, D) from each rank r.
        """
        if self._closed:
            raise ValueError("the exchange is closed")
        if len(blocks) != self.world.size:
            raise ValueError(f"{len(blocks)} blocks for {self.world.size} ranks")
        job = Job(name, unit, blocks, signal)
        if self.world.size == 1:
            job.set_result(job.blocks)
        else:
            self._jobs.put(job)
        return job

    def wait(self, job: Job, timeout: float | None = None) -> list[Tensor]:
        """The blocks of ``job``, once they are here.

        Args:
            job: what :meth:`all_to_all` gave.
            timeout: seconds; None waits for as long as it takes.

        Raises:
            PeerError: when another rank ended or asked for another job, or when the time is over.
        """
        try:
            return job.result(timeout)
        except FutureTimeout as error:
            if job.done():  # raised by the job, not by the wait
                raise
            raise PeerError(
                f"{job} did not arrive within {timeout:g} s: rank {self.world.rank} waits for {self._waiting_for}."
            ) from error

    def close(self, timeout: float = 10.0) -> None:
        """Finishes the jobs asked for and ends the thread; leaves it behind if that takes longer than ``timeout`` s."""
        if self._closed:
            return
        self._closed = True
        if self.world.size > 1:
            self._jobs.put(None)
            self._thread.join(timeout)
            if not self._thread.is_alive():
                dist.destroy_process_group(self._group)

    # ------------------------------------------------------------------------------------------ communication thread

    def _work(self) -> None:
        failure: BaseException | None = None
        while (job := self._jobs.get()) is not None:
            try:
                if failure is not None:  # the ranks are out of step from there on
                    raise failure
                job.set_result(self._transfer(job))
            except BaseException as error:
                failure = error
                job.set_exception(error)

    def _transfer(self, job: Job) -> list[Tensor]:
        start = time.perf_counter()
        rank, blocks = self.world.rank, job.blocks
        peers = [peer for peer in range(self.world.size) if peer != rank]
        # Which job it is travels with the counts too: blocks of two different jobs must not pass for each other.
        tag = zlib.crc32(str(job).encode())
        headers = torch.tensor([[len(block), tag, job.signal] for block in blocks], device=blocks[0].device)
        theirs = torch.zeros_like(headers)
        self._swap(job, {peer: headers[peer] for peer in peers}, {peer: theirs[peer] for peer in peers})
        counts = theirs.tolist()
        for peer in peers:
            if counts[peer][1] != tag:
                raise PeerError(f"rank {peer} is not exchanging {job}, as rank {rank} is: the ranks fell out of step.")
            job.signal |= Signal(counts[peer][2])
        arrived = [block.new_empty((counts[source][0], *blocks[0].shape[1:])) for source, block in enumerate(blocks)]
        arrived[rank] = blocks[rank]
        begun = time.perf_counter()
        outgoing = {peer: as_bytes(blocks[peer]) for peer in peers if blocks[peer].numel()}
        incoming = {peer: as_bytes(arrived[peer]) for peer in peers if arrived[peer].numel()}
        self._swap(job, outgoing, incoming)
        sent, received = (sum(block.numel() for block in side.values()) for side in (outgoing, incoming))
        time.sleep(max(0.0, begun + self._link.seconds(sent, received) - time.perf_counter()))
        job.blocks.clear()
        if self._on_transfer is not None:
            self._on_transfer(Transfer(job.name, job.unit, start, time.perf_counter(), sent, received))
        return arrived

    def _swap(self, job: Job, outgoing: dict[int, Tensor], incoming: dict[int, Tensor]) -> None:
        """Sends and receives one contiguous tensor for each peer named; returns when all have arrived."""
        operations = [dist.P2POp(dist.irecv, tensor, peer, self._group) for peer, tensor in incoming.items()]
        operations += [dist.P2POp(dist.isend, tensor, peer, self._group) for peer, tensor in outgoing.items()]
        if not operations:
            return
        works = dist.batch_isend_irecv(operations)
        peers = [f"rank {operation.peer}" for operation in operations]
        for work, peer in zip(works, peers, strict=True):
            self._waiting_for = f"{peer} in {job}"
            try:
                work.wait()
            except RuntimeError as error:
                raise PeerError(f"{job}: {peer} ended or cannot be reached from rank {self.world.rank}.") from error
