"""Blending of splats front to back, and its derivative back to front, one 16×16 tile at a time.

A tile's row of sixteen pixels is one value (:mod:`lanes`). Per pixel and splat, as in gsplat 1.4.0's
``rasterize_to_pixels``: σ = ½(a·dx² + c·dy²) + b·dx·dy, α = min(0.999, o·e^−σ), skipped where σ < 0 or α < 1/255; the
pixel is finished, without this splat, when T·(1 − α) ≤ 10⁻⁴. The derivative recovers T by division, starting from the
final T, and replaces the sums over everything behind by one running number per pixel.

Depth is the expected depth Ez = Σ w·z / Σ w, where Σ w is alpha (and more exact than 1 − T where it is small). Its
derivative is taken as a whole, ∂Ez/∂w = (z − Ez) / Σ w, because the two parts of the quotient rule cancel badly.

Both directions evaluate σ and α with the same instructions, so they agree on which pixels a splat touched.
"""

from __future__ import annotations

import numpy as np

from odin_nerfstudio.cpu.jit import inlined, jit
from odin_nerfstudio.cpu.threads import take
from odin_nerfstudio.splat.raster.numba.lanes import (
    count,
    exponential,
    fill,
    load,
    magnitude,
    multiply_add,
    ramp,
    select,
    store,
    total,
)
from odin_nerfstudio.splat.raster.numba.reach import TILE
from odin_nerfstudio.splat.raster.numba.tiles import (
    BLUE,
    CONIC_A,
    CONIC_B,
    CONIC_C,
    DEPTH,
    END_ROW,
    FIRST_ROW,
    GREEN,
    OPACITY,
    OWNER,
    RED,
    SLOT,
    X,
    Y,
)

PIXELS = TILE * TILE
PARTIAL_WIDTH = 12
"""Floats of a splat's gradient in one tile: mean x, y; conic a, b, c; opacity; red, green, blue; depth; |mean| x, y."""

_ZERO, _HALF, _ONE = np.float32(0.0), np.float32(0.5), np.float32(1.0)
_MAX_ALPHA = np.float32(0.999)
_MIN_ALPHA = np.float32(1.0 / 255.0)
_MIN_TRANSMITTANCE = np.float32(1e-4)
_MIN_WEIGHT = np.float32(1e-10)
_NEVER = np.float32(2**30)

# Sections of a tile's working memory, PIXELS floats each.
_T, _R, _G, _B, _D, _W, _BEHIND, _STOP, _EXPECTED = (PIXELS * section for section in range(9))


@inlined
def _offsets(splat, left):
    """Per column of the tile: dx = mean − pixel, and the parts ½·a·dx² and b·dx of the exponent."""
    dx = (splat[X] - left - _HALF) - ramp()
    return dx, (_HALF * splat[CONIC_A]) * (dx * dx), splat[CONIC_B] * dx


@inlined
def _falloff(splat, dy, quadratic, linear):
    """σ and e^−σ of one row of pixels."""
    sigma = multiply_add(linear, dy, quadratic + _HALF * splat[CONIC_C] * dy * dy)
    return sigma, exponential(_ZERO - sigma)


