"""Colours that can be told apart, and heat as matplotlib has it."""

from __future__ import annotations

import matplotlib
import numpy as np
import torch

from odin_nerfstudio.viewer.colors import HATCHES, SPANS, heat, rank_color, rank_hex


def test_ranks_have_colors_of_their_own() -> None:
    colors = [rank_color(rank) for rank in range(24)]
    assert all(0 <= value <= 1 for color in colors for value in color)
    assert len({rank_hex(rank) for rank in range(24)}) == 24
    assert rank_hex(0) == "#56b4e9"  # as in the plan's picture


def test_heat_is_cividis_and_grows_lighter() -> None:
    values = torch.linspace(0, 1, 7).reshape(1, 7)
    expected = matplotlib.colormaps["cividis"](values.numpy())[..., :3]
    np.testing.assert_allclose(heat(values).numpy(), expected, atol=0.01)
    light = heat(values)[0] @ torch.tensor([0.2126, 0.7152, 0.0722])
    assert (light.diff() > 0).all()


def test_heat_of_what_is_no_share() -> None:
    colors = heat(torch.tensor([-1.0, float("nan"), 0.0, 2.0, 1.0]))
    assert (colors[0] == colors[2]).all() and (colors[1] == colors[2]).all() and (colors[3] == colors[4]).all()


def test_kinds_of_spans_differ_without_color_too() -> None:
    hatched = [kind for kind, hatch in HATCHES.items() if hatch]
    assert set(SPANS) == set(HATCHES) and hatched == ["wait", "hidden"]
    assert len({HATCHES[kind] for kind in hatched}) == 2
