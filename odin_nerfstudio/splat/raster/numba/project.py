"""Projection of Gaussians to the image plane and its derivative (EWA splatting, Zwicker et al. 2001).

The covariance is kept as a product of factors, Σ₂ = P·Pᵀ with P = J·W·R·S (J the Jacobian of the perspective division,
W the camera's rotation, R·S the principal axes), which makes it symmetric and its derivative short. One row is computed
in float64 registers from float32 memory and never sees another row, so results do not depend on the order of rows.
Semantics are those of gsplat 1.4.0's ``fully_fused_projection``.
"""

from __future__ import annotations

import math

from odin_nerfstudio.cpu.jit import inlined, jit
from odin_nerfstudio.cpu.threads import take
from odin_nerfstudio.splat.raster.numba.algebra import (
    apply,
    product,
    rotation,
    rotation_backward,
    scaled_columns,
    transposed,
)

BLOCK = 256
"""Rows of one work item; part of the definition of the camera gradient, which is summed block by block."""

# A compensation of 0 has an infinite slope; gsplat adds this to the denominator.
_COMPENSATION_GUARD = 1e-6


@inlined
def sigmoid(x):
    """1 / (1 + e^−x) without overflow."""
    if x >= 0.0:
        return 1.0 / (1.0 + math.exp(-x))
    e = math.exp(x)
    return e / (1.0 + e)


@inlined
def _rotation_of(camera):
    return (
        camera[0],
        camera[1],
        camera[2],
        camera[4],
        camera[5],
        camera[6],
        camera[8],
        camera[9],
        camera[10],
    )


@inlined
def _to_camera(mean, camera):
    x, y, z = apply(_rotation_of(camera), mean)
    return x + camera[3], y + camera[7], z + camera[11]


@inlined
def _slopes(position, camera, width, height):
    """x/z and y/z, clamped to 15 % of the image size outside the image, and whether each was left as it was.

    The Jacobian of a Gaussian far outside the view would be wild without the clamp. 0.15·size/f is 0.3·tan(fov/2).
    """
    fx, fy, cx, cy = camera[16], camera[17], camera[18], camera[19]
    u, v = position[0] / position[2], position[1] / position[2]
    border_x, border_y = 0.15 * width / fx, 0.15 * height / fy
    clamped_u = min(max(u, -(cx / fx + border_x)), (width - cx) / fx + border_x)
    clamped_v = min(max(v, -(cy / fy + border_y)), (height - cy) / fy + border_y)
    return clamped_u, clamped_v, clamped_u == u, clamped_v == v


@inlined
def _axes(log_scales, quat):
    """Standard deviations, unit quaternion, its former length, rotation R, and R·S."""
    scales = (math.exp(log_scales[0]), math.exp(log_scales[1]), math.exp(log_scales[2]))
    length = math.sqrt(quat[0] * quat[0] + quat[1] * quat[1] + quat[2] * quat[2] + quat[3] * quat[3])
    unit = (quat[0] / length, quat[1] / length, quat[2] / length, quat[3] / length)
    turn = rotation(unit[0], unit[1], unit[2], unit[3])
    return scales, unit, length, turn, scaled_columns(turn, scales)


@inlined
def _flatten(axes, position, slope_x, slope_y, camera):
    """P = J·A for principal axes A in camera space, as its two rows."""
    jx, jy = camera[16] / position[2], camera[17] / position[2]
    first = (
        jx * (axes[0] - slope_x * axes[6]),
        jx * (axes[1] - slope_x * axes[7]),
        jx * (axes[2] - slope_x * axes[8]),
    )
    second = (
        jy * (axes[3] - slope_y * axes[6]),
        jy * (axes[4] - slope_y * axes[7]),
        jy * (axes[5] - slope_y * axes[8]),
    )
    return first, second


@inlined
def _dot(a, b):
    return a[0] * b[0] + a[1] * b[1] + a[2] * b[2]


@inlined
def _row3(array, i):
    return float(array[i, 0]), float(array[i, 1]), float(array[i, 2])


@inlined
def _row4(array, i):
    return float(array[i, 0]), float(array[i, 1]), float(array[i, 2]), float(array[i, 3])


