"""The solids of the demo scene against their own equations."""

from __future__ import annotations

import numpy as np
import pytest

from odin_nerfstudio.demo.shapes import Box, Ellipsoid, Frustum, Shape

SHAPES = [
    Ellipsoid((0.3, -0.2, 0.5), (1.0, 0.6, 0.8)),
    Ellipsoid((0.3, -0.2, 0.5), (1.0, 0.6, 0.8), dome=True),
    Frustum((0.1, 0.2, -0.4), 0.9, 0.4, 1.3),
    Frustum((0.1, 0.2, -0.4), 0.5, 0.5, 0.7),
    Box((0.2, 0.1, 0.0), (0.5, 0.3, 0.8), yaw=0.7),
]


def rays(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Rays from a sphere of radius 4 towards the middle, (count, 3) each."""
    rng = np.random.default_rng(seed)
    origins = rng.standard_normal((count, 3))
    origins *= 4 / np.linalg.norm(origins, axis=1, keepdims=True)
    directions = rng.uniform(-0.8, 0.8, (count, 3)) - origins
    return origins, directions / np.linalg.norm(directions, axis=1, keepdims=True)


def outside(shape: Shape, points: np.ndarray) -> np.ndarray:
    """(N,) implicit function: negative inside, zero on the surface, positive outside."""
    if isinstance(shape, Ellipsoid):
        return np.linalg.norm((points - shape.centre) / np.array(shape.radii), axis=1) - 1
    if isinstance(shape, Frustum):
        local = points - shape.base
        radius = shape.bottom + (shape.top - shape.bottom) * local[:, 2] / shape.height
        side = np.hypot(local[:, 0], local[:, 1]) - radius
        return np.max([side, -local[:, 2], local[:, 2] - shape.height], axis=0)
    assert isinstance(shape, Box)
    c, s = np.cos(shape.yaw), np.sin(shape.yaw)
    local = (points - shape.centre) @ np.array([[c, -s, 0], [s, c, 0], [0, 0, 1]])
    return (np.abs(local) - shape.half).max(1)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: type(shape).__name__)
def test_hits_are_the_first_surface_along_the_ray(shape: Shape) -> None:
    origins, directions = rays(2000)
    distance = shape.intersect(origins, directions)
    hit = np.isfinite(distance)
    assert 0.2 < hit.mean() < 1
    points = origins[hit] + distance[hit, None] * directions[hit]
    np.testing.assert_allclose(outside(shape, points), 0, atol=1e-9)
    if not getattr(shape, "dome", False):  # an open shell is also hit from within
        along = np.linspace(0, 8, 400)
        inside = np.stack([outside(shape, origins + t * directions) < -1e-3 for t in along])
        assert (inside.any(0) <= hit).all()
        assert not inside[:, hit][along[:, None] < distance[hit] - 1e-6].any()
    else:
        assert (points[:, 2] >= shape.bound()[0][2] - 1e-9).all()


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: type(shape).__name__)
def test_normals_are_the_gradient_of_the_implicit_function(shape: Shape) -> None:
    origins, directions = rays(500, seed=1)
    distance = shape.intersect(origins, directions)
    hit = np.isfinite(distance)
    points = origins[hit] + distance[hit, None] * directions[hit]
    step = 1e-6 * np.eye(3)
    gradient = np.stack([outside(shape, points + d) - outside(shape, points - d) for d in step], 1)
    normals = shape.normals(points)
    cosine = (gradient * normals).sum(1) / np.linalg.norm(gradient, axis=1) / np.linalg.norm(normals, axis=1)
    assert np.mean(cosine > 1 - 1e-4) > 0.99  # a sample may sit on an edge


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: type(shape).__name__)
def test_the_bounding_sphere_holds_every_hit(shape: Shape) -> None:
    origins, directions = rays(2000, seed=2)
    distance = shape.intersect(origins, directions)
    points = (origins + distance[:, None] * directions)[np.isfinite(distance)]
    centre, radius = shape.bound()
    assert np.linalg.norm(points - centre, axis=1).max() <= radius + 1e-9
