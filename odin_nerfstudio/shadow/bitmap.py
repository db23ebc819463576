"""Sets of rows as packed bitmaps: 64 rows a word, on any device."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from odin_nerfstudio.cpu.jit import jit

_WORD = 64


@dataclass(frozen=True, eq=False)
class Bitmap:
    """A set of rows out of ``size``. Never changed in place, so whoever holds one may keep it.

    ``a & b``, ``a | b`` and ``a - b`` cost size/64 words whatever the sets hold. Both sides must have one size and one
    device. CPU tensors are packed and unpacked by NumPy, others by :func:`_pack` and :func:`_unpack`.
    """

    words: Tensor
    """(⌈size/64⌉,) int64; row r is bit r mod 64 of word r // 64, and bits beyond ``size`` are zero."""
    size: int
    """Rows there are."""

    @classmethod
    def empty(cls, size: int, device: torch.device | str = "cpu") -> Bitmap:
        """No row of ``size``."""
        return cls(torch.zeros(-(-size // _WORD), dtype=torch.int64, device=device), size)

    @classmethod
    def from_rows(cls, rows: Tensor, size: int) -> Bitmap:
        """The set of ``rows`` ((R,) int64 in [0, size), in any order), on their device."""
        mask = torch.zeros(-(-size // _WORD) * _WORD, dtype=torch.uint8, device=rows.device)
        mask[rows] = 1
        if mask.device.type != "cpu":
            return cls(_pack(mask), size)
        return cls(torch.from_numpy(np.packbits(mask.numpy(), bitorder="little").view(np.int64)), size)

    def mask(self) -> Tensor:
        """(size,) uint8, 1 for rows in the set."""
        if self.words.device.type != "cpu":
            return _unpack(self.words)[: self.size]
        bits = np.unpackbits(self.words.numpy().view(np.uint8), count=self.size, bitorder="little")
        return torch.from_numpy(bits)

    def rows(self) -> Tensor:
        """(R,) int64, ascending."""
        mask = self.mask()
        if mask.device.type != "cpu":
            return mask.nonzero()[:, 0]
        return torch.from_numpy(np.flatnonzero(mask.numpy().view(np.bool_)))

    def contains(self, rows: Tensor) -> Tensor:
        """(R,) bool: which of ``rows`` ((R,) int64 in [0, size)) are in the set."""
        return ((self.words[rows >> 6] >> (rows & 63)) & 1).bool()

    def count(self) -> int:
        """Number of rows in the set."""
        return int(count_bits(self.words))

    def __bool__(self) -> bool:
        """Whether any row is in the set."""
        return bool(self.words.any())

    def __and__(self, other: Bitmap) -> Bitmap:
        return Bitmap(self.words & other.words, self.size)

    def __or__(self, other: Bitmap) -> Bitmap:
        return Bitmap(self.words | other.words, self.size)

    def __sub__(self, other: Bitmap) -> Bitmap:
        return Bitmap(self.words & ~other.words, self.size)


def count_bits(words: Tensor) -> Tensor:
    """(..., W) int64 → (...,) int64: how many bits are set, without waiting for the device."""
    if words.device.type != "cpu":
        return _count_bits(words)
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


def _count_bits(words: Tensor) -> Tensor:
    """Torch twin of :func:`_count`."""
    # Neighbouring fields of 1, 2 and 4 bits are added inside each word, then its eight bytes by a multiplication.
    # The shifts copy the sign, which the masks remove.
    x = words
    x = x - ((x >> 1) & 0x5555555555555555)
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    return (((x * 0x0101010101010101) >> 56) & 0xFF).sum(-1)


def _pack(mask: Tensor) -> Tensor:
    """Torch twin of NumPy's ``packbits``: (64·W,) uint8 zeros and ones → (W,) int64."""
    weights = 2 ** torch.arange(8, dtype=torch.uint8, device=mask.device)
    return (mask.view(-1, 8) * weights).sum(-1, dtype=torch.uint8).view(torch.int64)


def _unpack(words: Tensor) -> Tensor:
    """Torch twin of NumPy's ``unpackbits``: (W,) int64 → (64·W,) uint8 zeros and ones."""
    shifts = torch.arange(8, dtype=torch.uint8, device=words.device)
    return ((words.view(torch.uint8)[:, None] >> shifts) & 1).view(-1)
