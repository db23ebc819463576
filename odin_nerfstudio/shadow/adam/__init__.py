"""Row-wise Adam: one step, and many missed steps at once, on chosen rows of several parameters.

A row that lies outside every scope has a zero gradient for certain. Its Adam update at step j after its last one, s, is
then known without looking at it (Kingma & Ba 2015, algorithm 1, with g = 0):

    m_j = β₁ʲ m      v_j = β₂ʲ v      θ_j = θ_{j−1} − lr_{s+j} · m_j / c₁ / (√(v_j / c₂) + ε),   cᵢ = 1 − βᵢ^{s+j}

Summed over the missed steps, to second order in ε/√v:

    θ ← θ − (m/√v) · A[s] + ε · (m/v) · B[s]
    A[s] = Σⱼ lr_{s+j} · √c₂/c₁ · (β₁/√β₂)ʲ       B[s] = Σⱼ lr_{s+j} · c₂/c₁ · (β₁/β₂)ʲ

so that catching a row up costs the same whether it missed one step or a thousand. ``MissedSteps`` keeps A and B for
every s. Elements whose √v is not far above ε take the missed steps one by one; beyond ``horizon`` of them a step moves
nothing any more.

On the CPU a compiled kernel takes one parameter after the other. On CUDA one kernel takes all float32 parameters; other
types, and machines without a compiler, take the torch twin.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from odin_nerfstudio import kernels
from odin_nerfstudio.shadow.adam import reference
from odin_nerfstudio.shadow.adam.state import AdamConstants, AdamRows, MissedSteps, flat

__all__ = ["AdamConstants", "AdamRows", "MissedSteps", "announce", "catch_up", "take"]


def announce(steps: Sequence[tuple[MissedSteps, float]]) -> None:
    """Begins the next step of several parameters: ``(tables, learning rate)`` each."""
    if not steps:
        return
    device = steps[0][0].tables.device
    if device.type == "cuda" and kernels.available("adam_rows", device):
        from odin_nerfstudio.shadow.adam import cuda

        return cuda.announce(steps)
    for missed, lr in steps:
        missed.append(lr)


def catch_up(params: Sequence[AdamRows], rows: Tensor | None) -> None:
    """Applies to ``rows`` every step that they have missed.

    Args:
        params: of the same N, on one device.
        rows: (R,) int64, all different; None for every row.
    """
    if not params:
        return
    if _is_fused(params):
        from odin_nerfstudio.shadow.adam import cuda

        return cuda.catch_up(params, rows)
    for param in params:
        chosen = torch.arange(len(param.values), device=param.values.device) if rows is None else rows
        _backend(param).catch_up(param, chosen)


def take(params: Sequence[AdamRows], rows: Tensor, grads: Sequence[Tensor], active: Tensor | None, age: int) -> None:
    """Takes a step on ``rows`` that has begun; they must be up to date with the one before it.

    Args:
        params: of the same N, on one device.
        rows: (R,) int64, all different.
        grads: (R, ...) for each parameter.
        active: (R,) bool, the rows that take the step, None for all; the others are as if they were not there.
        age: 0 for the newest step, 1 for the one before it.
    """
    if not params:
        return
    if _is_fused(params):
        from odin_nerfstudio.shadow.adam import cuda

        return cuda.take(params, rows, grads, active, age)
    for param, grad in zip(params, grads, strict=True):
        _backend(param).take(param, rows, flat(grad), active, age)


def _is_fused(params: Sequence[AdamRows]) -> bool:
    device = params[0].values.device
    if device.type != "cuda" or any(param.values.dtype != torch.float32 for param in params):
        return False
    return kernels.available("adam_rows", device)


def _backend(param: AdamRows):
    """Where ``catch_up`` and ``take`` of one parameter are."""
    if param.values.device.type != "cpu":
        return reference
    from odin_nerfstudio.shadow.adam import numba

    return numba
