"""Packed words in plain torch, on any device; see :class:`~odin_nerfstudio.shadow.bitmap.backend.Backend`.

The twin of the kernels of cuda/bitmap.cu.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from odin_nerfstudio.shadow.bitmap.program import Program, operate


def count(words: Tensor) -> Tensor:
    # Neighbouring fields of 1, 2 and 4 bits are added inside each word, then its eight bytes by a multiplication.
    # The shifts copy the sign, which the masks remove.
    x = words
    x = x - ((x >> 1) & 0x5555555555555555)
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    return (((x * 0x0101010101010101) >> 56) & 0xFF).sum(-1)


def pack(mask: Tensor) -> Tensor:
    width = -(-mask.shape[-1] // 64)
    bits = torch.nn.functional.pad(mask.view(torch.uint8), (0, 64 * width - mask.shape[-1]))
    weights = 2 ** torch.arange(8, dtype=torch.uint8, device=mask.device)
    packed = (bits.reshape(bits.numel() // 8, 8) * weights).sum(-1, dtype=torch.uint8)
    return packed.view(torch.int64).view(*mask.shape[:-1], width)


def insert(rows: Tensor, size: int, chosen: Tensor | None = None) -> Tensor:
    times = torch.zeros(size, dtype=torch.int32, device=rows.device)
    found = torch.ones_like(rows, dtype=torch.int32) if chosen is None else chosen.int()
    return pack(times.index_add_(0, rows, found) > 0)


def mask(words: Tensor) -> Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=words.device)
    return ((words.view(torch.uint8)[:, None] >> shifts) & 1).view(-1)


def rows(words: Tensor, counts: Sequence[int]) -> Tensor:
    found = [
        torch.nonzero_static(mask(each.contiguous()), size=count, fill_value=0)[:, 0]
        for each, count in zip(words, counts, strict=True)
    ]
    return torch.cat(found) if found else words.new_zeros(0)


def contains(words: Tensor, rows: Tensor) -> Tensor:
    return ((words[rows >> 6] >> (rows & 63)) & 1).bool()


def prefix(words: Tensor) -> Tensor:
    counts = count(words[:, None])
    return (counts.cumsum(0) - counts).to(torch.int32)


def place(words: Tensor, prefix: Tensor, rows: Tensor) -> Tensor:
    below = ~(torch.full_like(rows, -1) << (rows & 63))
    word = rows >> 6
    return prefix[word] + count((words[word] & below)[:, None])


def evaluate(programs: Sequence[Program], width: int, device: torch.device) -> Tensor:
    return torch.stack([_run(program, width, device) for program in programs])


def _run(program: Program, width: int, device: torch.device) -> Tensor:
    """(W,)"""
    stack: list[Tensor] = []
    for step in program:
        if isinstance(step, Tensor):
            stack.append(step)
        else:
            top = stack.pop()
            stack.append(operate(step, stack.pop(), top))
    return stack.pop() if stack else torch.zeros(width, dtype=torch.int64, device=device)


def count_all(programs: Sequence[Program], width: int, device: torch.device, numbers: Sequence[int]) -> Tensor:
    counts = count(evaluate(programs, width, device))
    return torch.cat([counts, *(counts.new_full((1,), number) for number in numbers)])