@jit
def project(
    counter, items, means, log_scales, quats, logits, camera, width, height, near, far, eps2d, antialiased,
    means2d, depths, conics, opacities, radii,
):  # fmt: skip
    """Projects every row; ``radii`` 0 marks those that are not visible, whose other outputs stay as they were.

    Args:
        counter, items: see :func:`~odin_nerfstudio.cpu.threads.run`; blocks of ``BLOCK`` rows.
        means, log_scales, quats, logits: (N, 3), (N, 3), (N, 4), (N, 1) float32.
        camera: tuple of the 16 entries of the world → camera matrix and fx, fy, cx, cy, float64.
        width, height, near, far, eps2d, antialiased: as in ``PinholeCamera`` and ``RasterSettings``.
        means2d, depths, conics, opacities: (N, 2), (N,), (N, 3), (N,) float32, written.
        radii: (N,) int32, written.
    """
    while True:
        block = take(counter)
        if block >= items:
            break
        for i in range(block * BLOCK, min((block + 1) * BLOCK, means.shape[0])):
            radii[i] = 0
            position = _to_camera(_row3(means, i), camera)
            if not near <= position[2] <= far:
                continue
            slope_x, slope_y, _, _ = _slopes(position, camera, width, height)
            _, _, _, _, axes = _axes(_row3(log_scales, i), _row4(quats, i))
            first, second = _flatten(product(_rotation_of(camera), axes), position, slope_x, slope_y, camera)
            sharp_xx, xy, sharp_yy = _dot(first, first), _dot(first, second), _dot(second, second)
            xx, yy = sharp_xx + eps2d, sharp_yy + eps2d
            determinant = xx * yy - xy * xy
            if not determinant > 0.0:
                continue
            middle = 0.5 * (xx + yy)
            largest = middle + math.sqrt(max(0.1, middle * middle - determinant))
            radius = math.ceil(3.0 * math.sqrt(largest))
            x = camera[16] * position[0] / position[2] + camera[18]
            y = camera[17] * position[1] / position[2] + camera[19]
            # Also drops what is not finite.
            if not (x + radius > 0.0 and x - radius < width and y + radius > 0.0 and y - radius < height):
                continue
            opacity = sigmoid(float(logits[i, 0]))
            if antialiased:
                opacity *= math.sqrt(max(0.0, (sharp_xx * sharp_yy - xy * xy) / determinant))
            radii[i] = min(radius, 2147483647.0)
            means2d[i, 0] = x
            means2d[i, 1] = y
            depths[i] = position[2]
            conics[i, 0] = yy / determinant
            conics[i, 1] = -xy / determinant
            conics[i, 2] = xx / determinant
            opacities[i] = opacity


