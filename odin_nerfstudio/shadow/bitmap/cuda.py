"""Packed words on CUDA: the kernels of cuda/bitmap.cu as torch operators.

See :class:`~odin_nerfstudio.shadow.bitmap.backend.Backend`. Nothing here waits for the device.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from odin_nerfstudio import kernels
from odin_nerfstudio.shadow.bitmap.program import Program

_TILE = 512
"""Words that a block counts; kTile of the source."""

_library = torch.library.Library("odin_nerfstudio", "FRAGMENT")
_Function = TypeVar("_Function", bound=Callable)


def _operator(schema: str, fake: Callable[..., Tensor]) -> Callable[[_Function], _Function]:
    """Makes a function the operator ``torch.ops.odin_nerfstudio.bitmap_…`` for CUDA tensors."""

    def register(function: _Function) -> _Function:
        name = f"bitmap_{function.__name__}"
        _library.define(f"{name}{schema}")
        _library.impl(name, function, "CUDA")
        torch.library.register_fake(f"odin_nerfstudio::{name}", fake, lib=_library)
        return getattr(torch.ops.odin_nerfstudio, name).default

    return register


def _launch(function: str, words: Tensor, *args: kernels.Argument) -> None:
    kernels.launch("bitmap", function, words.device, *args)


@_operator("(Tensor words) -> Tensor", lambda words: words.new_empty(words.shape[:-1]))
def count(words: Tensor) -> Tensor:
    words = words.contiguous()
    counts = words.new_empty(words.shape[:-1])
    _launch("bitmap_count", words, counts.numel(), words.shape[-1], words, counts)
    return counts


@_operator(
    "(Tensor mask) -> Tensor",
    lambda mask: mask.new_empty(*mask.shape[:-1], (mask.shape[-1] + 63) // 64, dtype=torch.int64),
)
def pack(mask: Tensor) -> Tensor:
    size = mask.shape[-1]
    words = mask.new_empty(*mask.shape[:-1], (size + 63) // 64, dtype=torch.int64)
    _launch("bitmap_pack", mask, mask.shape[:-1].numel(), size, mask.contiguous(), words)
    return words


@_operator(
    "(Tensor rows, SymInt size, Tensor? chosen=None) -> Tensor",
    lambda rows, size, chosen=None: rows.new_empty((size + 63) // 64),
)
def insert(rows: Tensor, size: int, chosen: Tensor | None = None) -> Tensor:
    words = rows.new_zeros((size + 63) // 64)
    if chosen is not None:
        assert chosen.dtype == torch.bool and chosen.shape == rows.shape
        chosen = chosen.contiguous()
    _launch("bitmap_insert", words, rows.shape[0], rows.contiguous(), chosen, words)
    return words


@_operator("(Tensor words) -> Tensor", lambda words: words.new_empty(64 * len(words), dtype=torch.uint8))
def mask(words: Tensor) -> Tensor:
    found = words.new_empty(64 * len(words), dtype=torch.uint8)
    _launch("bitmap_mask", words, len(words), words.contiguous(), found)
    return found


@_operator("(Tensor words, SymInt[] counts) -> Tensor", lambda words, counts: words.new_empty(sum(counts)))
def rows(words: Tensor, counts: Sequence[int]) -> Tensor:
    found = words.new_empty(sum(counts))
    if found.shape[0] > 0:
        host = (ctypes.c_int64 * len(counts))(*counts)
        address = ctypes.c_void_p(ctypes.addressof(host))
        _launch("bitmap_rows", words, *words.shape, words.contiguous(), address, _tiles(words), found)
    return found


@_operator("(Tensor words, Tensor rows) -> Tensor", lambda words, rows: rows.new_empty(rows.shape, dtype=torch.bool))
def contains(words: Tensor, rows: Tensor) -> Tensor:
    found = rows.new_empty(rows.shape, dtype=torch.bool)
    _launch("bitmap_contains", words, rows.shape[0], words.contiguous(), rows.contiguous(), found)
    return found


@_operator("(Tensor words) -> Tensor", lambda words: words.new_empty(words.shape, dtype=torch.int32))
def prefix(words: Tensor) -> Tensor:
    below = words.new_empty(words.shape, dtype=torch.int32)
    _launch("bitmap_prefix", words, words.shape[0], words.contiguous(), _tiles(words), below)
    return below


@_operator(
    "(Tensor words, Tensor prefix, Tensor rows) -> Tensor", lambda words, prefix, rows: rows.new_empty(rows.shape)
)
def place(words: Tensor, prefix: Tensor, rows: Tensor) -> Tensor:
    places = rows.new_empty(rows.shape)
    _launch("bitmap_place", words, rows.shape[0], words.contiguous(), prefix, rows.contiguous(), places)
    return places


def evaluate(programs: Sequence[Program], width: int, device: torch.device) -> Tensor:
    words = torch.empty((len(programs), width), dtype=torch.int64, device=device)
    _run("bitmap_evaluate", programs, width, words)
    return words


def count_all(programs: Sequence[Program], width: int, device: torch.device, numbers: Sequence[int]) -> Tensor:
    counts = torch.empty(len(programs) + len(numbers), dtype=torch.int64, device=device)
    known = array("q", numbers)
    _run("bitmap_count_all", programs, width, len(known), _address(known), counts)
    return counts


def _run(function: str, programs: Sequence[Program], width: int, *args: kernels.Argument) -> None:
    """Calls a function with some programs, and other arguments of which the last is a tensor of the device."""
    code, ends = array("Q"), array("q")
    for program in programs:
        code.extend([step if isinstance(step, int) else step.data_ptr() for step in program])
        ends.append(len(code))
    output = args[-1]
    assert isinstance(output, Tensor)
    _launch(function, output, len(ends), width, _address(code), _address(ends), *args)


def _address(numbers: array) -> ctypes.c_void_p:
    return ctypes.c_void_p(numbers.buffer_info()[0])


def _tiles(words: Tensor) -> Tensor:
    """Room for the counts of all tiles of (..., W) sets, at least one each."""
    return words.new_empty(*words.shape[:-1], max(1, -(-words.shape[-1] // _TILE)), dtype=torch.int32)
