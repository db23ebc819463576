"""Which surface points a structure-from-motion run would have found, and in which views, without running one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from odin_nerfstudio.demo.arrays import Array
from odin_nerfstudio.demo.camera import Camera
from odin_nerfstudio.demo.raytrace import Tracer

_POINTS_PER_VIEW = 280
_DEPTH_TOLERANCE = 1e-6
"""Relative difference between a point's distance and that of the surface in front of it, to be the same surface."""
_SAME_LOOK = float(np.cos(np.deg2rad(50)))
"""Cosine of the angle between two lines of sight up to which a feature is recognised again…"""
_SAME_SIZE = 1.6
"""…the ratio of the two distances up to which it is…"""
_LUCK = 0.7
"""…and the share of those cases in which the detector really does."""


@dataclass(frozen=True)
class Tracks:
    """P points, each observed by at least two views, M observations in all, sorted by point and then view."""

    points: Array
    """(P, 3) in the scene's frame."""
    colours: np.ndarray
    """(P, 3) uint8."""
    point: np.ndarray
    """(M,) int: the observed point."""
    view: np.ndarray
    """(M,) int: the view that observes it."""
    pixels: Array
    """(M, 2) where, in that view's image; exact."""


def find_tracks(tracer: Tracer, cameras: Sequence[Camera], seed: int) -> Tracks:
    """Picks surface points at random in every view, then looks for each of them in all the views.

    A point is observed where it is inside the image and nothing stands in front of it, by the exact scene rather than
    a depth image, and where a feature detector could match it with its first sighting.
    """
    rng = np.random.default_rng([seed, 1])
    found = [_pick(tracer, camera, rng) for camera in cameras]
    points, colours = (np.concatenate(part) for part in zip(*found, strict=True))
    home = np.repeat(np.stack([camera.position for camera in cameras]), _POINTS_PER_VIEW, axis=0)
    first = np.repeat(np.arange(len(cameras)), _POINTS_PER_VIEW)

    point, view, pixels = [], [], []
    for index, camera in enumerate(cameras):
        landed, visible = _look(tracer, camera, points)
        recognised = _matches(points - camera.position, points - home) & (rng.random(len(points)) < _LUCK)
        seen = np.flatnonzero(visible & (recognised | (first == index)))
        point.append(seen)
        view.append(np.full(len(seen), index))
        pixels.append(landed[seen])
    return _of_two_views(points, colours, np.concatenate(point), np.concatenate(view), np.concatenate(pixels))


def _pick(tracer: Tracer, camera: Camera, rng: np.random.Generator) -> tuple[Array, np.ndarray]:
    """Surface points (n, 3) behind random image positions, with the colours (n, 3) uint8 seen there."""
    pixels = rng.random((_POINTS_PER_VIEW, 2)) * (camera.width, camera.height)
    origins, directions = camera.rays(pixels)
    distance = tracer.cast(origins, directions).distance
    colours = (255 * tracer.colours(origins, directions) + 0.5).astype(np.uint8)
    return origins + distance[:, None] * directions, colours


def _look(tracer: Tracer, camera: Camera, points: Array) -> tuple[Array, np.ndarray]:
    """Image positions (P, 2) of the points, and (P,) bool: which of them this camera sees."""
    pixels, depth = camera.project(points)
    visible = (depth > 0) & camera.contains(pixels)
    sight = points[visible] - camera.position
    distance = np.linalg.norm(sight, axis=1)
    origins = np.broadcast_to(camera.position, sight.shape)
    reached = tracer.cast(origins, sight / distance[:, None]).distance
    visible[visible] = reached > distance * (1 - _DEPTH_TOLERANCE)
    return pixels, visible


def _matches(sight: Array, first_sight: Array) -> np.ndarray:
    """(P,) bool: whether points look alike along two lines of sight (P, 3), from each camera to the point."""
    distance, first_distance = np.linalg.norm(sight, axis=1), np.linalg.norm(first_sight, axis=1)
    cosine = np.einsum("nd,nd->n", sight, first_sight) / (distance * first_distance)
    ratio = distance / first_distance
    return (cosine > _SAME_LOOK) & (ratio < _SAME_SIZE) & (ratio > 1 / _SAME_SIZE)


def _of_two_views(points: Array, colours: np.ndarray, point: np.ndarray, view: np.ndarray, pixels: Array) -> Tracks:
    """Drops points with a single observation and renumbers the rest."""
    length = np.bincount(point, minlength=len(points))
    keep = length >= 2
    number = np.cumsum(keep) - 1
    rows = np.flatnonzero(keep[point])
    rows = rows[np.lexsort((view[rows], point[rows]))]
    return Tracks(points[keep], colours[keep], number[point[rows]], view[rows], pixels[rows])
