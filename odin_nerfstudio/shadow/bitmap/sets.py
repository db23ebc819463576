"""A set of rows, and what concerns several at once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache

import torch
from torch import Tensor

from odin_nerfstudio.shadow.bitmap.backend import num_words, select_backend
from odin_nerfstudio.shadow.bitmap.program import AND, LONGEST, MINUS, OR, SWAPPED, Program, operate


@cache
def _waits(device: torch.device) -> bool:
    """Whether sets are computed only when they are asked for: where a launch is what they cost."""
    return device.type != "cpu"


class Bitmap:
    """A set of rows out of ``size``. Never changed in place, so whoever holds one may keep it.

    On a GPU ``a & b``, ``a | b`` and ``a - b`` compute nothing: they remember how it is done until somebody asks for
    the ``words``, and then it is one launch, or until :func:`count_all` counts them, which stores nothing. Elsewhere
    they cost size/64 words whatever the sets hold. Both sides must have one size and one device.

    Args:
        words: (⌈size/64⌉,) int64; row r is bit r mod 64 of word r // 64, and bits beyond ``size`` are zero. They are
            kept and must not change.
        size: rows there are.

    Raises:
        ValueError: when there are more or fewer words than that; and by the operators, for sets that do not match.
    """

    __slots__ = ("_device", "_length", "_operands", "_size", "_words")

    _operands: tuple[Bitmap, Bitmap, int] | None
    """What it is computed from, first and second, and the operation; None once its words are known."""
    _length: int
    """Instructions that compute it, 0 for the empty set. Of two operands the longer one comes first: so every value
    that waits on the stack has as many leaves at least as what is computed above it, and the stack stays low."""

    def __init__(self, words: Tensor, size: int) -> None:
        if words.numel() != num_words(size):
            raise ValueError(f"{words.numel()} words do not hold {size} rows")
        self._words: Tensor | None = words
        self._size, self._device = size, words.device
        self._length, self._operands = 1, None

    @classmethod
    def _unknown(
        cls, size: int, device: torch.device, length: int, operands: tuple[Bitmap, Bitmap, int] | None
    ) -> Bitmap:
        """A set whose words are computed when somebody asks for them."""
        made = object.__new__(cls)
        made._words, made._size, made._device, made._length, made._operands = None, size, device, length, operands
        return made

    @classmethod
    def empty(cls, size: int, device: torch.device | str = "cpu") -> Bitmap:
        """No row of ``size``; costs nothing, in expressions neither."""
        device = torch.device(device)
        if device.index is None and device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())  # as tensors call it
        return _empty(size, device)

    @classmethod
    def from_rows(cls, rows: Tensor, size: int, chosen: Tensor | None = None) -> Bitmap:
        """A set of rows, on their device.

        Args:
            rows: (R,) int64 in [0, size), in any order.
            size: rows there are.
            chosen: (R,) bool, those that are meant; None: all.
        """
        return cls(select_backend(rows.device).insert(rows, size, chosen), size)

    @classmethod
    def from_mask(cls, mask: Tensor) -> Bitmap:
        """The rows at which ``mask`` ((N,) bool) holds."""
        return cls(select_backend(mask.device).pack(mask), len(mask))

    @property
    def size(self) -> int:
        """Rows there are."""
        return self._size

    @property
    def device(self) -> torch.device:
        """Where the words are."""
        return self._device

    @property
    def words(self) -> Tensor:
        """(⌈size/64⌉,) int64, not to be changed; computed when they are asked for first."""
        words = self._words
        return self._evaluate() if words is None else words

    def _evaluate(self) -> Tensor:
        words = words_of([self])[0]
        # In this order: another thread that finds no operands must find the words.
        self._words = words
        if self._operands is not None:
            self._operands, self._length = None, 1
        return words

    def _program(self, program: list[Tensor | int]) -> list[Tensor | int]:
        """Appends what computes the set."""
        operands = self._operands
        if operands is not None:
            first, second, operation = operands
            first._program(program)
            second._program(program)
            program.append(operation)
        elif self._words is not None:
            program.append(self._words.contiguous())
        return program

    def mask(self) -> Tensor:
        """(size,) uint8, 1 for rows in the set."""
        return select_backend(self._device).mask(self.words)[: self._size]

    def rows(self, count: int | None = None) -> Tensor:
        """The rows in ascending order.

        Args:
            count: how many there are, if that is known: then nothing waits for the device; see :func:`rows_of`.

        Returns:
            (R,) int64.
        """
        return rows_of(self.words[None], [self.count() if count is None else count])

    def contains(self, rows: Tensor) -> Tensor:
        """(R,) bool: which of ``rows`` ((R,) int64 in [0, size)) are in the set."""
        return select_backend(rows.device).contains(self.words, rows)

    def count(self) -> int:
        """Number of rows in the set."""
        return int(count_bits(self.words))

    def __bool__(self) -> bool:
        """Whether any row is in the set."""
        return self._length > 0 and bool(self.words.any())

    def __and__(self, other: Bitmap) -> Bitmap:
        if self._length == 0 or other._length == 0:
            return other if self._length else self
        return self._joined(AND, other)

    def __or__(self, other: Bitmap) -> Bitmap:
        if self._length == 0 or other._length == 0:
            return self if self._length else other
        return self._joined(OR, other)

    def __sub__(self, other: Bitmap) -> Bitmap:
        if self._length == 0 or other._length == 0:
            return self
        if self is other:
            return _empty(self._size, self._device)
        return self._joined(MINUS, other)

    def _joined(self, operation: int, other: Bitmap) -> Bitmap:
        size, device = self._size, self._device
        if size != other._size or device != other._device:
            raise ValueError(f"{size} rows on {device} do not match {other._size} rows on {other._device}")
        if not _waits(device):
            return Bitmap(operate(operation, self.words, other.words), size)
        while self._length + other._length >= LONGEST:
            (self if self._length >= other._length else other)._evaluate()
        length = self._length + other._length + 1
        if self._length < other._length:
            return Bitmap._unknown(size, device, length, (other, self, SWAPPED[operation]))
        return Bitmap._unknown(size, device, length, (self, other, operation))


@lru_cache(maxsize=16)
def _empty(size: int, device: torch.device) -> Bitmap:
    """One set for all who need none, so that its words are computed once."""
    return Bitmap._unknown(size, device, 0, None)


def words_of(bitmaps: Sequence[Bitmap]) -> Tensor:
    """(K, ⌈size/64⌉) int64: the words of one or more sets of one size and device, computed at once."""
    size, device = bitmaps[0].size, bitmaps[0].device
    return select_backend(device).evaluate(_programs(bitmaps), num_words(size), device)


def count_all(bitmaps: Sequence[Bitmap], *numbers: int) -> Tensor:
    """How many rows are in each of several sets, without storing those that were not computed, or waiting.

    Args:
        bitmaps: one or more, of one size and device.
        numbers: up to 8 others, to travel with them.

    Returns:
        (K + C,) int64: the counts, then the numbers.
    """
    size, device = bitmaps[0].size, bitmaps[0].device
    return select_backend(device).count_all(_programs(bitmaps), num_words(size), device, numbers)


def _programs(bitmaps: Sequence[Bitmap]) -> list[Program]:
    size, device = bitmaps[0].size, bitmaps[0].device
    programs: list[Program] = []
    for each in bitmaps:
        if each._size != size or each._device != device:
            raise ValueError("sets that are computed at once must have one size and one device")
        programs.append(each._program([]))
    return programs


def count_bits(words: Tensor) -> Tensor:
    """(..., W) int64 → (...,) int64: how many bits are set, without waiting for the device."""
    return select_backend(words.device).count(words)


def rows_of(words: Tensor, counts: Sequence[int]) -> Tensor:
    """The rows of several sets, one set after the other, without waiting for the device.

    Args:
        words: (K, W) int64, a bitmap each.
        counts: how many rows each of them has. Of a set that has more, the first are taken; for one that has fewer,
            row 0 is repeated at the end.

    Returns:
        (Σ counts,) int64, ascending within each set.

    Raises:
        ValueError: without exactly one count, 0 or more, for each set.
    """
    if len(counts) != len(words) or min(counts, default=0) < 0:
        raise ValueError(f"{len(words)} sets cannot have {list(counts)} rows")
    return select_backend(words.device).rows(words, counts)
