"""Reads a COLMAP sparse model, binary or text, checking every length on the way.

The format is COLMAP's own (https://colmap.github.io/format.html). pycolmap reads it too, but a file that was cut off
makes it hang, abort the process or return garbage, where a user needs to be told which file is bad.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from odin_nerfstudio.errors import UserError
from odin_nerfstudio.plan.cameras import ViewCameras, check_poses

# Camera models by COLMAP's id: name and number of parameters. Those of one focal length begin f, cx, cy; the others
# fx, fy, cx, cy.
CAMERA_MODELS = {
    0: ("SIMPLE_PINHOLE", 3),
    1: ("PINHOLE", 4),
    2: ("SIMPLE_RADIAL", 4),
    3: ("RADIAL", 5),
    4: ("OPENCV", 8),
    5: ("OPENCV_FISHEYE", 8),
    6: ("FULL_OPENCV", 12),
    7: ("FOV", 5),
    8: ("SIMPLE_RADIAL_FISHEYE", 4),
    9: ("RADIAL_FISHEYE", 5),
    10: ("THIN_PRISM_FISHEYE", 12),
    11: ("RAD_TAN_THIN_PRISM_FISHEYE", 16),
    12: ("SIMPLE_DIVISION", 4),
    13: ("DIVISION", 5),
    14: ("SIMPLE_FISHEYE", 3),
    15: ("FISHEYE", 4),
    16: ("EUCM", 6),
}
ONE_FOCAL_LENGTH = {
    "SIMPLE_PINHOLE",
    "SIMPLE_RADIAL",
    "RADIAL",
    "SIMPLE_RADIAL_FISHEYE",
    "RADIAL_FISHEYE",
    "SIMPLE_DIVISION",
    "SIMPLE_FISHEYE",
}

Intrinsics = tuple[float, float, float, float, int, int]
"""fx, fy, cx, cy, width, height in pixels."""


@dataclass(frozen=True)
class ColmapModel:
    """A sparse model: V registered images in the order of their ids, P points, in COLMAP's world."""

    folder: Path
    """Where it was read from."""
    names: list[str]
    """V image names as COLMAP stores them: paths relative to its image folder."""
    cameras: ViewCameras
    """V cameras."""
    points: NDArray[np.float64]
    """(P, 3) positions."""
    colors: NDArray[np.uint8]
    """(P, 3) RGB."""
    tracks: sp.csr_array
    """(V, P) bool: image i observes point p."""


def read_colmap_model(folder: Path) -> ColmapModel:
    """Reads ``cameras``, ``images`` and ``points3D`` of a folder; where both kinds of file exist, the text ones.

    Raises:
        UserError: a file is missing, cut off or malformed, or a pose is not rigid.
    """
    kind = "txt" if (folder / "cameras.txt").exists() else "bin"
    files = {part: folder / f"{part}.{kind}" for part in ("cameras", "images", "points3D")}
    for file in files.values():
        if not file.is_file():
            raise UserError(f"{file}: this file of the COLMAP model is missing.")
    try:
        if kind == "txt":
            intrinsics = _cameras_from_text(files["cameras"])
            ids, names, camera_ids, poses = _images_from_text(files["images"])
            points, colors, lengths, observers = _points_from_text(files["points3D"])
        else:
            intrinsics = _cameras_from_binary(files["cameras"])
            ids, names, camera_ids, poses = _images_from_binary(files["images"])
            points, colors, lengths, observers = _points_from_binary(files["points3D"])
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be read ({error.strerror}).") from error
    if not names:
        raise UserError(f"{files['images']}: the COLMAP model holds no image.")

    if not np.isfinite(points).all():
        raise UserError(f"{files['points3D']}: a point's position is NaN or infinite.")
    missing = next((c for c in camera_ids if c not in intrinsics), None)
    if missing is not None:
        raise UserError(f"{files['images']}: an image refers to camera {missing}, which {files['cameras']} lacks.")
    by_id = np.argsort(ids, kind="stable")
    names = [names[i] for i in by_id]
    fx, fy, cx, cy, width, height = np.array([intrinsics[camera_ids[i]] for i in by_id], dtype=np.float64).T
    camera_to_worlds = _camera_to_worlds(np.array(poses, dtype=np.float64)[by_id])
    check_poses(camera_to_worlds, names, str(files["images"]))

    sorted_ids = np.asarray(ids, dtype=np.int64)[by_id]
    rows = np.searchsorted(sorted_ids, observers).clip(max=len(sorted_ids) - 1)
    registered = sorted_ids[rows] == observers
    columns = np.repeat(np.arange(len(points), dtype=np.int32), lengths)
    tracks = sp.csr_array(
        (np.ones(registered.sum(), dtype=bool), (rows[registered].astype(np.int32), columns[registered])),
        shape=(len(names), len(points)),
    )
    tracks.sum_duplicates()
    cameras = ViewCameras(camera_to_worlds, fx, fy, cx, cy, width.astype(np.int64), height.astype(np.int64))
    return ColmapModel(folder, names, cameras, points, colors, tracks)


