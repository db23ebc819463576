"""A camera path once around the demo scene, in the file format that nerfstudio's viewer saves."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from odin_nerfstudio.demo.camera import orbit
from odin_nerfstudio.demo.capture import SCENE_TO_COLMAP


def write_turntable(path: Path, run: Path, width: int = 384, height: int = 288, frames: int = 72) -> None:
    """Writes a path of ``frames`` cameras at 24 a second, for ``ns-render camera-path``.

    Args:
        path: JSON file to write.
        run: Folder of a training run on the demo capture; its dataparser_transforms.json says how the capture's frame
            was turned and scaled.
        width: Width of the video in pixels.
        height: Height of the video in pixels.
        frames: Length of the video.
    """
    frame = json.loads((run / "dataparser_transforms.json").read_text())
    turn, shift = np.hsplit(np.array(frame["transform"]), [3])
    cameras = orbit(np.arange(frames) / frames, width, height)
    vertical = np.rad2deg(2 * np.arctan(height / 2 / cameras[0].focal))
    steps = []
    for camera in cameras:
        pose = np.eye(4)
        pose[:3, :3] = turn @ SCENE_TO_COLMAP @ camera.axes * (1, -1, -1)  # OpenGL: y up, z backward
        pose[:3, 3] = frame["scale"] * (turn @ SCENE_TO_COLMAP @ camera.position + shift[:, 0])
        steps.append({"camera_to_world": pose.ravel().tolist(), "fov": vertical, "aspect": width / height})
    path.write_text(
        json.dumps(
            {
                "camera_type": "perspective",
                "render_width": width,
                "render_height": height,
                "fps": 24,
                "seconds": frames / 24,
                "is_cycle": True,
                "camera_path": steps,
            }
        )
    )
