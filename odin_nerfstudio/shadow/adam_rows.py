"""Row-wise Adam: the arithmetic of one step and of many missed steps, as a compiled kernel and as its torch twin.

A row that lies outside every scope has a zero gradient for certain. Its Adam update at step j after its last one, s, is
then known without looking at it (Kingma & Ba 2015, algorithm 1, with g = 0):

    m_j = β₁ʲ m      v_j = β₂ʲ v      θ_j = θ_{j−1} − lr_{s+j} · m_j / c₁ / (√(v_j / c₂) + ε),   cᵢ = 1 − βᵢ^{s+j}

Summed over the missed steps, to second order in ε/√v:

    θ ← θ − (m/√v) · A[s] + ε · (m/v) · B[s]
    A[s] = Σⱼ lr_{s+j} · √c₂/c₁ · (β₁/√β₂)ʲ       B[s] = Σⱼ lr_{s+j} · c₂/c₁ · (β₁/β₂)ʲ

so that catching a row up costs the same whether it missed one step or a thousand. ``MissedSteps`` keeps A and B for
every s. Elements whose √v is not far above ε take the missed steps one by one; beyond ``horizon`` of them a step moves
nothing any more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from odin_nerfstudio.cpu.jit import jit
from odin_nerfstudio.cpu.threads import run, take

_NEGLIGIBLE = 1e-18
"""Decay after which a missed step cannot change a float64 parameter."""
_BLOCK = 1024
"""Rows that one thread takes at a time."""
_WALK_CHUNK = 1 << 22
"""Elements × steps that the torch twin walks at a time."""


class AdamConstants(NamedTuple):
    """What every step of a run shares."""

    beta1: float
    beta2: float
    eps: float

    @property
    def horizon(self) -> int:
        """Number of missed steps after which the rest of the momentum moves nothing."""
        return math.ceil(math.log(_NEGLIGIBLE) / math.log(self.beta1 / self.beta2))

    @property
    def reach(self) -> float:
        """Largest |m|/√v that any gradient history can reach: (1−β₁)/√(1−β₂) · 1/√(1−β₁²/β₂), by Cauchy–Schwarz."""
        return (1 - self.beta1) / math.sqrt((1 - self.beta2) * (1 - self.beta1**2 / self.beta2))


class MissedSteps:
    """The sums A and B, indexed by the step a row is up to date with, and the learning rate of every step.

    Args:
        constants: β₁, β₂ and ε of the run; β₁ must be below β₂.
        start: steps that were taken before; rows must be up to date with them.
        device: where the tables live.
    """

    def __init__(self, constants: AdamConstants, start: int, device: torch.device) -> None:
        self.constants = constants
        self.now = start
        self._first = torch.zeros(start + 1024, dtype=torch.float64, device=device)
        self._second = torch.zeros_like(self._first)
        self._rates = torch.zeros_like(self._first)
        ages = torch.arange(constants.horizon, 0, -1, dtype=torch.float64, device=device)
        self._decay_first = (constants.beta1 / math.sqrt(constants.beta2)) ** ages
        self._decay_second = (constants.beta1 / constants.beta2) ** ages

    @property
    def first(self) -> Tensor:
        """(now + 1,) float64: A."""
        return self._first[: self.now + 1]

    @property
    def second(self) -> Tensor:
        """(now + 1,) float64: B."""
        return self._second[: self.now + 1]

    @property
    def rates(self) -> Tensor:
        """(now + 1,) float64: learning rate of each step since ``start``; step t is at index t."""
        return self._rates[: self.now + 1]

    def append(self, lr: float) -> None:
        """Records that a step with learning rate ``lr`` was taken; rows not in it have missed it."""
        if self.now + 2 > len(self._first):
            for name in ("_first", "_second", "_rates"):
                table = getattr(self, name)
                setattr(self, name, torch.cat([table, torch.zeros_like(table)]))
        self.now += 1
        c1, c2 = 1 - self.constants.beta1**self.now, 1 - self.constants.beta2**self.now
        reached = slice(max(0, self.now - self.constants.horizon), self.now)
        count = reached.stop - reached.start
        self._first[reached].add_(self._decay_first[len(self._decay_first) - count :], alpha=lr * math.sqrt(c2) / c1)
        self._second[reached].add_(self._decay_second[len(self._decay_second) - count :], alpha=lr * c2 / c1)
        self._rates[self.now] = lr


@dataclass(frozen=True)
class AdamRows:
    """One parameter with its moments, seen as N rows of D numbers; the tensors are written in place."""

    values: Tensor
    """(N, D) the parameter."""
    exp_avg: Tensor
    """(N, D) first moment."""
    exp_avg_sq: Tensor
    """(N, D) second moment."""
    row_step: Tensor
    """(N,) float32: the step each row is up to date with."""


def catch_up(state: AdamRows, rows: Tensor, missed: MissedSteps) -> None:
    """Applies to ``rows`` ((R,) int64, all different) every step they have missed.

    CPU tensors take the compiled kernel, others :func:`_catch_up`.
    """
    if state.values.device.type != "cpu":
        return _catch_up(state, rows, missed)
    tables = (missed.first.numpy(), missed.second.numpy(), missed.rates.numpy())
    beta1, beta2, eps = missed.constants
    scalars = (beta1, beta2, eps, _safety(state.values.dtype), missed.constants.horizon)
    run(_catch_up_kernel, _blocks(rows), rows.numpy(), *_arrays(state), *tables, *scalars)


def step_rows(state: AdamRows, rows: Tensor, grad: Tensor, lr: float, step: int, constants: AdamConstants) -> None:
    """Takes Adam's step number ``step`` (from 1) on ``rows`` with gradient ``grad`` ((R, D)); see :func:`catch_up`."""
    if state.values.device.type != "cpu":
        return _step_rows(state, rows, grad, lr, step, constants)
    c1, c2 = 1 - constants.beta1**step, 1 - constants.beta2**step
    real = state.values.numpy().dtype.type
    beta1, beta2, eps = constants
    scalars = (real(x) for x in (lr / c1, 1 / math.sqrt(c2), beta1, beta2, 1 - beta1, 1 - beta2, eps))
    run(_step_kernel, _blocks(rows), rows.numpy(), *_arrays(state), grad.numpy(), np.float32(step), *scalars)


