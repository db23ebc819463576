"""Row blocks that travel between GPUs in the order of streams, without the host waiting for any of them.

On CPUs (gloo) the same calls work, and a wait is one of the host.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from odin_nerfstudio.comm.exchange import PeerError, Signal
from odin_nerfstudio.comm.world import PATIENCE, World
from odin_nerfstudio.shadow.readback import HostCounts, counts_to_host
from odin_nerfstudio.shadow.stopwatch import Mark, Stopwatch


@dataclass(frozen=True)
class DeviceTransfer:
    """What a transfer was, for a timeline."""

    name: str
    unit: int
    begin: Mark
    """When this rank's part was ready. Waiting for the other ranks is part of the transfer."""
    end: Mark
    """When all had arrived."""
    sent: int
    """Bytes to other ranks."""
    received: int
    """Bytes from other ranks."""


@dataclass(eq=False)
class DeviceJob:
    """One exchange that was queued."""

    name: str
    unit: int
    arrived: Tensor
    """(Σ m_r, D) what comes from all ranks, in their order; complete where :meth:`DeviceExchange.wait` was called."""
    counts: list[int]
    """m_r: rows from each rank."""
    sent: Tensor
    """What this rank sends; its memory must not be used for anything else before the exchange is over."""
    signal: Signal = Signal.NONE
    """Of all ranks together, if they were asked."""
    works: Sequence[Any] = ()
    end: Mark = None
    """When all had arrived, if anybody wanted to know and waited for it."""


@dataclass(eq=False)
class Gathered:
    """Integers of every rank that the host will want, one rank after the other."""

    _host: HostCounts | None
    _everyone: Tensor | None = None
    _mine: Tensor | None = None
    _work: Any = None
    _stream: torch.cuda.Stream | None = None

    def get(self) -> list[int]:
        """The numbers. Waits for the ranks to have sent them, not for what this device was asked for since."""
        if self._host is None:
            assert self._everyone is not None
            with torch.cuda.stream(self._stream):  # the current one may have much to do before it comes to a wait
                self._work.wait()
                self._host = counts_to_host(self._everyone)
        return self._host.get()


