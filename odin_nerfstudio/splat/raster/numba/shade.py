"""Colour of a splat seen from the camera: real spherical harmonics up to degree 3, and the derivative.

Basis, signs and order are those of gsplat 1.4.0 (Sloan, "Efficient Spherical Harmonic Evaluation", JCGT 2013); colour =
max(0, ½ + Σ_k Y_k(direction)·coefficient_k), direction = mean − camera centre, normalised.
"""

from __future__ import annotations

import math

import numpy as np

from odin_nerfstudio.cpu.jit import inlined, jit
from odin_nerfstudio.cpu.threads import take
from odin_nerfstudio.splat.raster.numba.project import BLOCK, sigmoid

_Y0 = 0.28209479177387814
_Y1 = 0.4886025119029199
_Y2 = (1.0925484305920792, 0.31539156525252005, 0.5462742152960396)
_Y3 = (0.5900435899266435, 2.890611442640554, 0.4570457994644658, 0.3731763325901154, 1.4453057213202769)


@inlined
def _basis(x, y, z, values):
    """The 16 basis functions at a unit vector, into ``values`` (16,)."""
    xx, yy, zz = x * x, y * y, z * z
    values[0] = _Y0
    values[1] = -_Y1 * y
    values[2] = _Y1 * z
    values[3] = -_Y1 * x
    values[4] = _Y2[0] * x * y
    values[5] = -_Y2[0] * y * z
    values[6] = _Y2[1] * (3.0 * zz - 1.0)
    values[7] = -_Y2[0] * x * z
    values[8] = _Y2[2] * (xx - yy)
    values[9] = -_Y3[0] * y * (3.0 * xx - yy)
    values[10] = _Y3[1] * x * y * z
    values[11] = -_Y3[2] * y * (5.0 * zz - 1.0)
    values[12] = _Y3[3] * z * (5.0 * zz - 3.0)
    values[13] = -_Y3[2] * x * (5.0 * zz - 1.0)
    values[14] = _Y3[4] * z * (xx - yy)
    values[15] = -_Y3[0] * x * (xx - 3.0 * yy)


@inlined
def _basis_slope(x, y, z, g, degree):
    """Σ_k g_k·∂Y_k/∂(x, y, z) for ``g`` (16,)."""
    xx, yy, zz = x * x, y * y, z * z
    gx = gy = gz = 0.0
    if degree >= 1:
        gx -= _Y1 * g[3]
        gy -= _Y1 * g[1]
        gz += _Y1 * g[2]
    if degree >= 2:
        gx += _Y2[0] * (y * g[4] - z * g[7]) + 2.0 * _Y2[2] * x * g[8]
        gy += _Y2[0] * (x * g[4] - z * g[5]) - 2.0 * _Y2[2] * y * g[8]
        gz += 6.0 * _Y2[1] * z * g[6] - _Y2[0] * (y * g[5] + x * g[7])
    if degree >= 3:
        band = _Y3[2] * (5.0 * zz - 1.0)
        gx += _Y3[1] * y * z * g[10] - band * g[13] + 2.0 * _Y3[4] * x * z * g[14]
        gx -= _Y3[0] * (6.0 * x * y * g[9] + 3.0 * (xx - yy) * g[15])
        gy += _Y3[1] * x * z * g[10] - band * g[11] - 2.0 * _Y3[4] * y * z * g[14]
        gy -= _Y3[0] * (3.0 * (xx - yy) * g[9] - 6.0 * x * y * g[15])
        gz += _Y3[1] * x * y * g[10] - 10.0 * _Y3[2] * z * (y * g[11] + x * g[13])
        gz += _Y3[3] * (15.0 * zz - 3.0) * g[12] + _Y3[4] * (xx - yy) * g[14]
    return gx, gy, gz


@inlined
def _direction(means, i, centre):
    """Unit vector from the camera to row ``i``, and the distance."""
    x, y, z = means[i, 0] - centre[0], means[i, 1] - centre[1], means[i, 2] - centre[2]
    distance = math.sqrt(x * x + y * y + z * z)
    return x / distance, y / distance, z / distance, distance


@inlined
def _harmonic_color(dc, rest, i, channel, values, terms):
    """½ + Σ_k Y_k·coefficient_k, before the clamp."""
    color = 0.5 + values[0] * dc[i, channel]
    for k in range(1, terms):
        color += values[k] * rest[i, k - 1, channel]
    return color


@jit
def shade(counter, items, index, means, dc, rest, centre, degree, colors):
    """Colours of the M visible rows.

    Args:
        counter, items: blocks of ``BLOCK`` splats.
        index: (M,) int64 row of each splat.
        means, dc, rest: (N, 3), (N, 3), (N, ≥ (degree + 1)² − 1, 3) float32.
        centre: tuple of the camera's world position, float64.
        degree: 0 … 3, or −1 where the colour is ``sigmoid(dc)``.
        colors: (M, 3) float32, written.
    """
    values = np.empty(16)
    while True:
        block = take(counter)
        if block >= items:
            break
        for m in range(block * BLOCK, min((block + 1) * BLOCK, index.shape[0])):
            i = index[m]
            if degree < 0:
                for channel in range(3):
                    colors[m, channel] = sigmoid(float(dc[i, channel]))
                continue
            x, y, z, _ = _direction(means, i, centre)
            _basis(x, y, z, values)
            for channel in range(3):
                color = _harmonic_color(dc, rest, i, channel, values, (degree + 1) ** 2)
                colors[m, channel] = max(0.0, color)


@jit
def shade_backward(
    counter, items, index, means, dc, rest, centre, degree, grad_colors, grad_means, grad_dc, grad_rest, grad_centre
):
    """Derivative of :func:`shade`.

    Args:
        counter … degree: as for :func:`shade`.
        grad_colors: (M, 3) float32.
        grad_means, grad_dc, grad_rest: shaped like ``means``, ``dc``, ``rest``; rows in ``index`` are written, of
            ``grad_rest`` as far as ``degree`` reaches.
        grad_centre: (items, 3) float64, written: per block the gradient of the camera's position.
    """
    values = np.empty(16)
    g_values = np.empty(16)
    while True:
        block = take(counter)
        if block >= items:
            break
        for r in range(3):
            grad_centre[block, r] = 0.0
        for m in range(block * BLOCK, min((block + 1) * BLOCK, index.shape[0])):
            i = index[m]
            if degree < 0:
                for channel in range(3):
                    color = sigmoid(float(dc[i, channel]))
                    grad_dc[i, channel] = grad_colors[m, channel] * color * (1.0 - color)
                continue
            x, y, z, distance = _direction(means, i, centre)
            _basis(x, y, z, values)
            terms = (degree + 1) ** 2
            for k in range(terms):
                g_values[k] = 0.0
            for channel in range(3):
                g = float(grad_colors[m, channel])
                if _harmonic_color(dc, rest, i, channel, values, terms) < 0.0:
                    g = 0.0
                grad_dc[i, channel] = g * values[0]
                for k in range(1, terms):
                    grad_rest[i, k - 1, channel] = g * values[k]
                    g_values[k] += g * rest[i, k - 1, channel]
            gx, gy, gz = _basis_slope(x, y, z, g_values, degree)
            # The direction was normalised: only what is across it counts.
            radial = gx * x + gy * y + gz * z
            g_mean = ((gx - radial * x) / distance, (gy - radial * y) / distance, (gz - radial * z) / distance)
            for r in range(3):
                grad_means[i, r] = g_mean[r]
                grad_centre[block, r] -= g_mean[r]
