"""Splats that arrive in pieces: how they are merged, and their gradients on the way back."""

from __future__ import annotations

import pytest
from arrival_cases import SIZES, assert_merges, assert_returns, make_pieces

from odin_nerfstudio.splat.fused.leaves import gradients_in_order, merge


@pytest.mark.parametrize("huge", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_splats_ascend_in_id_and_gradients_go_back(sizes: tuple[int, ...], huge: bool) -> None:
    merged = assert_merges(merge, make_pieces(sizes, huge=huge))
    assert (merged.place is None) == (sum(size > 0 for size in sizes) < 2)
    assert_returns(gradients_in_order, merged)


def test_missing_gradients_are_zero() -> None:
    merged = assert_merges(merge, make_pieces((20, 30)))
    assert_returns(gradients_in_order, merged, "depths", "absgrad")
    assert_returns(gradients_in_order, merged, "means2d", "conics", "opacities", "colors")
