"""Row-wise Adam on CUDA: the kernels of cuda/adam_rows.cu, one launch for up to eight float32 parameters.

A step of an optimizer is part of no graph, so these are plain functions rather than torch operators, whose dispatch
would cost more than the rest of a call. None of them waits for the device. Twin: ``reference``.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from odin_nerfstudio import kernels
from odin_nerfstudio.shadow.adam.state import AdamConstants, AdamRows, MissedSteps, flat, safety

_KERNEL = "adam_rows"
_AT_ONCE = 8
_FLOAT64 = 8
"""Bytes."""
# The structures of the source. Packing is several times faster than filling ctypes' fields.
_COLUMN, _COLUMNS_END = struct.Struct("4Pq2i4dq4f4P"), struct.Struct("2i")
_TABLE, _TABLES_END = struct.Struct("3P5d2q"), struct.Struct("q")


class _Columns(ctypes.Structure):
    _fields_ = (("memory", ctypes.c_byte * (_AT_ONCE * _COLUMN.size + _COLUMNS_END.size)),)


class _Tables(ctypes.Structure):
    _fields_ = (("memory", ctypes.c_byte * (_AT_ONCE * _TABLE.size + _TABLES_END.size)),)


def announce(steps: Sequence[tuple[MissedSteps, float]]) -> None:
    """Begins the next step of several parameters: ``(tables, learning rate)`` each."""
    for missed, lr in steps:
        missed.begin(lr)
    for start in range(0, len(steps), _AT_ONCE):
        chosen, tables = steps[start : start + _AT_ONCE], _Tables()
        for i, (missed, lr) in enumerate(chosen):
            numbers = (*_decays(missed.constants), *missed.weights(), lr, missed.now, missed.reached)
            _TABLE.pack_into(tables, i * _TABLE.size, *_addresses(missed), *numbers)
        _TABLES_END.pack_into(tables, _AT_ONCE * _TABLE.size, len(chosen))
        longest = max(missed.reached for missed, _ in chosen)
        kernels.launch(_KERNEL, "adam_announce", steps[0][0].tables.device, longest, tables)


def catch_up(params: Sequence[AdamRows], rows: Tensor | None) -> None:
    """Applies to ``rows`` every step they have missed; see :func:`odin_nerfstudio.shadow.adam.catch_up`."""
    assert rows is None or rows.dtype == torch.int64
    count = (params[0].values if rows is None else rows).shape[0]
    if count == 0:
        return
    for start in range(0, len(params), _AT_ONCE):
        columns = _packed(
            [
                (*_parameter(param, param.missed.now), 0.0, 0.0, 0, *_addresses(param.missed))
                for param in params[start : start + _AT_ONCE]
            ]
        )
        kernels.launch(_KERNEL, "adam_catch_up", params[0].values.device, count, rows, columns)


def take(params: Sequence[AdamRows], rows: Tensor, grads: Sequence[Tensor], active: Tensor | None, age: int) -> None:
    """Takes a step on ``rows``; see :func:`odin_nerfstudio.shadow.adam.take`."""
    assert rows.dtype == torch.int64
    assert active is None or (active.dtype == torch.bool and active.shape == rows.shape)
    count = rows.shape[0]
    if count == 0:
        return
    pairs = list(zip(params, grads, strict=True))
    for start in range(0, len(pairs), _AT_ONCE):
        columns = _packed(
            [
                (*_parameter(param, param.missed.now - age), *_scales(param.missed, age), _address(grad), 0, 0, 0)
                for param, grad in pairs[start : start + _AT_ONCE]
            ]
        )
        kernels.launch(_KERNEL, "adam_take", params[0].values.device, count, rows, active, columns)


def _parameter(param: AdamRows, step: int) -> tuple[Any, ...]:
    """The fields of ``Column`` that do not depend on what is done, in their order."""
    values, exp_avg, exp_avg_sq, row_step, missed = param
    # Parameters from a slice have rows apart from each other until a strategy replaces them.
    stride = (values if values.is_contiguous() else flat(values)).stride(0)
    return (
        values.data_ptr(),
        _address(exp_avg),
        _address(exp_avg_sq),
        _address(row_step),
        stride,
        values.numel() // values.shape[0],
        step,
        *_numbers(missed.constants),
    )


def _packed(columns: Sequence[tuple[Any, ...]]) -> _Columns:
    packed, width = _Columns(), 0
    for i, column in enumerate(columns):
        _COLUMN.pack_into(packed, i * _COLUMN.size, *column)
        width += column[5]
    _COLUMNS_END.pack_into(packed, _AT_ONCE * _COLUMN.size, len(columns), width)
    return packed


@cache
def _numbers(constants: AdamConstants) -> tuple[float, ...]:
    beta1, beta2, eps = constants
    return beta1, beta2, math.log2(beta1), math.log2(beta2), constants.horizon, eps, safety(torch.float32)


@cache
def _decays(constants: AdamConstants) -> tuple[float, float]:
    """log₂ β₁/√β₂ and log₂ β₁/β₂."""
    beta1, beta2, _ = constants
    return math.log2(beta1 / math.sqrt(beta2)), math.log2(beta1 / beta2)


def _scales(missed: MissedSteps, age: int) -> tuple[float, float]:
    """lr/c₁ and 1/√c₂ of a step."""
    c1, c2 = missed.constants.corrections(missed.now - age)
    return missed.rate(age) / c1, 1 / math.sqrt(c2)


def _addresses(missed: MissedSteps) -> tuple[int, int, int]:
    """Where A, B and the learning rates are."""
    begin, row = missed.tables.data_ptr(), missed.capacity * _FLOAT64
    return begin, begin + row, begin + 2 * row


def _address(tensor: Tensor) -> int:
    assert tensor.dtype == torch.float32 and tensor.is_contiguous()
    return tensor.data_ptr()
