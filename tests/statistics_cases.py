"""Random splats of a view, and what their statistics have to add up to."""

from __future__ import annotations

from collections.abc import Callable

import torch

from odin_nerfstudio.splat.densify import SplatStatistics

SIZES = [(0, 5), (1, 1), (300, 40), (257, 1000)]
"""Splats, and rows that they are of."""


def random_view(splats: int, rows: int, device: str = "cpu") -> SplatStatistics:
    """Some gradients are zero and some splats are not seen; gradients and radii are columns of a block."""
    random = torch.Generator().manual_seed(splats)
    block = torch.randn(splats, 13, generator=random)
    block[torch.rand(splats, generator=random) < 0.3, :2] = 0
    radii = torch.randint(0, 4, (splats,), generator=random, dtype=torch.int32)
    block[:, -1] = radii.view(torch.float32)
    block = block.to(device)
    index = torch.randint(0, rows, (splats,), generator=random).to(device)
    return SplatStatistics(index, block[:, :2], block[:, -1].view(torch.int32), 50, 80, views=3)


def assert_adds_up(add_up: Callable, splats: int, rows: int, device: str = "cpu") -> None:
    """Splat by splat on top of what was there, with and without radii."""
    view = random_view(splats, rows, device)
    expected = torch.full((3, rows), 0.02, dtype=torch.float64)
    columns = zip(view.index.tolist(), view.grad2d.tolist(), view.radii.tolist(), strict=True)
    for row, (x, y), radius in columns:
        expected[0, row] += 3 * ((x * 25) ** 2 + (y * 40) ** 2) ** 0.5
        expected[1, row] += radius > 0
        expected[2, row] = max(float(expected[2, row]), radius / 80)
    for known in (3, 2):
        found = torch.full((3, rows), 0.02, device=device)
        add_up(view, *found[:known])
        torch.testing.assert_close(found[:known].cpu().double(), expected[:known], rtol=1e-5, atol=1e-6)
        assert (found[known:] == 0.02).all()
