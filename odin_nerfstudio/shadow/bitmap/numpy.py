"""Packed words on the CPU, by NumPy and numba; see :class:`~odin_nerfstudio.shadow.bitmap.backend.Backend`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from odin_nerfstudio.cpu.jit import jit
from odin_nerfstudio.shadow.bitmap.program import Program
from odin_nerfstudio.shadow.bitmap.reference import contains, evaluate, place

__all__ = ["contains", "count", "count_all", "evaluate", "insert", "mask", "pack", "place", "prefix", "rows"]


def count(words: Tensor) -> Tensor:
    sets = words.reshape(math.prod(words.shape[:-1]), words.shape[-1])
    return torch.from_numpy(_count(sets.numpy().view(np.uint64))).view(words.shape[:-1])


@jit
def _count(words):
    """(K, W) uint64 → (K,) int64. Compilers know this for what it is and use the processor's own counting."""
    counts = np.zeros(words.shape[0], np.int64)
    for row in range(words.shape[0]):
        for word in range(words.shape[1]):
            x = words[row, word]
            x = x - ((x >> np.uint64(1)) & np.uint64(0x5555555555555555))
            x = (x & np.uint64(0x3333333333333333)) + ((x >> np.uint64(2)) & np.uint64(0x3333333333333333))
            x = (x + (x >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
            counts[row] += np.int64((x * np.uint64(0x0101010101010101)) >> np.uint64(56))
    return counts


def pack(mask: Tensor) -> Tensor:
    packed = np.packbits(mask.numpy(), axis=-1, bitorder="little")
    words = np.zeros((*packed.shape[:-1], -(-packed.shape[-1] // 8) * 8), np.uint8)
    words[..., : packed.shape[-1]] = packed
    return torch.from_numpy(words.view(np.int64))


def insert(rows: Tensor, size: int, chosen: Tensor | None = None) -> Tensor:
    mask = torch.zeros(size, dtype=torch.uint8)
    mask[rows if chosen is None else rows[chosen]] = 1
    return pack(mask)


def mask(words: Tensor) -> Tensor:
    return torch.from_numpy(np.unpackbits(words.numpy().view(np.uint8), bitorder="little"))


def rows(words: Tensor, counts: Sequence[int]) -> Tensor:
    if len(words) == 1:
        return _resized(_ascending(words[0]), counts[0])
    found = [_resized(_ascending(each), count) for each, count in zip(words, counts, strict=True)]
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.int64)


def _ascending(words: Tensor) -> Tensor:
    """(W,) → (R,) int64."""
    return torch.from_numpy(np.flatnonzero(mask(words.contiguous()).numpy().view(np.bool_)))


def _resized(rows: Tensor, count: int) -> Tensor:
    """(R,) → (count,), with zeros at the end."""
    return rows if len(rows) == count else torch.nn.functional.pad(rows, (0, count - len(rows)))


def prefix(words: Tensor) -> Tensor:
    counts = count(words[:, None])
    return (counts.cumsum(0) - counts).to(torch.int32)


def count_all(programs: Sequence[Program], width: int, device: torch.device, numbers: Sequence[int]) -> Tensor:
    return torch.cat([count(evaluate(programs, width, device)), torch.tensor(numbers, dtype=torch.int64)])
