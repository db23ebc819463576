"""Tile lists hold every pixel that a splat touches, and nothing outside gsplat's tiles."""

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from odin_nerfstudio.splat.raster.numba.tiles import (
    END_ROW,
    FIRST_ROW,
    OWNER,
    PACKED_WIDTH,
    SLOT,
    list_tiles,
)

WIDTH, HEIGHT, TILE = 150, 100, 16


@st.composite
def splats(draw) -> np.ndarray:
    """One packed splat: needles, discs and specks, inside and outside the image."""
    deviations = [math.exp(draw(st.floats(math.log(0.55), math.log(400.0)))) for _ in range(2)]
    angle = draw(st.floats(0, math.pi))
    turn = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    covariance = turn @ np.diag(np.square(deviations)) @ turn.T
    conic = np.linalg.inv(covariance)
    splat = np.zeros(PACKED_WIDTH, np.float32)
    splat[0], splat[1] = draw(st.floats(-200, 350)), draw(st.floats(-200, 300))
    splat[2], splat[3], splat[4] = conic[0, 0], conic[0, 1], conic[1, 1]
    splat[5] = draw(st.one_of(st.floats(0, 1), st.floats(1 / 256, 1 / 254)))
    splat[10] = math.ceil(3 * max(deviations))
    return splat


def _pixels_drawn(splat: np.ndarray) -> np.ndarray:
    """(H, W) whether float32 arithmetic lets the splat draw there."""
    x, y, a, b, c, opacity = splat[:6]
    dx = x - (np.arange(WIDTH, dtype=np.float32)[None] + np.float32(0.5))
    dy = y - (np.arange(HEIGHT, dtype=np.float32)[:, None] + np.float32(0.5))
    half = np.float32(0.5)
    sigma = b * dx * dy + (half * a * (dx * dx) + half * c * dy * dy)
    return (sigma >= 0) & (np.minimum(np.float32(0.999), opacity * np.exp(-sigma)) >= np.float32(1 / 255))


def _tiles_of_the_box(splat: np.ndarray) -> np.ndarray:
    """(H, W) whether the pixel's tile touches the square around the splat."""
    x, y, r = splat[0], splat[1], splat[10]
    column, row = np.arange(WIDTH) // TILE, np.arange(HEIGHT) // TILE
    in_x = (column >= np.floor(x / 16 - r / 16)) & (column < np.ceil(x / 16 + r / 16))
    in_y = (row >= np.floor(y / 16 - r / 16)) & (row < np.ceil(y / 16 + r / 16))
    return in_y[:, None] & in_x[None]


@given(st.lists(splats(), min_size=1, max_size=20))
@settings(max_examples=150, deadline=None)
def test_lists_cover_what_is_drawn(drawn: list[np.ndarray]) -> None:
    packed = np.stack(drawn)
    lists = list_tiles(packed, WIDTH, HEIGHT)
    covered = np.zeros((len(packed), HEIGHT + TILE, WIDTH + TILE), bool)
    slots_seen = []
    for tile in range(len(lists.starts) - 1):
        entries = lists.entries[lists.starts[tile] : lists.starts[tile + 1]]
        assert np.all(np.diff(entries[:, OWNER]) > 0)  # front to back
        top, left = TILE * (tile // lists.columns), TILE * (tile % lists.columns)
        for entry in entries:
            first, end = top + entry[FIRST_ROW], top + entry[END_ROW]
            covered[entry[OWNER], first:end, left : left + TILE] = True
            assert lists.slots[entry[OWNER]] <= entry[SLOT] < lists.slots[entry[OWNER] + 1]
        slots_seen += entries[:, SLOT].tolist()
    assert sorted(slots_seen) == list(range(len(lists.entries)))
    for splat, cover in zip(packed, covered[:, :HEIGHT, :WIDTH], strict=True):
        box = _tiles_of_the_box(splat)
        assert not np.any(cover & ~box)
        assert not np.any(_pixels_drawn(splat) & box & ~cover)