def _catch_up(state: AdamRows, rows: Tensor, missed: MissedSteps) -> None:
    """Torch twin of the catch-up kernel."""
    constants = missed.constants
    last = state.row_step[rows].long().clamp_max(missed.now)
    gap = missed.now - last[:, None]
    dtype = state.values.dtype
    m, v = state.exp_avg[rows], state.exp_avg_sq[rows]
    root = v.sqrt()
    far = root * _safety(dtype) > constants.eps
    safe_root, safe_v = torch.where(far, root, 1), torch.where(far, v, 1)
    first, second = missed.first[last, None].to(dtype), missed.second[last, None].to(dtype)
    move = torch.where(far, m / safe_root * first - constants.eps * (m / safe_v) * second, 0)
    state.values[rows] -= move
    near = (~far & (m != 0) & (gap > 0)).nonzero()
    if len(near):
        _walk(state, rows[near[:, 0]], near[:, 1], last[near[:, 0], None], missed)
    state.exp_avg[rows] = m * (constants.beta1 ** gap.double()).to(dtype)
    state.exp_avg_sq[rows] = v * (constants.beta2 ** gap.double()).to(dtype)
    state.row_step[rows] = float(missed.now)


def _walk(state: AdamRows, row: Tensor, column: Tensor, last: Tensor, missed: MissedSteps) -> None:
    """Takes the missed steps one by one on single elements, whose √v is close to ε: ``row``, ``column`` (E,), ``last``
    (E, 1)."""
    beta1, beta2, eps = missed.constants
    dtype = state.values.dtype
    longest = min(missed.constants.horizon, missed.now - int(last.min()))
    ages = torch.arange(1, longest + 1, device=row.device)
    chunk = max(1, _WALK_CHUNK // longest)
    for r, c, since in zip(row.split(chunk), column.split(chunk), last.split(chunk), strict=True):
        at = since + ages
        rate = missed.rates[at.clamp_max(missed.now)] * (at <= missed.now) / (1 - beta1 ** at.double())
        scale = 1 / (1 - beta2 ** at.double()).sqrt()
        m = state.exp_avg[r, c, None] * (beta1 ** ages.double()).to(dtype)
        root = (state.exp_avg_sq[r, c, None] * (beta2 ** ages.double()).to(dtype)).sqrt()
        state.values[r, c] -= (rate.to(dtype) * m / (root * scale.to(dtype) + eps)).sum(dim=1)


def _step_rows(state: AdamRows, rows: Tensor, grad: Tensor, lr: float, step: int, constants: AdamConstants) -> None:
    """Torch twin of the step kernel."""
    beta1, beta2, eps = constants
    m = state.exp_avg[rows] * beta1 + grad * (1 - beta1)
    v = state.exp_avg_sq[rows] * beta2 + grad * grad * (1 - beta2)
    state.exp_avg[rows], state.exp_avg_sq[rows] = m, v
    state.values[rows] -= lr / (1 - beta1**step) * m / (v.sqrt() / math.sqrt(1 - beta2**step) + eps)
    state.row_step[rows] = float(step)


def _safety(dtype: torch.dtype) -> float:
    """Bound on ε/√v below which the third order of the expansion is under the rounding of ``dtype``."""
    return 1e-4 if dtype == torch.float32 else 1e-8


def _arrays(state: AdamRows) -> tuple[np.ndarray, ...]:
    return state.values.numpy(), state.exp_avg.numpy(), state.exp_avg_sq.numpy(), state.row_step.numpy()


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
        block = take(counter)
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
def _step_kernel(
    counter, items, rows, values, exp_avg, exp_avg_sq, row_step, grad, step, rate, root, beta1, beta2, rest1, rest2, eps
):
    while True:
        block = take(counter)
        if block >= items:
            break
        for i in range(block * _BLOCK, min((block + 1) * _BLOCK, len(rows))):
            row = rows[i]
            row_step[row] = step
            for d in range(values.shape[1]):
                g = grad[i, d]
                m = exp_avg[row, d] * beta1 + g * rest1
                v = exp_avg_sq[row, d] * beta2 + g * g * rest2
                exp_avg[row, d] = m
                exp_avg_sq[row, d] = v
                values[row, d] -= rate * m / (np.sqrt(v) * root + eps)
