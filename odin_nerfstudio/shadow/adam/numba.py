"""Row-wise Adam on one parameter on the CPU, compiled. Twin: ``reference``."""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from odin_nerfstudio.cpu.jit import jit
from odin_nerfstudio.cpu.threads import run
from odin_nerfstudio.cpu.threads import take as take_item
from odin_nerfstudio.shadow.adam.state import AdamRows, safety

_BLOCK = 1024
"""Rows that one thread takes at a time."""


def catch_up(state: AdamRows, rows: Tensor) -> None:
    """Applies to ``rows`` ((R,) int64, all different) every step they have missed."""
    missed = state.missed
    tables = (missed.first.numpy(), missed.second.numpy(), missed.rates.numpy())
    beta1, beta2, eps = missed.constants
    scalars = (beta1, beta2, eps, safety(state.values.dtype), missed.constants.horizon)
    run(_catch_up_kernel, _blocks(rows), rows.numpy(), *_arrays(state), *tables, *scalars)


def take(state: AdamRows, rows: Tensor, grad: Tensor, active: Tensor | None, age: int) -> None:
    """Takes a step on ``rows`` with gradient ``grad`` ((R, D)); see :func:`odin_nerfstudio.shadow.adam.take`."""
    constants, step = state.missed.constants, state.missed.now - age
    c1, c2 = constants.corrections(step)
    beta1, beta2, eps = constants
    arrays = _arrays(state)
    real = arrays[0].dtype.type
    numbers = (state.missed.rate(age) / c1, 1 / math.sqrt(c2), beta1, beta2, 1 - beta1, 1 - beta2, eps)
    passes = None if active is None else active.numpy()
    scalars = (np.float32(step), *map(real, numbers))
    run(_take_kernel, _blocks(rows), rows.numpy(), passes, *arrays, grad.numpy(), *scalars)


def _arrays(state: AdamRows) -> tuple[np.ndarray, ...]:
    return tuple(tensor.detach().numpy() for tensor in (*state.flat(), state.row_step))


def _blocks(rows: Tensor) -> int:
    return -(-len(rows) // _BLOCK)


@jit
def _catch_up_kernel(
    counter, items, rows, values, exp_avg, exp_avg_sq, row_step, first, second, rates, beta1, beta2, eps, safety, far
):
    now = len(first) - 1
    real = values.dtype.type
    eps_, safety_ = real(eps), real(safety)
    while True:
        block = take_item(counter)
        if block >= items:
            break
        for i in range(block * _BLOCK, min((block + 1) * _BLOCK, len(rows))):
            row = rows[i]
            last = int(row_step[row])
            gap = now - last
            if gap <= 0:
                continue
            row_step[row] = np.float32(now)
            a, b = real(first[last]), real(second[last])
            decay1, decay2 = real(beta1**gap), real(beta2**gap)
            for d in range(values.shape[1]):
                m, v = exp_avg[row, d], exp_avg_sq[row, d]
                root = np.sqrt(v)
                if root * safety_ > eps_:
                    values[row, d] -= m / root * a - eps_ * (m / v) * b
                elif m != 0:
                    move = real(0)
                    for j in range(1, min(far, gap) + 1):
                        rate = real(rates[last + j] / (1 - beta1 ** (last + j)))
                        scale = real(1 / np.sqrt(1 - beta2 ** (last + j)))
                        later = np.sqrt(v * real(beta2**j)) * scale
                        move += rate * (m * real(beta1**j)) / (later + eps_)
                    values[row, d] -= move
                exp_avg[row, d] = m * decay1
                exp_avg_sq[row, d] = v * decay2


@jit
def _take_kernel(
    counter,
    items,
    rows,
    active,
    values,
    exp_avg,
    exp_avg_sq,
    row_step,
    grad,
    step,
    rate,
    root,
    beta1,
    beta2,
    rest1,
    rest2,
    eps,
):
    while True:
        block = take_item(counter)
        if block >= items:
            break
        for i in range(block * _BLOCK, min((block + 1) * _BLOCK, len(rows))):
            if active is not None and not active[i]:
                continue
            row = rows[i]
            row_step[row] = step
            for d in range(values.shape[1]):
                g = grad[i, d]
                m = exp_avg[row, d] * beta1 + g * rest1
                v = exp_avg_sq[row, d] * beta2 + g * g * rest2
                exp_avg[row, d] = m
                exp_avg_sq[row, d] = v
                values[row, d] -= rate * m / (np.sqrt(v) * root + eps)
