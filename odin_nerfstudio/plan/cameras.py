"""The plan's own camera type: what is needed to know roughly what a view sees, as NumPy arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from odin_nerfstudio.errors import UserError

ROTATION_TOLERANCE = 1e-2
"""Largest entry of ``|RᵀR − I|`` that still counts as a rotation; pose files are often rounded to a few digits."""


@dataclass(frozen=True)
class ViewCameras:
    """V perspective cameras. Distortion is left out: it moves the edge of an image by less than planning can notice."""

    camera_to_worlds: NDArray[np.float64]
    """(V, 3, 4) camera → world, nerfstudio's (OpenGL) axes: x right, y up, z backward."""
    fx: NDArray[np.float64]
    """(V,) focal length, pixels."""
    fy: NDArray[np.float64]
    """(V,) focal length, pixels."""
    cx: NDArray[np.float64]
    """(V,) principal point, pixels."""
    cy: NDArray[np.float64]
    """(V,) principal point, pixels."""
    width: NDArray[np.int64]
    """(V,) pixels."""
    height: NDArray[np.int64]
    """(V,) pixels."""

    def __len__(self) -> int:
        return len(self.camera_to_worlds)

    @property
    def centres(self) -> NDArray[np.float64]:
        """(V, 3) camera positions in the world."""
        return self.camera_to_worlds[:, :, 3]

    @property
    def directions(self) -> NDArray[np.float64]:
        """(V, 3) unit vectors of the optical axes in the world."""
        return -self.camera_to_worlds[:, :, 2]


def check_poses(camera_to_worlds: NDArray[np.float64], names: list[str], source: str) -> None:
    """Refuses poses that no camera can have.

    Args:
        camera_to_worlds: (V, 3, 4).
        names: V names for the message.
        source: the file that the poses come from.

    Raises:
        UserError: a pose holds NaN or infinity, or its 3×3 part is not a rotation.
    """
    for name, pose in zip(names, camera_to_worlds, strict=True):
        rotation = pose[:, :3]
        if not np.isfinite(pose).all():
            raise UserError(f"{source}: the pose of {name} holds NaN or infinity.")
        if np.abs(rotation.T @ rotation - np.eye(3)).max() > ROTATION_TOLERANCE or np.linalg.det(rotation) < 0:
            raise UserError(f"{source}: the pose of {name} is not rigid (its 3x3 part is not a rotation).")
