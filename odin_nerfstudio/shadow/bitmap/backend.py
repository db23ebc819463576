"""What is computed on packed words, and by which backend on which device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from odin_nerfstudio import kernels
from odin_nerfstudio.shadow.bitmap import reference
from odin_nerfstudio.shadow.bitmap.program import Program

WORD = 64
"""Rows a word."""


def num_words(size: int) -> int:
    """How many words hold ``size`` rows."""
    return -(-size // WORD)


class Backend(Protocol):
    """The functions of a module. Words are int64, rows are int64 in [0, 64·W), and all are on one device."""

    def count(self, words: Tensor) -> Tensor:
        """(..., W) → (...,) int64: bits that are set."""

    def pack(self, mask: Tensor) -> Tensor:
        """(..., N) bool or zeros and ones in uint8 → (..., ⌈N/64⌉) words."""

    def insert(self, rows: Tensor, size: int, chosen: Tensor | None = None) -> Tensor:
        """(R,) rows of ``size``, in any order, (R,) bool which of them are meant → (⌈size/64⌉,) words."""

    def mask(self, words: Tensor) -> Tensor:
        """(W,) → (64·W,) uint8 zeros and ones."""

    def rows(self, words: Tensor, counts: Sequence[int]) -> Tensor:
        """(K, W) and K counts → (Σ counts,) int64; see :func:`~odin_nerfstudio.shadow.bitmap.rows_of`."""

    def contains(self, words: Tensor, rows: Tensor) -> Tensor:
        """(W,) words, (R,) rows → (R,) bool: whether their bits are set."""

    def prefix(self, words: Tensor) -> Tensor:
        """(W,) → (W,) int32: bits that are set below each word."""

    def place(self, words: Tensor, prefix: Tensor, rows: Tensor) -> Tensor:
        """(W,) words, their prefix, (R,) rows → (R,) int64: bits that are set below each row."""

    def evaluate(self, programs: Sequence[Program], width: int, device: torch.device) -> Tensor:
        """K > 0 programs for sets of W words → (K, W)."""

    def count_all(
        self, programs: Sequence[Program], width: int, device: torch.device, numbers: Sequence[int]
    ) -> Tensor:
        """K > 0 programs for sets of W words, C numbers → (K + C,) int64: bits that are set, then the numbers."""


@cache
def select_backend(device: torch.device) -> Backend:
    """NumPy on the CPU, our kernels on CUDA, plain torch without a compiler and elsewhere; only that is imported."""
    if device.type == "cpu":
        from odin_nerfstudio.shadow.bitmap import numpy

        return numpy
    if device.type == "cuda" and kernels.available("bitmap", device):
        from odin_nerfstudio.shadow.bitmap import cuda

        return cuda
    return reference
