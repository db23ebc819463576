"""Which splats each 16×16 tile has to look at, front to back.

A tile's list holds the splats whose square of side 2·radius touches the tile (gsplat's rule), less those that
:mod:`reach` proves invisible there. Splats come sorted by depth, so the lists need counting but no sorting.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from odin_nerfstudio.cpu.jit import inlined, jit
from odin_nerfstudio.cpu.threads import run, take
from odin_nerfstudio.splat.raster.numba.reach import TILE, extent, level

# Splats are counted and listed in this many chunks, whose results are joined in order.
_CHUNKS = 16

# Columns of a packed splat, the form in which blending reads it: one cache line each.
X, Y, CONIC_A, CONIC_B, CONIC_C, OPACITY, RED, GREEN, BLUE, DEPTH, RADIUS = range(11)
PACKED_WIDTH = 16

# Columns of an entry of a tile's list.
OWNER, SLOT, FIRST_ROW, END_ROW = range(4)


@jit
def pack(counter, items, block, order, means2d, conics, opacities, colors, depths, radii, packed):
    """Copies splats into ``packed`` (M, PACKED_WIDTH) in the ``order`` given, (M,) int64, ``block`` splats an item."""
    while True:
        start = take(counter)
        if start >= items:
            break
        for s in range(start * block, min((start + 1) * block, order.shape[0])):
            m = order[s]
            packed[s, X], packed[s, Y] = means2d[m, 0], means2d[m, 1]
            packed[s, CONIC_A], packed[s, CONIC_B], packed[s, CONIC_C] = conics[m, 0], conics[m, 1], conics[m, 2]
            packed[s, OPACITY] = opacities[m]
            packed[s, RED], packed[s, GREEN], packed[s, BLUE] = colors[m, 0], colors[m, 1], colors[m, 2]
            packed[s, DEPTH] = depths[m]
            packed[s, RADIUS] = radii[m]


class TileLists(NamedTuple):
    """The lists of all tiles, row-major, one after the other. E entries, M splats."""

    entries: np.ndarray
    """(E, 4) int32: packed splat, slot, first row and end row of the tile that it can reach."""
    starts: np.ndarray
    """(tiles + 1,) int64: where each tile's list begins."""
    slots: np.ndarray
    """(M + 1,) int64: a splat's slots ``slots[s] … slots[s + 1] − 1`` number its tiles in row-major order."""
    columns: int
    """Tiles per row of the image."""


@inlined
def _clipped(value, most):
    return min(max(int(value), 0), most)


@inlined
def _tile_box(splat, tile_columns, tile_rows):
    """Tiles that the square around the splat touches, in gsplat's float32 arithmetic: left, right, top, bottom."""
    size = np.float32(TILE)
    x, y, r = splat[X] / size, splat[Y] / size, splat[RADIUS] / size
    return (
        _clipped(math.floor(x - r), tile_columns),
        _clipped(math.ceil(x + r), tile_columns),
        _clipped(math.floor(y - r), tile_rows),
        _clipped(math.ceil(y + r), tile_rows),
    )


@inlined
def _conic(splat):
    return float(splat[CONIC_A]), float(splat[CONIC_B]), float(splat[CONIC_C])


@inlined
def _tiles_in_row(splat, top, tile_row, left, right):
    """The part of tiles ``left … right − 1`` of one tile row that the splat reaches."""
    a, b, c = _conic(splat)
    x, y = float(splat[X]), float(splat[Y])
    first_row = TILE * tile_row + 0.5 - y
    low, high = extent(a, b, c, top, first_row, first_row + TILE - 1)
    first = max(float(left), math.ceil((x + low + 0.5) / TILE) - 1.0)
    end = min(float(right), math.floor((x + high - 0.5) / TILE) + 1.0)
    return int(first), int(end)


