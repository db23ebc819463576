"""Solid noise: one periodic volume of 1/f clouds that every material of the demo scene reads at its own scale."""

from __future__ import annotations

import numpy as np
from scipy.ndimage import map_coordinates

from odin_nerfstudio.demo.arrays import Array

_CELLS = 64


class SolidNoise:
    """Smooth random values in about 0…1 at any point of space, period 1 along each axis."""

    def __init__(self, seed: int) -> None:
        white = np.random.default_rng(seed).standard_normal((_CELLS,) * 3)
        frequency = np.stack(np.meshgrid(*[np.fft.fftfreq(_CELLS, 1 / _CELLS)] * 3, indexing="ij"))
        radius = np.linalg.norm(frequency, axis=0)
        radius[0, 0, 0] = np.inf  # no mean: the values are centred below
        clouds = np.fft.ifftn(np.fft.fftn(white) * radius**-2.0).real
        self._volume = np.clip(0.5 + 0.22 * clouds / clouds.std(), 0, 1).astype(np.float32)

    def __call__(self, points: Array) -> Array:
        """Values (N,) at points (N, d) with d ≤ 3; missing coordinates are 0."""
        coordinates = np.zeros((3, len(points)), points.dtype)
        coordinates[: points.shape[1]] = points.T * _CELLS
        return map_coordinates(self._volume, coordinates, order=1, mode="grid-wrap").astype(points.dtype)