class DeviceExchange:
    """Moves blocks between the GPUs of all ranks, on a process group of its own (NCCL).

    All ranks ask for the same exchanges in the same order, from one thread. Sizes that both sides know need no round
    trip; where they are not given, the ranks tell each other first and wait for that. A world of one rank has no group.

    Args:
        world: the ranks.
        on_transfer: called with the exchanges of units that are recorded.
        is_recorded: whether anybody wants to know how long exchanges of a unit take.
        stopwatch: of this device.
    """

    def __init__(
        self,
        world: World,
        on_transfer: Callable[[DeviceTransfer], None] | None = None,
        is_recorded: Callable[[int], bool] = lambda _: True,
        stopwatch: Stopwatch | None = None,
    ) -> None:
        self.world = world
        self._on_transfer, self._is_recorded, self._stopwatch = on_transfer, is_recorded, stopwatch
        self._unmarked: list[tuple[DeviceJob, Mark, int, int]] = []
        self._aside = torch.cuda.Stream(world.device) if world.device.type == "cuda" else None
        if world.size > 1:
            options = None
            if self._aside is not None:
                options = dist.ProcessGroupNCCL.Options()
                options.is_high_priority_stream = True  # what others wait for goes before what they do not
            self._group: Any = dist.new_group(timeout=PATIENCE, pg_options=options)

    def all_to_all(self, blocks: Sequence[Tensor], name: str, unit: int, signal: Signal = Signal.NONE) -> DeviceJob:
        """Sends ``blocks[r]`` ((n_r, D)) to rank r; the ranks first tell each other how many rows there are.

        Raises:
            PeerError: when another rank asks for another exchange.
            ValueError: when there is not a block for each rank.
        """
        if len(blocks) != self.world.size:
            raise ValueError(f"{len(blocks)} blocks for {self.world.size} ranks")
        counts, splits = [len(block) for block in blocks], [len(block) for block in blocks]
        if self.world.size > 1:
            tag = zlib.crc32(f"{name} of unit {unit}".encode())
            mine = torch.tensor([[count, tag, signal] for count in splits], device=self.world.device)
            theirs = torch.empty_like(mine)
            dist.all_to_all_single(theirs, mine, group=self._group)
            for peer, (count, other, given) in enumerate(theirs.tolist()):
                if other != tag:
                    raise PeerError(f"rank {peer} is not exchanging {name} of unit {unit}: the ranks fell out of step.")
                counts[peer], signal = count, signal | Signal(given)
        job = self.swap(torch.cat([block.detach() for block in blocks]), splits, counts, name, unit)
        job.signal = signal
        return job

    def swap(self, block: Tensor, splits: list[int], counts: list[int], name: str, unit: int) -> DeviceJob:
        """Sends the first ``splits[0]`` rows to rank 0 and so on, and receives ``counts[r]`` rows from rank r.

        Args:
            block: (Σ splits, D) contiguous; must not change until the exchange is over.
            splits: rows for each rank.
            counts: rows from each rank.
            name: what they are, for messages and timelines.
            unit: the task unit they belong to.
        """
        if self.world.size == 1:
            return DeviceJob(name, unit, block, counts, block)
        arrived = block.new_empty((sum(counts), *block.shape[1:]))
        begin = self._begin(unit)
        work = dist.all_to_all_single(arrived, block, counts, splits, group=self._group, async_op=True)
        job = DeviceJob(name, unit, arrived, counts, block, works=[work])
        rank, width = self.world.rank, block[:1].numel() * block.element_size()
        self._tell(job, begin, (sum(splits) - splits[rank]) * width, (sum(counts) - counts[rank]) * width)
        return job

    def to_all(self, block: Tensor, counts: list[int], name: str, unit: int) -> DeviceJob:
        """Sends the same (n, D) ``block`` to all ranks; rank r's has ``counts[r]`` rows."""
        if self.world.size == 1:
            return DeviceJob(name, unit, block, counts, block)
        arrived = block.new_empty((sum(counts), *block.shape[1:]))
        parts = arrived.split(counts)
        begin = self._begin(unit)
        parts[self.world.rank].copy_(block)
        works = [
            dist.broadcast(part, source, group=self._group, async_op=True)
            for source, part in enumerate(parts)
            if len(part)
        ]
        job = DeviceJob(name, unit, arrived, counts, block, works=works)
        width = block[:1].numel() * block.element_size()
        sent = len(block) * width * (self.world.size - 1)
        self._tell(job, begin, sent, (sum(counts) - len(block)) * width)
        return job

    def wait(self, job: DeviceJob) -> list[Tensor]:
        """One (m_r, D) from each rank; the current stream waits for them, the host does not."""
        self._mark_ends()
        for work in job.works:
            work.wait()
        return list(job.arrived.split(job.counts))

    def gather(self, numbers: Tensor) -> Gathered:
        """Sends (K,) integers to all ranks; no stream waits for theirs."""
        if self.world.size == 1:
            return Gathered(counts_to_host(numbers))
        everyone = numbers.new_empty(self.world.size * numbers.shape[0])
        work = dist.all_gather_into_tensor(everyone, numbers, group=self._group, async_op=True)
        return Gathered(None, everyone, numbers, work, self._aside)

    def close(self) -> None:
        """Ends the process group; all ranks together."""
        if self.world.size > 1:
            dist.destroy_process_group(self._group)

    def _begin(self, unit: int) -> Mark:
        """The mark at which a transfer is ready, if anybody wants to know."""
        self._mark_ends()
        watched = self._on_transfer is not None and self._stopwatch is not None and self._is_recorded(unit)
        return self._stopwatch.mark() if watched and self._stopwatch is not None else None

    def _tell(self, job: DeviceJob, begin: Mark, sent: int, received: int) -> None:
        if begin is not None:
            self._unmarked.append((job, begin, sent, received))

    def _mark_ends(self) -> None:
        """Marks where the transfers end that were queued before: with the next call, since to wait for one that was
        queued just now takes the host long."""
        for job, begin, sent, received in self._unmarked:
            assert self._on_transfer is not None and self._stopwatch is not None
            with torch.cuda.stream(self._aside):
                for work in job.works:
                    work.wait()
                job.end = self._stopwatch.mark()
            self._on_transfer(DeviceTransfer(job.name, job.unit, begin, job.end, sent, received))
        self._unmarked.clear()
