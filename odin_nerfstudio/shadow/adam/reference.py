"""Torch twin of the kernels: row-wise Adam on one parameter, on any device and of any type."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from odin_nerfstudio.shadow.adam.state import AdamRows, MissedSteps, safety

_WALK_CHUNK = 1 << 22
"""Elements × steps that are walked at a time."""


@torch.no_grad()
def catch_up(state: AdamRows, rows: Tensor) -> None:
    """Applies to ``rows`` ((R,) int64, all different) every step they have missed. Waits for the device."""
    missed = state.missed
    values, exp_avg, exp_avg_sq = state.flat()
    beta1, beta2, eps = missed.constants
    last = state.row_step[rows].long().clamp_max(missed.now)
    gap = missed.now - last[:, None]
    dtype = values.dtype
    m, v = exp_avg[rows], exp_avg_sq[rows]
    root = v.sqrt()
    far = root * safety(dtype) > eps
    safe_root, safe_v = torch.where(far, root, 1), torch.where(far, v, 1)
    first, second = missed.first[last, None].to(dtype), missed.second[last, None].to(dtype)
    values[rows] -= torch.where(far, m / safe_root * first - eps * (m / safe_v) * second, 0)
    near = (~far & (m != 0) & (gap > 0)).nonzero()
    if len(near):
        row, column = near.unbind(1)
        at = rows[row]
        values[at, column] -= _walked(exp_avg[at, column], exp_avg_sq[at, column], last[row], missed)
    exp_avg[rows] = m * (beta1 ** gap.double()).to(dtype)
    exp_avg_sq[rows] = v * (beta2 ** gap.double()).to(dtype)
    state.row_step.index_fill_(0, rows, float(missed.now))


def _walked(m: Tensor, v: Tensor, last: Tensor, missed: MissedSteps) -> Tensor:
    """(E,) how far the steps since ``last`` ((E,) int64), taken one by one, move elements whose √v is close to ε."""
    beta1, beta2, eps = missed.constants
    longest = min(missed.constants.horizon, missed.now - int(last.min()))
    ages = torch.arange(1, longest + 1, device=m.device)
    decay1, decay2 = ((beta ** ages.double()).to(m.dtype) for beta in (beta1, beta2))
    moves = []
    for first, second, since in zip(
        *(t[:, None].split(max(1, _WALK_CHUNK // longest)) for t in (m, v, last)), strict=True
    ):
        at = since + ages
        rate = missed.rates[at.clamp_max(missed.now)] * (at <= missed.now) / (1 - beta1 ** at.double())
        scale = 1 / (1 - beta2 ** at.double()).sqrt()
        root = (second * decay2).sqrt() * scale.to(m.dtype)
        moves.append((rate.to(m.dtype) * (first * decay1) / (root + eps)).sum(dim=1))
    return torch.cat(moves)


@torch.no_grad()
def take(state: AdamRows, rows: Tensor, grad: Tensor, active: Tensor | None, age: int) -> None:
    """Takes a step on ``rows`` with gradient ``grad`` ((R, D)); see :func:`odin_nerfstudio.shadow.adam.take`."""
    constants, step = state.missed.constants, state.missed.now - age
    beta1, beta2, eps = constants
    c1, c2 = constants.corrections(step)
    tensors = (*state.flat(), state.row_step)
    before = [tensor[rows] for tensor in tensors]
    values, exp_avg, exp_avg_sq, row_step = before
    m = exp_avg * beta1 + grad * (1 - beta1)
    v = exp_avg_sq * beta2 + grad * grad * (1 - beta2)
    moved = values - state.missed.rate(age) / c1 * m / (v.sqrt() / math.sqrt(c2) + eps)
    for tensor, old, new in zip(tensors, before, (moved, m, v, torch.full_like(row_step, step)), strict=True):
        if active is not None:
            new = torch.where(active.view(-1, *[1] * (new.dim() - 1)), new, old)
        tensor[rows] = new
