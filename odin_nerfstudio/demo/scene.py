"""The demo scene: a round temple in a paved court with cypresses, blocks and balls, under a painted sky.

Frame: z up, the ground at z = 0, about a metre per unit. The sky is the inside of a large ball, so that every ray ends
on a surface and even the clouds can carry points that several views observe.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from odin_nerfstudio.demo.arrays import Array
from odin_nerfstudio.demo.noise import SolidNoise
from odin_nerfstudio.demo.shapes import Box, Ellipsoid, Frustum, Shape

HORIZON = 14.0
"""Radius of the sky around the origin."""

Paint = Callable[[Array, SolidNoise], Array]
"""Surface points (N, 3) in the scene → linear reflectance (N, 3) in 0…1."""


@dataclass(frozen=True)
class Thing:
    """A solid and what it looks like."""

    shape: Shape
    paint: Paint
    lit: bool = True
    """False for the sky: it is its own light, casts no shadow and receives none."""


def temple_court() -> list[Thing]:
    """All things of the scene, the ground and the sky among them."""
    return [
        Thing(Ellipsoid((0, 0, 0), (HORIZON,) * 3), _sky, lit=False),
        Thing(Frustum((0, 0, -1), HORIZON, HORIZON, 1), _ground),
        *_temple(),
        *_garden(),
        *_court(),
    ]


def _temple() -> list[Thing]:
    marble = partial(_stone, colour=(0.78, 0.74, 0.66))
    steps = [Frustum((0, 0, 0.12 * i), 2.05 - 0.2 * i, 2.05 - 0.2 * i, 0.12) for i in range(3)]
    columns: list[Shape] = []
    for angle in np.arange(8) * np.pi / 4 + np.pi / 8:
        x, y = 1.25 * float(np.cos(angle)), 1.25 * float(np.sin(angle))
        columns += [
            Frustum((x, y, 0.36), 0.2, 0.17, 0.08),
            Frustum((x, y, 0.44), 0.14, 0.11, 1.5),
            Frustum((x, y, 1.94), 0.12, 0.2, 0.1),
        ]
    roof = [Frustum((0, 0, 2.04), 1.48, 1.48, 0.2), Frustum((0, 0, 2.24), 1.56, 1.62, 0.08)]
    return [
        *(Thing(shape, marble) for shape in [*steps, *columns, *roof]),
        Thing(Ellipsoid((0, 0, 2.32), (1.36, 1.36, 0.95), dome=True), _tiles),
        Thing(Ellipsoid((0, 0, 3.34), (0.13, 0.13, 0.16)), partial(_plain, colour=(0.85, 0.6, 0.12))),
        Thing(Box((0, 0, 0.61), (0.24, 0.24, 0.25), 0.4), partial(_stone, colour=(0.35, 0.36, 0.4))),
        Thing(Ellipsoid((0, 0, 1.2), (0.34, 0.34, 0.34)), partial(_bands, dark=(0.55, 0.05, 0.04))),
    ]


def _garden() -> list[Thing]:
    things = []
    for x, y, tall in [(3.1, 1.2, 1.0), (2.6, 2.2, 0.8), (-3.1, 1.6, 1.1), (-3.2, -1.3, 0.85), (0.5, -3.6, 1.0)]:
        things += [
            Thing(Frustum((x, y, 0), 0.09, 0.07, 0.5), partial(_stone, colour=(0.3, 0.19, 0.1))),
            Thing(Ellipsoid((x, y, 0.3 + tall), (0.27 * tall, 0.27 * tall, tall)), _leaves),
        ]
    rim = Thing(Frustum((-2.5, 3.3, 0), 1.0, 0.95, 0.16), partial(_stone, colour=(0.6, 0.57, 0.5)))
    water = Thing(Frustum((-2.5, 3.3, 0.16), 0.82, 0.82, 0.005), _water)
    return [*things, rim, water]


def _court() -> list[Thing]:
    sand = partial(_stone, colour=(0.72, 0.55, 0.34))
    blocks = [
        Box((2.7, -1.7, 0.25), (0.45, 0.25, 0.25), 0.5),
        Box((2.6, -1.65, 0.65), (0.2, 0.2, 0.15), 1.0),
        Box((-1.3, -2.8, 0.2), (0.5, 0.2, 0.2), -0.3),
        Box((-2.75, 0.5, 0.3), (0.2, 0.2, 0.3), 0.2),
    ]
    balls = [
        ((1.5, -2.6, 0.34), 0.34, (0.03, 0.28, 0.36)),
        ((0.75, -2.65, 0.2), 0.2, (0.8, 0.24, 0.1)),
        ((-1.3, -2.8, 0.58), 0.18, (0.85, 0.55, 0.06)),
        ((1.3, 2.5, 0.28), 0.28, (0.35, 0.12, 0.42)),
        ((-2.75, 0.5, 0.82), 0.22, (0.08, 0.35, 0.16)),
    ]
    return [
        *(Thing(block, sand) for block in blocks),
        *(Thing(Ellipsoid(at, (r, r, r)), partial(_bands, dark=colour)) for at, r, colour in balls),
    ]


def _mix(a: tuple[float, float, float] | Array, b: tuple[float, float, float] | Array, weight: Array) -> Array:
    """Colour ``a`` where ``weight`` (N,) is 0, ``b`` where it is 1."""
    w = np.clip(weight, 0, 1)[:, None]
    return np.asarray(a, weight.dtype) * (1 - w) + np.asarray(b, weight.dtype) * w


def _scaled(points: Array, *factors: float) -> Array:
    """Points (N, d) with each axis stretched by its factor."""
    return points * np.array(factors, points.dtype)


def _plain(points: Array, noise: SolidNoise, colour: tuple[float, float, float]) -> Array:
    return np.broadcast_to(np.array(colour, points.dtype), points.shape)


def _stone(points: Array, noise: SolidNoise, colour: tuple[float, float, float]) -> Array:
    grain = 0.55 + 0.5 * noise(points * 0.45) + 0.2 * (noise(points * 1.3) - 0.5)
    return np.array(colour, points.dtype) * grain[:, None]


def _bands(points: Array, noise: SolidNoise, dark: tuple[float, float, float]) -> Array:
    swirl = np.sin(18 * points[:, 2] + 14 * noise(points * 0.5))
    return _mix(dark, (0.8, 0.75, 0.66), 3 * (swirl - 0.45))


def _tiles(points: Array, noise: SolidNoise) -> Array:
    around = np.arctan2(points[:, 1], points[:, 0]) * 24 / np.pi
    up = points[:, 2] * 7
    joint = np.maximum(np.abs(around % 1 - 0.5), np.abs(up % 1 - 0.5)) > 0.43
    fired = 0.55 + 0.9 * _scatter(np.floor(around), np.floor(up)) * noise(points * 0.7)
    return np.array((0.62, 0.2, 0.1), points.dtype) * np.where(joint, 0.3, fired)[:, None]


def _leaves(points: Array, noise: SolidNoise) -> Array:
    return _mix((0.02, 0.07, 0.03), (0.13, 0.3, 0.09), 2.2 * noise(points * 1.1) - 0.6)


def _water(points: Array, noise: SolidNoise) -> Array:
    return _mix((0.02, 0.14, 0.22), (0.35, 0.6, 0.66), 3 * noise(_scaled(points[:, :2], 0.7, 1.6)) - 1.2)


def _ground(points: Array, noise: SolidNoise) -> Array:
    """A court of rings of slabs, then grass, its edge ragged."""
    flat = points[:, :2]
    radius = np.hypot(flat[:, 0], flat[:, 1])
    ring = np.floor(radius / 0.42)
    slab = np.arctan2(flat[:, 1], flat[:, 0]) * np.maximum(3 * ring, 1) / np.pi
    joint = (np.abs(radius / 0.42 % 1 - 0.5) > 0.455) | (np.abs(slab % 1 - 0.5) * radius > 0.46 * radius)
    worn = 0.6 + 0.5 * _scatter(ring, np.floor(slab)) + 0.4 * (noise(flat * 0.7) - 0.5)
    stone = np.array((0.5, 0.43, 0.34), points.dtype) * np.where(joint, 0.4, worn)[:, None]
    turned = flat @ np.array([[0.8, 0.6], [-0.6, 0.8]], flat.dtype)  # the two periods never fall together
    blades = noise(turned * 0.31) + 0.8 * noise(flat * 0.13) + 0.6 * noise(turned * 0.05) - 0.75
    grass = _mix((0.06, 0.13, 0.025), (0.34, 0.4, 0.12), blades)
    return _mix(stone, grass, 6 * (radius - 3.0 - 0.9 * noise(flat * 0.4)))


def _sky(points: Array, noise: SolidNoise) -> Array:
    """Blue to haze, clouds, and two ridges of hills above the horizon."""
    up = points[:, 2] / HORIZON
    air = _mix((0.72, 0.8, 0.86), (0.16, 0.36, 0.72), 1.5 * up)
    stretched = _scaled(points / HORIZON, 0.5, 0.5, 1.1)
    colour = _mix(air, (0.95, 0.94, 0.92), (3.5 * noise(stretched + 0.3) - 1.75) * np.clip(6 * up, 0, 1))
    around = points[:, :2] / HORIZON
    shade = 0.75 + 0.5 * noise(points * 0.12)
    for frequency, height, hill in ((0.6, 0.2, (0.3, 0.4, 0.5)), (1.1, 0.12, (0.16, 0.26, 0.2))):
        ridge = 0.03 + height * noise(around * frequency)
        colour = _mix(colour, np.array(hill, points.dtype) * shade[:, None], (ridge - up) * 200)
    return colour


def _scatter(a: Array, b: Array) -> Array:
    """A repeatable value in 0…1 for each pair of whole numbers."""
    return np.abs(np.sin(a * 12.9898 + b * 78.233) * 43758.5453) % 1
