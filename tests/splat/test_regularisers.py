"""Losses over all primitives: nerfstudio's and 3DGS-MCMC's means, whoever owns the rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from odin_nerfstudio.splat.regularisers import anisotropy, mean_opacity, mean_scale

Loss = Callable[[Tensor, int], Tensor]


def splatfacto(scales: Tensor) -> Tensor:
    """nerfstudio 1.1.5's, without its weight."""
    axes = torch.exp(scales)
    return (torch.maximum(axes.amax(dim=-1) / axes.amin(dim=-1), torch.tensor(2.0)) - 2.0).mean()


@pytest.mark.parametrize(
    ("loss", "expected", "columns"),
    [
        (lambda rows, total: anisotropy(rows, 2.0, total), splatfacto, 3),
        (mean_opacity, lambda rows: torch.sigmoid(rows).mean(), 1),
        (mean_scale, lambda rows: torch.exp(rows).mean(), 3),
    ],
)
def test_shares_add_up_and_a_row_has_the_same_gradient_anywhere(
    loss: Loss, expected: Callable[[Tensor], Tensor], columns: int
) -> None:
    rows = torch.randn(203, columns, generator=torch.Generator().manual_seed(0), requires_grad=True)
    (gradient,) = torch.autograd.grad(loss(rows, 203), rows)
    (reference,) = torch.autograd.grad(expected(rows), rows)
    torch.testing.assert_close(gradient, reference)
    for count in (0, 1, 37, 130, 203):
        shards = rows[:count].detach().requires_grad_(), rows[count:].detach().requires_grad_()
        shares = [loss(shard, 203) for shard in shards]
        torch.testing.assert_close(sum(shares), expected(rows))
        assert torch.equal(torch.cat(torch.autograd.grad(shares, shards)), gradient)


def test_an_invisible_primitive_has_a_gradient() -> None:
    rows = torch.tensor([[-200.0], [200.0]], requires_grad=True)
    assert torch.equal(torch.autograd.grad(mean_opacity(rows, 2), rows)[0], torch.zeros(2, 1))
