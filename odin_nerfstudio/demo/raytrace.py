"""Rays into the scene: what they hit first, how it is lit, and whole images of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from odin_nerfstudio.demo.arrays import Array
from odin_nerfstudio.demo.camera import Camera
from odin_nerfstudio.demo.noise import SolidNoise
from odin_nerfstudio.demo.scene import Thing

_SUN = np.array([0.52, -0.5, 0.7]) / np.linalg.norm([0.52, -0.5, 0.7])
_SUN_SIZE = 0.03
"""Half the side of the square of directions that light comes from; it softens shadows."""
_SUNLIGHT = np.array([2.3, 2.1, 1.75])
_SKYLIGHT = np.array([0.42, 0.52, 0.68])
_BOUNCE = np.array([0.3, 0.25, 0.2])
_GAMMA = 2.2
_SAMPLES = ((0.25, 0.25), (0.75, 0.75), (0.25, 0.75), (0.75, 0.25))
_ROUGH = 0.015
"""Difference of display value between a pixel's first two samples that calls for the other two."""
_CHUNK = 1 << 14
"""Rays traced at once: the temporaries stay in the processor's cache."""


class Hits(NamedTuple):
    """Where N rays end."""

    distance: Array
    """(N,) along the ray, in lengths of its direction; inf where nothing is hit."""
    thing: np.ndarray
    """(N,) int: index into the tracer's things; -1 where nothing is hit."""


class Tracer:
    """A scene prepared for tracing."""

    def __init__(self, things: Sequence[Thing], seed: int) -> None:
        self.things = things
        self._noise = SolidNoise(seed)
        bounds = [thing.shape.bound() for thing in things]
        self._centres = np.stack([centre for centre, _ in bounds])
        self._radii = np.array([1.01 * radius + 0.01 for _, radius in bounds])
        self._casters = [i for i, thing in enumerate(things) if thing.lit]

    def cast(self, origins: Array, directions: Array, among: Sequence[int] | None = None) -> Hits:
        """First hits of rays (N, 3) with unit directions, among all things or those of the given indices."""
        chosen = np.arange(len(self.things)) if among is None else np.asarray(among)
        maybe = self._near(origins, directions, chosen)
        distance = np.full(len(origins), np.inf, origins.dtype)
        thing = np.full(len(origins), -1)
        for index, candidates in zip(chosen, maybe, strict=True):
            rays = np.flatnonzero(candidates)
            found = self.things[index].shape.intersect(origins[rays], directions[rays])
            nearer = found < distance[rays]
            distance[rays[nearer]] = found[nearer]
            thing[rays[nearer]] = index
        return Hits(distance, thing)

    def _near(self, origins: Array, directions: Array, chosen: np.ndarray) -> np.ndarray:
        """(things, N) bool: whether the ray's line passes through the thing's bounding sphere."""
        dtype, one = origins.dtype, np.ones((len(origins), 1), origins.dtype)
        centres, radii = self._centres[chosen], self._radii[chosen]
        # |c − o|² − r² and (c − o)·d, each as a single product of homogeneous coordinates
        outside = np.c_[-2 * centres, np.ones(len(chosen)), np.square(centres).sum(1) - radii**2].astype(dtype)
        apart = outside @ np.c_[origins, np.square(origins).sum(1), one].T
        towards = np.c_[centres, -np.ones(len(chosen))].astype(dtype)
        along = towards @ np.c_[directions, np.einsum("nd,nd->n", origins, directions)].T
        return apart <= np.square(along, out=along)

    def shade(self, origins: Array, directions: Array, hits: Hits, sun: Array) -> Array:
        """Linear light (N, 3) that comes back along rays, with light from the unit direction ``sun`` (3,)."""
        points = origins + hits.distance[:, None] * directions
        colour, normals = np.zeros_like(points), np.zeros_like(points)
        lit = np.zeros(len(points), bool)
        for index in np.unique(hits.thing[hits.thing >= 0]):
            rays, thing = np.flatnonzero(hits.thing == index), self.things[index]
            colour[rays] = thing.paint(points[rays], self._noise)
            normals[rays] = thing.shape.normals(points[rays])
            lit[rays] = thing.lit
        normals = normals[lit] / np.linalg.norm(normals[lit], axis=1, keepdims=True)
        normals *= -np.sign(np.einsum("nd,nd->n", normals, directions[lit]))[:, None]
        facing = np.maximum(normals @ sun, 0)
        turned = np.flatnonzero(facing > 0)
        starts = points[lit][turned] + 1e-3 * normals[turned]
        blocked = self.cast(starts, np.broadcast_to(sun, starts.shape), self._casters).thing >= 0
        facing[turned[blocked]] = 0
        upward = 0.5 + 0.5 * normals[:, 2:]
        light = facing[:, None] * _SUNLIGHT + upward * _SKYLIGHT + (1 - upward) * _BOUNCE
        colour[lit] *= (0.55 * light).astype(colour.dtype)
        return colour

    def colours(self, origins: Array, directions: Array) -> Array:
        """Display colours (N, 3) in 0…1 of single rays."""
        hits = self.cast(origins, directions)
        return _display(self.shade(origins, directions, hits, _SUN.astype(origins.dtype)))

    def image(self, camera: Camera) -> np.ndarray:
        """(height, width, 3) uint8, four samples a pixel; two where these agree already."""
        rows, columns = np.divmod(np.arange(camera.height * camera.width), camera.width)
        corners = np.stack([columns, rows], 1)
        light = [self._sample(camera, corners, at) for at in _SAMPLES[:2]]
        rough = np.flatnonzero(np.abs(_display(light[0]) - _display(light[1])).max(1) > _ROUGH)
        mean = (light[0] + light[1]) / 2
        more = [self._sample(camera, corners[rough], at) for at in _SAMPLES[2:]]
        mean[rough] = (mean[rough] + (more[0] + more[1]) / 2) / 2
        return (255 * _display(mean) + 0.5).astype(np.uint8).reshape(camera.height, camera.width, 3)

    def _sample(self, camera: Camera, corners: np.ndarray, at: tuple[float, float]) -> Array:
        """Linear light (N, 3) float32 at the place ``at`` in pixels with top left ``corners`` (N, 2).

        Each place has its own direction within the sun, turned by 45°, or shadows along an image axis would stay hard.
        """
        a, b = _SUN_SIZE * (at[1] - at[0]), _SUN_SIZE * (at[0] + at[1] - 1)
        right = np.cross(_SUN, (0, 0, 1))
        sun = _SUN + a * right + b * np.cross(right, _SUN)
        sun = (sun / np.linalg.norm(sun)).astype(np.float32)
        light = np.empty((len(corners), 3), np.float32)
        for start in range(0, len(light), _CHUNK):
            part = slice(start, start + _CHUNK)
            origins, directions = (a.astype(np.float32) for a in camera.rays(corners[part] + at))
            light[part] = self.shade(origins, directions, self.cast(origins, directions), sun)
        return light


def _display(light: Array) -> Array:
    """Linear light → display values in 0…1, highlights rolled off."""
    return np.clip(light / (1 + 0.18 * np.maximum(light, 0)), 0, 1) ** (1 / _GAMMA)
