"""Who this process is among the ranks, and the few blocking calls in which all of them take part."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from odin_nerfstudio.errors import UserError

PATIENCE = timedelta(days=7)
"""Timeout of process groups. A viewer may pause rank 0 for long (design §5); the launcher notices ranks that died."""


@dataclass(frozen=True)
class World:
    """The ranks of a run as one of them sees them. With a single rank every method is the identity, without
    torch.distributed.

    All ranks call the same methods in the same order, from the thread that trains.
    """

    rank: int
    """0 ≤ rank < size."""
    size: int
    """Number of ranks."""
    device: torch.device
    """Where this rank computes."""
    local_rank: int
    """Number of this rank on its machine."""

    @staticmethod
    def current(device: torch.device | str = "cpu", local_rank: int = 0) -> World:
        """The state of torch.distributed's default process group; a world of one where there is none."""
        distributed = dist.is_available() and dist.is_initialized()
        rank, size = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)
        return World(rank, size, torch.device(device), local_rank)

    def all_gather_rows(self, rows: Tensor) -> Tensor:
        """(n_r, ...) of every rank, on ``device`` → (Σ n_r, ...) in the order of ranks, bit by bit; n_r may differ."""
        if self.size == 1:
            return rows
        counts = [torch.zeros(1, dtype=torch.int64, device=self.device) for _ in range(self.size)]
        dist.all_gather(counts, torch.tensor([len(rows)], device=self.device))
        gathered = [rows.new_empty((int(count), *rows.shape[1:])) for count in counts]
        gathered[self.rank] = rows.detach().contiguous()
        for source, part in enumerate(gathered):
            if part.numel():
                dist.broadcast(as_bytes(part), source)
        return torch.cat(gathered)

    def sum_gradients(self, params: Iterable[Tensor]) -> None:
        """Sums each parameter's gradient over the ranks; one that this rank does not have counts as zero."""
        if self.size == 1:
            return
        for param in params:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            dist.all_reduce(param.grad)

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """The picklable ``value`` of rank ``source``; the other ranks' is ignored."""
        if self.size == 1:
            return value
        holder = [value]
        dist.broadcast_object_list(holder, source)
        return holder[0]

    def any(self, flag: bool) -> bool:
        """Whether ``flag`` is set on any rank."""
        return self.any_of([flag])[0]

    def any_of(self, flags: Sequence[bool]) -> list[bool]:
        """Of each of several flags, whether it is set on any rank."""
        if self.size == 1:
            return list(flags)
        together = torch.tensor(flags, dtype=torch.uint8, device=self.device)
        dist.all_reduce(together, dist.ReduceOp.MAX)
        return together.bool().tolist()

    def all_gather_objects(self, value: Any) -> list[Any]:
        """The picklable ``value`` of every rank, in the order of ranks."""
        values: list[Any] = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return values

    def gather_objects(self, value: Any) -> list[Any] | None:
        """The picklable ``value`` of every rank, in the order of ranks, on rank 0; None on the others.

        Tensors in it, at any depth, arrive on the CPU: no rank can do with another one's devices.
        """
        value = _on_cpu(value)
        values: list[Any] | None = [value] * self.size if self.rank == 0 else None
        if self.size > 1:
            dist.gather_object(value, values)
        return values

    def check_same(self, value: str, what: str) -> None:
        """Checks that ``value``, such as a hash, is the same on all ranks.

        Args:
            value: this rank's.
            what: names it in the message, such as "the order of views".

        Raises:
            UserError: on every rank, when it is not.
        """
        values = self.all_gather_objects(value)
        others = [rank for rank in range(self.size) if values[rank] != values[0]]
        if others:
            ranks = f"rank {others[0]}" if len(others) == 1 else f"ranks {', '.join(map(str, others))}"
            raise UserError(
                f"{what} of {ranks} differs from that of rank 0 ({values[others[0]]} and {values[0]}). "
                "Start every rank with the same data, flags and versions."
            )


def as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous (n, ...) tensor of any type seen as (n, B) uint8: what travels then stays the same bit by bit."""
    return tensor.view(len(tensor), math.prod(tensor.shape[1:])).view(torch.uint8)


def _on_cpu(value: Any) -> Any:
    """``value`` with its tensors on the CPU."""
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {key: _on_cpu(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_on_cpu(item) for item in value)
    return value