@inlined
def _place(tile, tile_columns, width, height):
    """Left and top pixel of a tile, and how many columns and rows of it lie in the image."""
    left, top = TILE * (tile % tile_columns), TILE * (tile // tile_columns)
    return left, top, min(TILE, width - left), min(TILE, height - top)


@jit
def blend(
    counter, items, packed, entries, starts, tile_columns, width, height, rgb, alpha, depth, transmittance, stop, tests
):
    """Forms the image.

    Args:
        counter, items: tiles.
        packed: (M, PACKED_WIDTH) float32 splats.
        entries, starts, tile_columns: see :class:`~odin_nerfstudio.splat.raster.numba.tiles.TileLists`.
        width, height: image size.
        rgb, alpha, depth: (H, W, 3), (H, W, 1), (H, W, 1) float32, written; depth is the expected one.
        transmittance: (tiles, PIXELS) float32, written: what is left at each pixel.
        stop: (tiles, PIXELS) float32, written: position in the tile's list of the splat that finished the pixel.
        tests: (tiles,) int64, written: alpha tests of unfinished pixels, the measure of work.
    """
    work = np.empty(9 * PIXELS, dtype=np.float32)
    open_pixels = np.empty(TILE, dtype=np.int64)
    while True:
        tile = take(counter)
        if tile >= items:
            break
        left, top, inside_x, inside_y = _place(tile, tile_columns, width, height)
        left_f, top_f = np.float32(left), np.float32(top)
        for row in range(TILE):
            open_pixels[row] = inside_x if row < inside_y else 0
            # A finished pixel keeps its transmittance with the sign turned; outside the image all are finished.
            open_row = ramp() < np.float32(open_pixels[row])
            store(work, _T + TILE * row, select(open_row, _ONE, _ZERO - _ONE))
            store(work, _STOP + TILE * row, select(open_row, _NEVER, _ZERO))
            for section in (_R, _G, _B, _D, _W):
                store(work, section + TILE * row, fill(_ZERO))
        open_total = inside_x * inside_y
        tested = 0
        first = starts[tile]
        for k in range(starts[tile + 1] - first):
            if open_total == 0:
                break
            splat = packed[entries[first + k, OWNER]]
            _, quadratic, linear = _offsets(splat, left_f)
            for row in range(entries[first + k, FIRST_ROW], entries[first + k, END_ROW]):
                if open_pixels[row] == 0:
                    continue
                tested += open_pixels[row]
                at = TILE * row
                t = load(work, _T + at)
                sigma, falloff = _falloff(splat, splat[Y] - top_f - np.float32(row) - _HALF, quadratic, linear)
                a = splat[OPACITY] * falloff
                a = select(a < _MAX_ALPHA, a, _MAX_ALPHA)
                touched = (a >= _MIN_ALPHA) & (sigma >= _ZERO) & (t > _ZERO)
                t_next = t * (_ONE - a)
                finished = touched & (t_next <= _MIN_TRANSMITTANCE)
                kept = touched & (t_next > _MIN_TRANSMITTANCE)
                closed = count(finished)
                if closed > 0:
                    open_pixels[row] -= closed
                    open_total -= closed
                    store(work, _STOP + at, select(finished, np.float32(k), load(work, _STOP + at)))
                    store(work, _T + at, select(finished, _ZERO - t, select(kept, t_next, t)))
                else:
                    store(work, _T + at, select(kept, t_next, t))
                weight = select(kept, a * t, _ZERO)
                store(work, _R + at, multiply_add(weight, splat[RED], load(work, _R + at)))
                store(work, _G + at, multiply_add(weight, splat[GREEN], load(work, _G + at)))
                store(work, _B + at, multiply_add(weight, splat[BLUE], load(work, _B + at)))
                store(work, _D + at, multiply_add(weight, splat[DEPTH], load(work, _D + at)))
                store(work, _W + at, load(work, _W + at) + weight)
        tests[tile] = tested
        for pixel in range(PIXELS):
            transmittance[tile, pixel] = abs(work[_T + pixel])
            stop[tile, pixel] = work[_STOP + pixel]
        for row in range(inside_y):
            for column in range(inside_x):
                pixel = TILE * row + column
                rgb[top + row, left + column, 0] = work[_R + pixel]
                rgb[top + row, left + column, 1] = work[_G + pixel]
                rgb[top + row, left + column, 2] = work[_B + pixel]
                alpha[top + row, left + column, 0] = work[_W + pixel]
                depth[top + row, left + column, 0] = work[_D + pixel] / max(work[_W + pixel], _MIN_WEIGHT)


@jit
def blend_backward(
    counter, items, packed, entries, starts, tile_columns, width, height, alpha_image, depth_image, transmittance, stop,
    grad_rgb, grad_alpha, grad_depth, partials,
):  # fmt: skip
    """Derivative of :func:`blend`, per splat and tile.

    Args:
        counter … stop: as for :func:`blend`, with ``alpha`` and ``depth`` as ``alpha_image`` and ``depth_image``.
        grad_rgb, grad_alpha, grad_depth: (H, W, 3), (H, W, 1), (H, W, 1) float32.
        partials: (E, PARTIAL_WIDTH) float32, written, by slot.
    """
    work = np.empty(9 * PIXELS, dtype=np.float32)
    row_end = np.empty(TILE, dtype=np.int64)
    while True:
        tile = take(counter)
        if tile >= items:
            break
        left, top, inside_x, inside_y = _place(tile, tile_columns, width, height)
        left_f, top_f = np.float32(left), np.float32(top)
        first, length = starts[tile], starts[tile + 1] - starts[tile]
        last = 0
        for row in range(TILE):
            row_end[row] = 0
            for column in range(TILE):
                pixel = TILE * row + column
                inside = row < inside_y and column < inside_x
                t = transmittance[tile, pixel]
                work[_T + pixel] = t
                work[_STOP + pixel] = stop[tile, pixel]
                work[_R + pixel] = grad_rgb[top + row, left + column, 0] if inside else _ZERO
                work[_G + pixel] = grad_rgb[top + row, left + column, 1] if inside else _ZERO
                work[_B + pixel] = grad_rgb[top + row, left + column, 2] if inside else _ZERO
                work[_D + pixel] = _ZERO
                work[_EXPECTED + pixel] = _ZERO
                if inside:
                    weight_sum = alpha_image[top + row, left + column, 0]
                    work[_D + pixel] = grad_depth[top + row, left + column, 0] / max(weight_sum, _MIN_WEIGHT)
                    work[_EXPECTED + pixel] = depth_image[top + row, left + column, 0]
                # What lies behind a splat, weighted by the incoming gradient; behind all of them, the lost alpha.
                work[_BEHIND + pixel] = -t * grad_alpha[top + row, left + column, 0] if inside else _ZERO
                if inside:
                    row_end[row] = max(row_end[row], min(length, np.int64(stop[tile, pixel])))
            last = max(last, row_end[row])
        for k in range(last, length):
            for j in range(PARTIAL_WIDTH):
                partials[entries[first + k, SLOT], j] = _ZERO
        for k in range(last - 1, -1, -1):
            splat = packed[entries[first + k, OWNER]]
            a, b, c, opacity = splat[CONIC_A], splat[CONIC_B], splat[CONIC_C], splat[OPACITY]
            dx, quadratic, linear = _offsets(splat, left_f)
            adx, bdx = a * dx, linear
            # Sums over rows of u = e^−σ·∂loss/∂α, times 1, dy, dy²; of the gradients of the colours; of |∂loss/∂mean|.
            u0, u1, u2 = fill(_ZERO), fill(_ZERO), fill(_ZERO)
            red, green, blue, depth = fill(_ZERO), fill(_ZERO), fill(_ZERO), fill(_ZERO)
            abs_x, abs_y = fill(_ZERO), fill(_ZERO)
            for row in range(entries[first + k, FIRST_ROW], entries[first + k, END_ROW]):
                if k >= row_end[row]:
                    continue
                at = TILE * row
                dy = splat[Y] - top_f - np.float32(row) - _HALF
                sigma, falloff = _falloff(splat, dy, quadratic, linear)
                raw = opacity * falloff
                alpha = select(raw < _MAX_ALPHA, raw, _MAX_ALPHA)
                touched = (alpha >= _MIN_ALPHA) & (sigma >= _ZERO) & (np.float32(k) < load(work, _STOP + at))
                # With alpha 0 nothing below changes for the pixels that were not touched.
                alpha = select(touched, alpha, _ZERO)
                reciprocal = _ONE / (_ONE - alpha)
                t = load(work, _T + at) * reciprocal
                behind = load(work, _BEHIND + at)
                g_red, g_green, g_blue, g_depth = (
                    load(work, _R + at),
                    load(work, _G + at),
                    load(work, _B + at),
                    load(work, _D + at),
                )
                weight = alpha * t
                along = multiply_add(
                    g_depth,
                    splat[DEPTH] - load(work, _EXPECTED + at),
                    multiply_add(g_blue, splat[BLUE], multiply_add(g_green, splat[GREEN], g_red * splat[RED])),
                )
                u = falloff * (along * t - behind * reciprocal)
                u = select(touched & (raw <= _MAX_ALPHA), u, _ZERO)
                store(work, _T + at, t)
                store(work, _BEHIND + at, multiply_add(along, weight, behind))
                red = multiply_add(weight, g_red, red)
                green = multiply_add(weight, g_green, green)
                blue = multiply_add(weight, g_blue, blue)
                depth = multiply_add(weight, g_depth, depth)
                u0 = u0 + u
                u1 = multiply_add(u, dy, u1)
                u2 = multiply_add(u, dy * dy, u2)
                abs_x = abs_x + magnitude(u * (adx + b * dy))
                abs_y = abs_y + magnitude(u * (bdx + c * dy))
            # ∂loss/∂σ = −o·u.
            m0, mx, my = total(u0), total(u0 * dx), total(u1)
            slot = entries[first + k, SLOT]
            partials[slot, 0] = -opacity * (a * mx + b * my)
            partials[slot, 1] = -opacity * (b * mx + c * my)
            partials[slot, 2] = -opacity * _HALF * total(u0 * (dx * dx))
            partials[slot, 3] = -opacity * total(u1 * dx)
            partials[slot, 4] = -opacity * _HALF * total(u2)
            partials[slot, 5] = m0
            partials[slot, 6] = total(red)
            partials[slot, 7] = total(green)
            partials[slot, 8] = total(blue)
            partials[slot, 9] = total(depth)
            partials[slot, 10] = opacity * total(abs_x)
            partials[slot, 11] = opacity * total(abs_y)


@jit
def gather_partials(counter, items, block, order, slots, partials, gradients):
    """Adds up each splat's partial gradients in the order of its tiles.

    Args:
        counter, items, block: blocks of that many splats.
        order: (M,) int64 the caller's index of each packed splat.
        slots: (M + 1,) int64 see ``TileLists``.
        partials: (E, PARTIAL_WIDTH) float32.
        gradients: (M, PARTIAL_WIDTH) float32, written, in the caller's order.
    """
    sums = np.empty(PARTIAL_WIDTH)
    while True:
        start = take(counter)
        if start >= items:
            break
        for s in range(start * block, min((start + 1) * block, order.shape[0])):
            for j in range(PARTIAL_WIDTH):
                sums[j] = 0.0
            for slot in range(slots[s], slots[s + 1]):
                for j in range(PARTIAL_WIDTH):
                    sums[j] += partials[slot, j]
            for j in range(PARTIAL_WIDTH):
                gradients[order[s], j] = sums[j]
