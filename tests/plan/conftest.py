"""Tiny captures for the tests of planning."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np
import pytest


class WriteModel(Protocol):
    def __call__(self, folder: Path, views: int = 8, points: int = 40, tracks: bool = True) -> Path: ...


@pytest.fixture
def write_model() -> WriteModel:
    """Writes a COLMAP model by pycolmap, which our reader does not use: a ring of cameras around a cloud of points.

    Each point is seen by three neighbours on the ring. Image ids run against the order of the ring.
    """
    pycolmap = pytest.importorskip("pycolmap")

    def write(folder: Path, views: int = 8, points: int = 40, tracks: bool = True) -> Path:
        model = pycolmap.Reconstruction()
        camera = pycolmap.Camera(camera_id=1, model="OPENCV", width=64, height=48, params=[50, 51, 31, 25, 0, 0, 0, 0])
        model.add_camera_with_trivial_rig(camera)
        random = np.random.default_rng(0)
        seen_by = [sorted({(p + k) % views for k in range(3)}) for p in range(points)]
        for view in range(views):
            angle = 2 * np.pi * view / views
            centre = 4 * np.array([np.cos(angle), 0.0, np.sin(angle)])
            forward, down = -centre / 4, np.array([0.0, 1.0, 0.0])
            rotation = np.stack([np.cross(down, forward), down, forward])
            pose = pycolmap.Rigid3d(pycolmap.Rotation3d(rotation), -rotation @ centre)
            own = sum(view in seen for seen in seen_by) if tracks else 0
            keypoints = random.uniform(0, 48, (own, 2))
            image = pycolmap.Image(name=f"ring/{view:03d}.jpg", keypoints=keypoints, camera_id=1, image_id=views - view)
            model.add_image_with_trivial_frame(image, pose)
        used = [0] * views
        for seen in seen_by:
            elements = []
            for view in seen if tracks else []:
                elements.append(pycolmap.TrackElement(views - view, used[view]))
                used[view] += 1
            model.add_point3D(random.normal(size=3), pycolmap.Track(elements), np.zeros(3, np.uint8))
        folder.mkdir(parents=True, exist_ok=True)
        model.write_binary(str(folder))
        return folder

    return write