def holds_points(folder: Path) -> bool:
    """Whether a model has any point, told from the head of its file; True where there is no such file to look at."""
    binary, text = folder / "points3D.bin", folder / "points3D.txt"
    if binary.is_file():
        with binary.open("rb") as file:
            return any(file.read(8))
    return not text.is_file() or any(line.strip() for _, line in _lines(text))


def _camera_to_worlds(poses: NDArray[np.float64]) -> NDArray[np.float64]:
    """(V, 7) world → camera as qw, qx, qy, qz, tx, ty, tz in OpenCV axes → (V, 3, 4) in OpenGL axes.

    A quaternion is normalised first; a zero one gives NaN, which :func:`check_poses` reports.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        w, x, y, z = (poses[:, :4] / np.linalg.norm(poses[:, :4], axis=1, keepdims=True)).T
    world_to_camera = np.array(
        [
            [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
            [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
            [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
        ]
    ).transpose(2, 0, 1)
    rotation = world_to_camera.transpose(0, 2, 1)
    with np.errstate(invalid="ignore"):
        centre = -rotation @ poses[:, 4:, None]
    return np.concatenate([rotation * np.array([1.0, -1.0, -1.0]), centre], axis=2)


def _intrinsics(file: Path, model: str, params: tuple[float, ...], width: int, height: int) -> Intrinsics:
    expected = dict(CAMERA_MODELS.values()).get(model)
    if expected is None:
        raise UserError(f"{file}: camera model {model} is not supported; undistort the images to PINHOLE first.")
    if len(params) != expected:
        raise UserError(f"{file}: camera model {model} has {expected} parameters, the file gives {len(params)}.")
    if model in ONE_FOCAL_LENGTH:
        params = (params[0], *params)
    return (*params[:4], width, height)  # type: ignore[return-value]


class _Cursor:
    """Reads little-endian values one after the other and notices the end of the file."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.data = file.read_bytes()
        self.position = 0

    def take(self, layout: str) -> tuple:
        layout = f"<{layout}"
        start = self.skip(struct.calcsize(layout))
        return struct.unpack_from(layout, self.data, start)

    def text(self) -> str:
        end = self.data.find(b"\0", self.position)
        if end < 0:
            raise self.cut_off()
        text = self.data[self.position : end]
        self.position = end + 1
        return text.decode("utf-8", errors="replace")

    def skip(self, size: int) -> int:
        start = self.position
        if start + size > len(self.data):
            raise self.cut_off()
        self.position = start + size
        return start

    def cut_off(self) -> UserError:
        return UserError(f"{self.file}: the file is cut off or is not a COLMAP model.")


def _cameras_from_binary(file: Path) -> dict[int, Intrinsics]:
    cursor = _Cursor(file)
    cameras = {}
    (count,) = cursor.take("Q")
    for _ in range(count):
        camera_id, model_id, width, height = cursor.take("iiQQ")
        if model_id not in CAMERA_MODELS:
            raise UserError(f"{file}: camera model {model_id} is not supported; undistort the images to PINHOLE first.")
        model, size = CAMERA_MODELS[model_id]
        cameras[camera_id] = _intrinsics(file, model, cursor.take(f"{size}d"), width, height)
    return cameras


