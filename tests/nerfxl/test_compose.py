"""A field cut into tiles against the field in one piece: values and gradients."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from odin_nerfstudio.nerfxl.compose import compose
from odin_nerfstudio.nerfxl.reference import Exchange, cut_errors, single_errors

BACKGROUND = torch.tensor([0.3, 0.6, 0.9], dtype=torch.float64)


@given(st.integers(0, 2**32 - 1), st.integers(1, 8), st.sampled_from(["tile", "sample"]))
@settings(deadline=None, max_examples=40)
def test_cut_field_equals_the_field_in_one_piece(seed: int, count: int, exchange: Exchange) -> None:
    for name, error in cut_errors(seed, count, exchange).items():
        assert error < 1e-12, name


@given(st.integers(0, 2**32 - 1), st.integers(1, 8), st.sampled_from([0.0, 1e4]))
@settings(deadline=None, max_examples=25)
def test_single_precision_at_large_coordinates(seed: int, count: int, away: float) -> None:
    for name, error in single_errors(seed, count, away).items():
        assert error < 1e-4, name


def test_absent_tiles_and_opaque_ones() -> None:
    segments = torch.zeros(1, 3, 6, dtype=torch.float64, requires_grad=True)
    order, enter = torch.tensor([[2, 0, 1]]), torch.tensor([[1.0, 2.0, 0.0]], dtype=torch.float64)
    empty = compose(segments, order, enter, BACKGROUND)
    assert torch.equal(empty.rgb[0], BACKGROUND)
    assert all(not part.any() for part in empty[1:])

    wall = segments.detach().clone()
    wall[0, 0] = torch.tensor([1e5, 0.125, 0.25, 0.5, 0.5, 0.0])
    wall[0, 1] = torch.tensor([2.0, 1.0, 1.0, 1.0, 0.1, 0.1])
    wall.requires_grad_()
    hidden = compose(wall, order, enter, BACKGROUND)
    assert hidden.rgb[0].tolist() == [0.125, 0.25, 0.5]
    assert hidden.depth.item() == 1.5 and hidden.accumulation.item() == 1.0
    assert hidden.tile_weights.tolist() == [[1.0, 0.0, 0.0]]
    (slope,) = torch.autograd.grad(torch.cat([*hidden], dim=1).sum(), wall)
    assert slope.isfinite().all() and not slope[0, 1].any()
