"""3×3 matrices as row-major tuples of nine float64, for kernels that work on one row at a time."""

from __future__ import annotations

from odin_nerfstudio.cpu.jit import inlined


@inlined
def product(a, b):
    """A·B."""
    return (
        a[0] * b[0] + a[1] * b[3] + a[2] * b[6],
        a[0] * b[1] + a[1] * b[4] + a[2] * b[7],
        a[0] * b[2] + a[1] * b[5] + a[2] * b[8],
        a[3] * b[0] + a[4] * b[3] + a[5] * b[6],
        a[3] * b[1] + a[4] * b[4] + a[5] * b[7],
        a[3] * b[2] + a[4] * b[5] + a[5] * b[8],
        a[6] * b[0] + a[7] * b[3] + a[8] * b[6],
        a[6] * b[1] + a[7] * b[4] + a[8] * b[7],
        a[6] * b[2] + a[7] * b[5] + a[8] * b[8],
    )


@inlined
def transposed(a):
    """Aᵀ."""
    return (a[0], a[3], a[6], a[1], a[4], a[7], a[2], a[5], a[8])


@inlined
def apply(a, v):
    """A·v."""
    return (
        a[0] * v[0] + a[1] * v[1] + a[2] * v[2],
        a[3] * v[0] + a[4] * v[1] + a[5] * v[2],
        a[6] * v[0] + a[7] * v[1] + a[8] * v[2],
    )


@inlined
def scaled_columns(a, s):
    """A·diag(s)."""
    return (
        a[0] * s[0],
        a[1] * s[1],
        a[2] * s[2],
        a[3] * s[0],
        a[4] * s[1],
        a[5] * s[2],
        a[6] * s[0],
        a[7] * s[1],
        a[8] * s[2],
    )


@inlined
def rotation(w, x, y, z):
    """Rotation matrix of a unit quaternion."""
    return (
        1.0 - 2.0 * (y * y + z * z),
        2.0 * (x * y - w * z),
        2.0 * (x * z + w * y),
        2.0 * (x * y + w * z),
        1.0 - 2.0 * (x * x + z * z),
        2.0 * (y * z - w * x),
        2.0 * (x * z - w * y),
        2.0 * (y * z + w * x),
        1.0 - 2.0 * (x * x + y * y),
    )


@inlined
def rotation_backward(w, x, y, z, g):
    """Gradient of a loss with respect to the quaternion, given ``g`` = ∂loss/∂(matrix of :func:`rotation`)."""
    return (
        2.0 * (x * (g[7] - g[5]) + y * (g[2] - g[6]) + z * (g[3] - g[1])),
        2.0 * (w * (g[7] - g[5]) + y * (g[1] + g[3]) + z * (g[2] + g[6]) - 2.0 * x * (g[4] + g[8])),
        2.0 * (w * (g[2] - g[6]) + x * (g[1] + g[3]) + z * (g[5] + g[7]) - 2.0 * y * (g[0] + g[8])),
        2.0 * (w * (g[3] - g[1]) + x * (g[2] + g[6]) + y * (g[5] + g[7]) - 2.0 * z * (g[0] + g[4])),
    )
