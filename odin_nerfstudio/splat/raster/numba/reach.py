"""How far a splat can matter: bounds on the ellipse outside which its alpha is surely below 1/255.

Leaving such pixels out changes no value, because the blending skips them anyway. "Surely" includes rounding: the
ellipse is the level set of a little more than the exact threshold, by as much as the blending's float32 exponent can
be off. Offsets are pixel − mean. The band-wise extent follows "SnugBox" and "AccuTile" of Speedy-Splat (Hanson et al.
2024).
"""

from __future__ import annotations

import math

from odin_nerfstudio.cpu.jit import inlined

# Relative errors of the float32 exponential, of its product with the opacity, and of the constant 1/255.
_EXPONENT_SLACK = 1e-5
# The exponent is a sum of products of float32 numbers: at most a dozen roundings of its largest terms.
_ROUNDING = 16.0 * 2.0**-24
TILE = 16


@inlined
def level(a, b, c, opacity, radius):
    """Twice the largest exponent that still matters to any pixel of the splat's tiles; negative if none does.

    A pixel of a tile that the splat's box touches is less than ``radius + TILE`` away in x and y.
    """
    if not 255.0 * opacity > 0.0:
        return -1.0
    far = radius + TILE
    return 2.0 * (math.log(255.0 * opacity) + _EXPONENT_SLACK + _ROUNDING * (a + c) * far * far)


@inlined
def _boundary(p, b, r, top, determinant, other, sign):
    """The coordinate of the ellipse p·u² + 2b·u·w + r·w² = top at w = ``other``, on the side of ``sign``."""
    return (-b * other + sign * math.sqrt(max(0.0, top * p - determinant * other * other))) / p


@inlined
def extent(p, b, r, top, start, stop):
    """Interval of u in which p·u² + 2b·u·w + r·w² ≤ top for some w in [start, stop]; empty as (1, −1).

    For a range of rows pass (a, b, c) and get columns; for a range of columns pass (c, b, a) and get rows.
    """
    determinant = p * r - b * b
    if not (determinant > 0.0 and p > 0.0 and r > 0.0):
        # Rounding made the conic degenerate: no bound.
        return -1e30, 1e30
    w_most = math.sqrt(top * p / determinant)
    start, stop = max(start, -w_most), min(stop, w_most)
    if start > stop:
        return 1.0, -1.0
    # The extreme points of the whole ellipse; where they are outside the band, its edge holds the extreme.
    w_right = -b * math.sqrt(top / (r * determinant))
    low = _boundary(p, b, r, top, determinant, min(max(-w_right, start), stop), -1.0)
    high = _boundary(p, b, r, top, determinant, min(max(w_right, start), stop), 1.0)
    return low, high
