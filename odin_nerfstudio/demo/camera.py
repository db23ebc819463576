"""The demo's cameras: a pinhole that can say where a point lands, and the walk around the scene."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from odin_nerfstudio.demo.arrays import Array

_FIELD_OF_VIEW = np.deg2rad(58)
"""Horizontal."""


@dataclass(frozen=True)
class Camera:
    """A pinhole at ``position`` (3,) whose ``axes`` (3, 3) have the image's right, down and forward as columns."""

    position: Array
    axes: Array
    width: int
    height: int

    @property
    def focal(self) -> float:
        """In pixels; the principal point is the image's centre."""
        return self.width / 2 / float(np.tan(_FIELD_OF_VIEW / 2))

    @classmethod
    def looking_at(cls, position: Array, target: Array, width: int, height: int) -> Camera:
        """Upright, with the target in the middle of the image. ``target`` must not be straight above or below."""
        forward = (target - position) / np.linalg.norm(target - position)
        right = np.cross(forward, (0, 0, 1))
        right /= np.linalg.norm(right)
        return cls(position, np.stack([right, np.cross(forward, right), forward], 1), width, height)

    def rays(self, pixels: Array) -> tuple[Array, Array]:
        """Origins and unit directions (N, 3) through image positions (N, 2); (0.5, 0.5) is the first pixel's middle."""
        local = np.ones((len(pixels), 3))
        local[:, :2] = (pixels - (self.width / 2, self.height / 2)) / self.focal
        directions = local @ self.axes.T
        directions /= np.linalg.norm(directions, axis=1, keepdims=True)
        return np.broadcast_to(self.position, directions.shape), directions

    def project(self, points: Array) -> tuple[Array, Array]:
        """Image positions (N, 2) and depths along the view axis (N,) of points (N, 3); valid where depth > 0."""
        local = (points - self.position) @ self.axes
        with np.errstate(divide="ignore", invalid="ignore"):
            pixels = local[:, :2] / local[:, 2:] * self.focal + (self.width / 2, self.height / 2)
        return pixels, local[:, 2]

    def contains(self, pixels: Array) -> np.ndarray:
        """(N,) bool: which image positions (N, 2) lie inside the image."""
        x, y = pixels.T
        return (x >= 0) & (x <= self.width) & (y >= 0) & (y <= self.height)


def orbit(turn: Array, width: int, height: int) -> list[Camera]:
    """Cameras around the temple, rising and sinking three times a round; ``turn`` (N,) in 0…1 is the place on it."""
    angle = 2 * np.pi * turn
    up = 2.1 + 1.15 * np.sin(3 * angle)
    away = 5.3 + 0.5 * np.cos(2 * angle)
    positions = np.stack([away * np.cos(angle), away * np.sin(angle), up], 1)
    return [Camera.looking_at(p, np.array([0.0, 0.0, 1.05]), width, height) for p in positions]


def walk(views: int, width: int, height: int, seed: int) -> list[Camera]:
    """The capture's cameras: five in six on the orbit, in order and a little off it, the rest close to something."""
    rng = np.random.default_rng(seed)
    close = views // 6
    around = np.arange(views - close) / (views - close)
    cameras = []
    for camera in orbit(around, width, height):
        target = np.array([0.0, 0.0, 1.05]) + rng.normal(0, 0.12, 3)
        cameras.append(Camera.looking_at(camera.position + rng.normal(0, 0.1, 3), target, width, height))
    for angle in 2 * np.pi * (np.arange(close) + 0.5) / max(close, 1):
        position = _around(angle, 2.45, rng.uniform(0.9, 1.7))
        cameras.append(Camera.looking_at(position, _around(angle + 0.6, 1.1, rng.uniform(0.8, 1.2)), width, height))
    return cameras


def _around(angle: float, radius: float, up: float) -> Array:
    """Cylinder coordinates → (3,)."""
    return np.array([radius * np.cos(angle), radius * np.sin(angle), up])
