"""Reading rows of parameters so that their gradient comes back as rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, param: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.shape = param.shape
        return param.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        sparse = torch.sparse_coo_tensor(
            rows[None], grad.contiguous(), ctx.shape, is_coalesced=True, check_invariants=False
        )
        return sparse, None


def gather_rows(param: Tensor, rows: Tensor) -> Tensor:
    """``param[rows]`` whose backward gives ``param`` a sparse COO gradient with exactly these rows.

    ``torch.nn.functional.embedding(sparse=True)`` for parameters of any number of dimensions. Cost of forward and
    backward grows with the rows, not with the parameter.

    Args:
        param: (N, ...) parameter.
        rows: (R,) int64, ascending.

    Returns:
        (R, ...) tensor.
    """
    return _GatherRows.apply(param, rows)