def _images_from_binary(file: Path) -> tuple[list[int], list[str], list[int], list[tuple[float, ...]]]:
    cursor = _Cursor(file)
    ids, names, camera_ids, poses = [], [], [], []
    (count,) = cursor.take("Q")
    for _ in range(count):
        image_id, *pose, camera_id = cursor.take("I7dI")
        ids.append(image_id)
        poses.append(tuple(pose))
        camera_ids.append(camera_id)
        names.append(cursor.text())
        (observations,) = cursor.take("Q")
        cursor.skip(24 * observations)
    return ids, names, camera_ids, poses


_Points = tuple[NDArray[np.float64], NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]
"""Positions (P, 3), colours (P, 3), track lengths (P,) and the image ids of all tracks, one after the other."""


def _points_from_binary(file: Path) -> _Points:
    cursor = _Cursor(file)
    (count,) = cursor.take("Q")
    starts = []
    lengths = []
    for _ in range(count):
        starts.append(cursor.skip(43))  # id, position, colour, reprojection error
        (length,) = cursor.take("Q")
        cursor.skip(8 * length)
        lengths.append(length)
    start = np.array(starts, dtype=np.int64)
    length = np.array(lengths, dtype=np.int64)
    data = np.frombuffer(cursor.data, dtype=np.uint8)

    xyz = data[start[:, None] + np.arange(8, 32)].view("<f8").reshape(-1, 3)
    rgb = data[start[:, None] + np.arange(32, 35)]
    first = np.cumsum(length) - length
    element = np.arange(length.sum()) - np.repeat(first, length)
    observer = np.repeat(start + 51, length) + 8 * element
    image_ids = data[observer[:, None] + np.arange(4)].view("<u4").reshape(-1)
    return xyz.astype(np.float64), rgb, length, image_ids.astype(np.int64)


def _lines(file: Path) -> list[tuple[int, str]]:
    """The numbered lines that are no comments. Blank ones stay: an image without observations has one."""
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    return [(number, line) for number, line in enumerate(lines, 1) if not line.startswith("#")]


def _malformed(file: Path, number: int) -> UserError:
    return UserError(f"{file}: line {number} is malformed.")


def _cameras_from_text(file: Path) -> dict[int, Intrinsics]:
    cameras = {}
    for number, line in _lines(file):
        if not line.strip():
            continue
        try:
            camera_id, model, width, height, *params = line.split()
            values = tuple(float(p) for p in params)
            cameras[int(camera_id)] = _intrinsics(file, model, values, int(width), int(height))
        except ValueError as error:
            raise _malformed(file, number) from error
    return cameras


def _images_from_text(file: Path) -> tuple[list[int], list[str], list[int], list[tuple[float, ...]]]:
    ids, names, camera_ids, poses = [], [], [], []
    lines = _lines(file)
    while lines and not lines[-1][1].strip():
        lines.pop()
    for number, line in lines[::2]:  # the lines between list the observations, which the tracks repeat
        try:
            image_id, *pose, camera_id, name = line.split(maxsplit=9)
            ids.append(int(image_id))
            poses.append(tuple(float(v) for v in pose))
            camera_ids.append(int(camera_id))
            names.append(name.strip())
        except ValueError as error:
            raise _malformed(file, number) from error
        if len(pose) != 7:
            raise _malformed(file, number)
    return ids, names, camera_ids, poses


def _points_from_text(file: Path) -> _Points:
    positions: list[tuple[float, float, float]] = []
    colors: list[tuple[int, int, int]] = []
    lengths: list[int] = []
    observers: list[int] = []
    for number, line in _lines(file):
        if not line.strip():
            continue
        try:
            _, x, y, z, red, green, blue, _, *track = line.split()
            positions.append((float(x), float(y), float(z)))
            colors.append((int(red), int(green), int(blue)))
            observers.extend(int(image_id) for image_id in track[::2])
        except ValueError as error:
            raise _malformed(file, number) from error
        lengths.append(len(track) // 2)
    xyz = np.array(positions, dtype=np.float64).reshape(-1, 3)
    rgb = np.array(colors, dtype=np.int64).clip(0, 255).astype(np.uint8).reshape(-1, 3)
    return xyz, rgb, np.array(lengths, dtype=np.int64), np.array(observers, dtype=np.int64)
