"""The three solids of the demo scene, each with its ray intersection and its normal, vectorised over rays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from odin_nerfstudio.demo.arrays import Array

NEAREST = 1e-4
"""Hits closer to a ray's origin than this are the surface that the ray starts on (world units)."""


class Shape(Protocol):
    """A solid in the scene's frame: z up, any unit of length."""

    def bound(self) -> tuple[Array, float]:
        """Centre (3,) and radius of a sphere around the solid."""

    def intersect(self, origins: Array, directions: Array) -> Array:
        """Distance (N,) to the first surface along rays (N, 3), in lengths of ``directions``; inf for a miss."""

    def normals(self, points: Array) -> Array:
        """Outward normals (N, 3), not normalised, at surface points (N, 3)."""


@dataclass(frozen=True)
class Ellipsoid:
    """An axis-aligned ellipsoid; with ``dome`` only its upper half, open below."""

    centre: tuple[float, float, float]
    radii: tuple[float, float, float]
    dome: bool = False

    def bound(self) -> tuple[Array, float]:
        return np.array(self.centre), max(self.radii)

    def intersect(self, origins: Array, directions: Array) -> Array:
        radii = np.array(self.radii, directions.dtype)
        start, step = (origins - np.array(self.centre, origins.dtype)) / radii, directions / radii
        near, far = _roots(_dot(step, step), _dot(start, step), _dot(start, start) - 1)
        distance = np.full(len(step), np.inf, step.dtype)
        for root in (far, near):
            hit = root > NEAREST
            if self.dome:
                hit &= start[:, 2] + root * step[:, 2] > 0
            distance = np.where(hit, root, distance)
        return distance

    def normals(self, points: Array) -> Array:
        return (points - np.array(self.centre, points.dtype)) / np.array(self.radii, points.dtype) ** 2


@dataclass(frozen=True)
class Frustum:
    """A closed cone stump standing upright on ``base``: column, disc, cone, and the ground when it is wide."""

    base: tuple[float, float, float]
    bottom: float
    top: float
    height: float

    def bound(self) -> tuple[Array, float]:
        x, y, z = self.base
        centre = np.array([x, y, z + self.height / 2])
        return centre, float(np.hypot(max(self.bottom, self.top), self.height / 2))

    def intersect(self, origins: Array, directions: Array) -> Array:
        start, slope = origins - np.array(self.base, origins.dtype), (self.top - self.bottom) / self.height
        width, widening = self.bottom + slope * start[:, 2], slope * directions[:, 2]
        flat_start, flat_step = start[:, :2], directions[:, :2]
        side = _roots(
            _dot(flat_step, flat_step) - widening**2,
            _dot(flat_start, flat_step) - width * widening,
            _dot(flat_start, flat_start) - width**2,
        )
        distance = np.full(len(start), np.inf, start.dtype)
        for root in side:
            z = start[:, 2] + root * directions[:, 2]
            hit = (root > NEAREST) & (z >= 0) & (z <= self.height)
            distance = np.where(hit, np.minimum(root, distance), distance)
        for level, radius in ((0.0, self.bottom), (self.height, self.top)):
            with np.errstate(divide="ignore", invalid="ignore"):
                cap = (level - start[:, 2]) / directions[:, 2]
                rim = flat_start + cap[:, None] * flat_step
                hit = (cap > NEAREST) & (_dot(rim, rim) <= radius**2)
            distance = np.where(hit, np.minimum(cap, distance), distance)
        return distance

    def normals(self, points: Array) -> Array:
        local = points - np.array(self.base, points.dtype)
        slope = (self.top - self.bottom) / self.height
        side = local.copy()
        side[:, 2] = -slope * np.hypot(local[:, 0], local[:, 1])
        from_side = np.abs(np.hypot(local[:, 0], local[:, 1]) - (self.bottom + slope * local[:, 2]))
        from_cap = np.minimum(np.abs(local[:, 2]), np.abs(local[:, 2] - self.height))
        cap = np.zeros_like(local)
        cap[:, 2] = np.where(local[:, 2] > self.height / 2, 1, -1)
        return np.where((from_cap < from_side)[:, None], cap, side)


@dataclass(frozen=True)
class Box:
    """A box turned by ``yaw`` radians about the vertical through its centre."""

    centre: tuple[float, float, float]
    half: tuple[float, float, float]
    yaw: float = 0.0

    def bound(self) -> tuple[Array, float]:
        return np.array(self.centre), float(np.linalg.norm(self.half))

    def _axes(self, dtype: np.dtype) -> Array:
        """(3, 3), its columns the box's axes in the scene."""
        c, s = np.cos(self.yaw), np.sin(self.yaw)
        return np.array([[c, -s, 0], [s, c, 0], [0, 0, 1]], dtype)

    def intersect(self, origins: Array, directions: Array) -> Array:
        axes = self._axes(directions.dtype)
        start, step = (origins - np.array(self.centre, origins.dtype)) @ axes, directions @ axes
        half = np.array(self.half, step.dtype)
        with np.errstate(divide="ignore", invalid="ignore"):
            one, other = (-half - start) / step, (half - start) / step
        near, far = np.minimum(one, other).max(1), np.maximum(one, other).min(1)
        first = np.where(near > NEAREST, near, far)
        return np.where((near <= far) & (first > NEAREST), first, np.inf).astype(step.dtype)

    def normals(self, points: Array) -> Array:
        axes = self._axes(points.dtype)
        local = (points - np.array(self.centre, points.dtype)) @ axes / np.array(self.half, points.dtype)
        face = np.abs(local).argmax(1)[:, None] == np.arange(3)
        return np.where(face, np.sign(local), 0).astype(points.dtype) @ axes.T


def _dot(a: Array, b: Array) -> Array:
    """(N, d), (N, d) → (N,)."""
    return np.einsum("nd,nd->n", a, b)


def _roots(a: Array, half_b: Array, c: Array) -> tuple[Array, Array]:
    """Real roots of a·t² + 2·half_b·t + c = 0, smaller first for a > 0; nan where there are none. Each (N,)."""
    with np.errstate(divide="ignore", invalid="ignore"):
        root = np.sqrt(half_b**2 - a * c)
        return (-half_b - root) / a, (-half_b + root) / a