@inlined
def _rows_in_tile(splat, top, tile_row, tile_column):
    """First and end row within a tile that the splat reaches."""
    a, b, c = _conic(splat)
    first_column = TILE * tile_column + 0.5 - float(splat[X])
    low, high = extent(c, b, a, top, first_column, first_column + TILE - 1)
    origin = float(splat[Y]) - 0.5 - TILE * tile_row
    first = min(max(math.ceil(origin + low), 0.0), float(TILE))
    end = min(max(math.floor(origin + high) + 1.0, first), float(TILE))
    return int(first), int(end)


@jit
def _count(counter, items, packed, tile_columns, tile_rows, per_splat, per_tile):
    """Number of tiles of each splat (M,), and entries of each tile by chunk (chunks, tiles)."""
    while True:
        chunk = take(counter)
        if chunk >= items:
            break
        for s in range(chunk * packed.shape[0] // items, (chunk + 1) * packed.shape[0] // items):
            splat = packed[s]
            top = level(splat[CONIC_A], splat[CONIC_B], splat[CONIC_C], float(splat[OPACITY]), float(splat[RADIUS]))
            per_splat[s] = 0
            if not top > 0.0:
                continue
            left, right, upper, lower = _tile_box(splat, tile_columns, tile_rows)
            for tile_row in range(upper, lower):
                first, end = _tiles_in_row(splat, top, tile_row, left, right)
                for tile_column in range(first, end):
                    per_tile[chunk, tile_row * tile_columns + tile_column] += 1
                    per_splat[s] += 1


@jit
def _list(counter, items, packed, tile_columns, tile_rows, slots, cursors, entries):
    """Writes the entries; ``cursors`` (chunks, tiles) says where each chunk's part of each list begins."""
    while True:
        chunk = take(counter)
        if chunk >= items:
            break
        for s in range(chunk * packed.shape[0] // items, (chunk + 1) * packed.shape[0] // items):
            splat = packed[s]
            slot = slots[s]
            if slots[s + 1] == slot:
                continue
            top = level(splat[CONIC_A], splat[CONIC_B], splat[CONIC_C], float(splat[OPACITY]), float(splat[RADIUS]))
            left, right, upper, lower = _tile_box(splat, tile_columns, tile_rows)
            for tile_row in range(upper, lower):
                first, end = _tiles_in_row(splat, top, tile_row, left, right)
                for tile_column in range(first, end):
                    tile = tile_row * tile_columns + tile_column
                    entry = cursors[chunk, tile]
                    cursors[chunk, tile] += 1
                    first_row, end_row = _rows_in_tile(splat, top, tile_row, tile_column)
                    entries[entry, OWNER] = s
                    entries[entry, SLOT] = slot
                    entries[entry, FIRST_ROW] = first_row
                    entries[entry, END_ROW] = end_row
                    slot += 1


def list_tiles(packed: np.ndarray, width: int, height: int) -> TileLists:
    """Makes the tile lists of an image.

    Args:
        packed: (M, PACKED_WIDTH) float32 splats, front to back.
        width, height: image size in pixels.
    """
    tile_columns, tile_rows = -(-width // TILE), -(-height // TILE)
    tiles = tile_columns * tile_rows
    per_splat = np.empty(len(packed), dtype=np.int64)
    per_tile = np.zeros((_CHUNKS, tiles), dtype=np.int64)
    run(_count, _CHUNKS, packed, tile_columns, tile_rows, per_splat, per_tile)

    slots = np.concatenate(([0], np.cumsum(per_splat)))
    # By tile, then by chunk: chunks are runs of the depth order, so each list comes out front to back.
    ends = np.cumsum(per_tile.T.ravel()).reshape(tiles, _CHUNKS)
    cursors = np.ascontiguousarray((ends - per_tile.T).T)
    starts = np.concatenate(([0], ends[:, -1]))
    entries = np.empty((int(starts[-1]), 4), dtype=np.int32)
    run(_list, _CHUNKS, packed, tile_columns, tile_rows, slots, cursors, entries)
    return TileLists(entries, starts, slots, tile_columns)
