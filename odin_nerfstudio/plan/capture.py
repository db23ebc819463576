"""Reads a capture on its own, without nerfstudio: names, cameras, seed points, and where its COLMAP model lies."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from odin_nerfstudio.errors import UserError
from odin_nerfstudio.plan.cameras import ViewCameras, check_poses
from odin_nerfstudio.plan.colmap_model import read_colmap_model
from odin_nerfstudio.plan.covisibility import points_in_world_of
from odin_nerfstudio.plan.ply import read_ply_positions

MODEL_FOLDERS = ("colmap/sparse/0", "sparse/0", "sparse")
"""Where a COLMAP model lies in a capture: ns-process-data's place first."""
TRANSFORMS = ("transforms.json", "transforms_train.json")
"""nerfstudio's own pose file, and Blender's."""


@dataclass(frozen=True)
class Capture:
    """A posed set of images."""

    name: str
    """Name of its folder."""
    image_names: list[str]
    """V names or paths of the images, as the pose file gives them."""
    cameras: ViewCameras
    """V cameras."""
    points: NDArray[np.float64] | None
    """(P, 3) seed points in the cameras' world; None if it has none."""
    colmap_dir: Path | None
    """Folder of its COLMAP model; None if it has none."""


def find_colmap_model(data: Path) -> Path | None:
    """The folder in ``data`` that holds a COLMAP model, if there is one."""
    for folder in MODEL_FOLDERS:
        if any((data / folder / f"cameras.{kind}").is_file() for kind in ("bin", "txt")):
            return data / folder
    return None


def read_capture(data: Path) -> Capture:
    """Reads a capture in nerfstudio's or COLMAP's format; a pose file wins over a COLMAP model beside it.

    Args:
        data: folder of the capture, or a ``transforms.json``.

    Raises:
        UserError: there is no capture, or a file of it is missing, malformed or cut off.
    """
    if data.is_file():
        return _from_transforms(data)
    if not data.is_dir():
        raise UserError(f"{data}: there is no such folder.")
    for name in TRANSFORMS:
        if (data / name).is_file():
            return _from_transforms(data / name)
    colmap_dir = find_colmap_model(data)
    if colmap_dir is None:
        raise UserError(
            f"{data}: holds neither {' nor '.join(TRANSFORMS)}, nor a COLMAP model in {', '.join(MODEL_FOLDERS)}."
        )
    model = read_colmap_model(colmap_dir)
    points = model.points if len(model.points) else None
    return Capture(data.resolve().name, model.names, model.cameras, points, colmap_dir)


def _from_transforms(file: Path) -> Capture:
    data = file.parent
    meta = _load_json(file)
    frames = meta.get("frames")
    if not isinstance(frames, list) or not frames:
        raise UserError(f"{file}: it lists no frames.")
    names: list[str] = []
    poses: list[NDArray[np.float64]] = []
    intrinsics: list[tuple[float, ...]] = []
    for i, frame in enumerate(frames):
        if not isinstance(frame, dict) or not isinstance(frame.get("file_path"), str):
            raise UserError(f"{file}: frame {i} has no file_path.")
    for frame in sorted(frames, key=lambda frame: frame["file_path"]):  # as nerfstudio's parser numbers them
        name = frame["file_path"]
        try:
            pose = np.array(frame.get("transform_matrix"), dtype=np.float64)
        except (TypeError, ValueError):
            pose = np.empty(0)
        if pose.shape not in ((4, 4), (3, 4)):
            raise UserError(f"{file}: the transform_matrix of {name} is not a 4x4 matrix.")
        names.append(name)
        poses.append(pose[:3])
        intrinsics.append(_intrinsics(file, {**meta, **frame}))
    camera_to_worlds = np.stack(poses)
    check_poses(camera_to_worlds, names, str(file))
    fx, fy, cx, cy, width, height = np.array(intrinsics).T
    cameras = ViewCameras(camera_to_worlds, fx, fy, cx, cy, width.astype(np.int64), height.astype(np.int64))

    colmap_dir = find_colmap_model(data)
    points: NDArray[np.float64] | None = None
    if isinstance(meta.get("ply_file_path"), str):
        points = read_ply_positions(data / meta["ply_file_path"])
    elif colmap_dir is not None:
        points = points_in_world_of(read_colmap_model(colmap_dir), names, cameras)
    if points is not None and len(points) == 0:
        points = None
    return Capture(data.resolve().name, names, cameras, points, colmap_dir)


def _load_json(file: Path) -> dict[str, Any]:
    try:
        meta = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror}).") from error
    except ValueError as error:
        raise UserError(f"{file}: this is not valid JSON ({error}).") from error
    if not isinstance(meta, dict):
        raise UserError(f"{file}: this is not a pose file of nerfstudio.")
    return meta


def _intrinsics(file: Path, camera: dict[str, Any]) -> tuple[float, ...]:
    """fx, fy, cx, cy, width, height of a frame; Blender gives a field of view only, and the image gives the size."""
    try:
        if "w" in camera and "h" in camera:
            width, height = int(camera["w"]), int(camera["h"])
        else:
            width, height = _image_size(file, camera["file_path"])
        fx = float(camera["fl_x"]) if "fl_x" in camera else width / 2 / np.tan(float(camera["camera_angle_x"]) / 2)
        fy = float(camera.get("fl_y", fx))
        cx, cy = float(camera.get("cx", width / 2)), float(camera.get("cy", height / 2))
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{file}: the intrinsics of {camera['file_path']} are missing or malformed ({error})."
        ) from error
    values = (fx, fy, cx, cy, width, height)
    if not np.isfinite(values).all() or min(fx, fy, width, height) <= 0:
        raise UserError(f"{file}: the intrinsics of {camera['file_path']} are not those of a camera.")
    return values


def _image_size(file: Path, name: str) -> tuple[int, int]:
    image = file.parent / name
    if not image.suffix:
        image = image.with_suffix(".png")
    try:
        with Image.open(image) as opened:
            return opened.size
    except OSError as error:
        raise UserError(f"{image}: the image that {file} lists is missing or cannot be read.") from error