@jit
def project_backward(
    counter, items, index, means, log_scales, quats, logits, camera, width, height, eps2d, antialiased,
    grad_means2d, grad_depths, grad_conics, grad_opacities,
    grad_means, grad_log_scales, grad_quats, grad_logits, grad_camera,
):  # fmt: skip
    """Derivative of :func:`project` for the M visible rows ``index``.

    Args:
        counter, items: blocks of ``BLOCK`` splats.
        index: (M,) int64 row of each splat.
        means … antialiased: as for :func:`project`.
        grad_means2d, grad_depths, grad_conics, grad_opacities: (M, 2), (M,), (M, 3), (M,) float32.
        grad_means, grad_log_scales, grad_quats, grad_logits: (N, …) float32; rows in ``index`` are written,
            ``grad_means`` is added to.
        grad_camera: (items, 12) float64, written: per block the gradient of the upper three rows of the matrix.
    """
    turn_camera = _rotation_of(camera)
    back = transposed(turn_camera)
    while True:
        block = take(counter)
        if block >= items:
            break
        for j in range(12):
            grad_camera[block, j] = 0.0
        for m in range(block * BLOCK, min((block + 1) * BLOCK, index.shape[0])):
            i = index[m]
            mean = _row3(means, i)
            position = _to_camera(mean, camera)
            rz = 1.0 / position[2]
            slope_x, slope_y, free_x, free_y = _slopes(position, camera, width, height)
            scales, unit, length, turn, axes = _axes(_row3(log_scales, i), _row4(quats, i))
            axes_camera = product(turn_camera, axes)
            first, second = _flatten(axes_camera, position, slope_x, slope_y, camera)
            sharp_xx, xy, sharp_yy = _dot(first, first), _dot(first, second), _dot(second, second)
            xx, yy = sharp_xx + eps2d, sharp_yy + eps2d
            determinant = xx * yy - xy * xy
            a, b, c = yy / determinant, -xy / determinant, xx / determinant

            # Inverse of the covariance: dQ = −Q·dΣ·Q, with Q = [[a, b], [b, c]].
            ga, gb, gc = float(grad_conics[m, 0]), 0.5 * float(grad_conics[m, 1]), float(grad_conics[m, 2])
            gxx = -(a * a * ga + 2.0 * a * b * gb + b * b * gc)
            gxy = -(a * b * ga + (a * c + b * b) * gb + b * c * gc)
            gyy = -(b * b * ga + 2.0 * b * c * gb + c * c * gc)

            # Opacity, and its compensation ρ = √(det Σ / det(Σ + ε·I)).
            opacity = sigmoid(float(logits[i, 0]))
            g_opacity = float(grad_opacities[m])
            if antialiased:
                ratio = max(0.0, (sharp_xx * sharp_yy - xy * xy) / determinant)
                compensation = math.sqrt(ratio)
                g_ratio = 0.5 * g_opacity * opacity / (compensation + _COMPENSATION_GUARD)
                gxx += g_ratio * (sharp_yy - ratio * yy) / determinant
                gxy += g_ratio * (ratio - 1.0) * xy / determinant
                gyy += g_ratio * (sharp_xx - ratio * xx) / determinant
                g_opacity *= compensation
            grad_logits[i, 0] = g_opacity * opacity * (1.0 - opacity)

            # Σ₂ = P·Pᵀ; gxy is the gradient of one of two equal entries.
            g_first = (
                2.0 * (gxx * first[0] + gxy * second[0]),
                2.0 * (gxx * first[1] + gxy * second[1]),
                2.0 * (gxx * first[2] + gxy * second[2]),
            )
            g_second = (
                2.0 * (gxy * first[0] + gyy * second[0]),
                2.0 * (gxy * first[1] + gyy * second[1]),
                2.0 * (gxy * first[2] + gyy * second[2]),
            )

            # P = J·A, and the projected centre.
            jx, jy = camera[16] * rz, camera[17] * rz
            g_axes_camera = (
                jx * g_first[0],
                jx * g_first[1],
                jx * g_first[2],
                jy * g_second[0],
                jy * g_second[1],
                jy * g_second[2],
                -jx * slope_x * g_first[0] - jy * slope_y * g_second[0],
                -jx * slope_x * g_first[1] - jy * slope_y * g_second[1],
                -jx * slope_x * g_first[2] - jy * slope_y * g_second[2],
            )
            depth_axis = (axes_camera[6], axes_camera[7], axes_camera[8])
            g_slope_x, g_slope_y = -jx * _dot(g_first, depth_axis), -jy * _dot(g_second, depth_axis)
            g_u, g_v = camera[16] * float(grad_means2d[m, 0]), camera[17] * float(grad_means2d[m, 1])
            if free_x:
                g_u += g_slope_x
            if free_y:
                g_v += g_slope_y
            g_position = (
                g_u * rz,
                g_v * rz,
                float(grad_depths[m])
                - (g_u * position[0] + g_v * position[1]) * rz * rz
                - (_dot(g_first, first) + _dot(g_second, second)) * rz,
            )

            # World → camera.
            g_turn_camera = product(g_axes_camera, transposed(axes))
            g_mean = apply(back, g_position)
            for r in range(3):
                grad_means[i, r] += g_mean[r]
                for s in range(3):
                    grad_camera[block, 4 * r + s] += g_turn_camera[3 * r + s] + g_position[r] * mean[s]
                grad_camera[block, 4 * r + 3] += g_position[r]

            # Principal axes: R·S.
            g_axes = product(back, g_axes_camera)
            along = product(transposed(turn), g_axes)
            grad_log_scales[i, 0] = along[0] * scales[0]
            grad_log_scales[i, 1] = along[4] * scales[1]
            grad_log_scales[i, 2] = along[8] * scales[2]
            g_unit = rotation_backward(unit[0], unit[1], unit[2], unit[3], scaled_columns(g_axes, scales))
            radial = g_unit[0] * unit[0] + g_unit[1] * unit[1] + g_unit[2] * unit[2] + g_unit[3] * unit[3]
            for r in range(4):
                grad_quats[i, r] = (g_unit[r] - radial * unit[r]) / length
