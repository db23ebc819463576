from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from odin_nerfstudio.errors import UserError
from odin_nerfstudio.plan.capture import find_colmap_model, read_capture
from odin_nerfstudio.plan.colmap_model import read_colmap_model
from odin_nerfstudio.plan.plan import Plan
from odin_nerfstudio.plan.schedule import ScheduleConfig

INTRINSICS = {"w": 64, "h": 48, "fl_x": 50.0, "fl_y": 51.0, "cx": 32.0, "cy": 24.0}


def transforms(poses: np.ndarray, names: list[str], **meta) -> dict:
    frames = [
        {"file_path": n, "transform_matrix": [*p.tolist(), [0, 0, 0, 1]]} for n, p in zip(names, poses, strict=True)
    ]
    return {**INTRINSICS, **meta, "frames": frames}


def write(folder: Path, content: dict, name: str = "transforms.json") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("place", ["colmap/sparse/0", "sparse/0", "sparse"])
def test_a_colmap_model_is_found_where_tools_put_it(tmp_path: Path, write_model, place: str) -> None:
    assert find_colmap_model(tmp_path) is None
    write_model(tmp_path / place)
    assert find_colmap_model(tmp_path) == tmp_path / place
    capture = read_capture(tmp_path)
    assert capture.name == tmp_path.name and len(capture.image_names) == len(capture.cameras) == 8
    assert capture.points is not None and len(capture.points) == 40


def test_points_of_the_model_come_in_the_world_of_the_pose_file(tmp_path: Path, write_model) -> None:
    model = read_colmap_model(write_model(tmp_path / "colmap/sparse/0"))
    applied = np.array([[0.0, 1, 0, 2], [1, 0, 0, 0], [0, 0, -1, 1]])
    poses = applied[:, :3] @ model.cameras.camera_to_worlds
    poses[:, :, 3] += applied[:, 3]
    write(tmp_path, transforms(poses, [f"images/{name}" for name in model.names]))
    capture = read_capture(tmp_path)
    np.testing.assert_allclose(capture.points, model.points @ applied[:, :3].T + applied[:, 3], atol=1e-9)
    plan = Plan.build(capture, 2, 1, ScheduleConfig())
    assert plan.visibility.source == "tracks"
    np.testing.assert_allclose(plan.visibility.positions, capture.points, atol=1e-9)


def test_frames_are_sorted_by_name_as_nerfstudio_does(tmp_path: Path) -> None:
    poses = np.tile(np.eye(3, 4), (3, 1, 1))
    poses[:, 0, 3] = [0, 1, 2]
    capture = read_capture(write(tmp_path, transforms(poses, ["b.png", "c.png", "a.png"])))
    assert capture.image_names == ["a.png", "b.png", "c.png"]
    np.testing.assert_array_equal(capture.cameras.centres[:, 0], [2, 0, 1])
    assert capture.points is None and capture.colmap_dir is None
    assert Plan.build(capture, 1, 1, ScheduleConfig()).visibility.source == "frusta"


def test_blender_captures_take_the_size_from_the_image(tmp_path: Path) -> None:
    content = transforms(np.eye(3, 4)[None], ["./train/r_0"])
    content = {"camera_angle_x": np.pi / 2, "frames": content["frames"]}
    write(tmp_path, content, "transforms_train.json")
    with pytest.raises(UserError, match=r"r_0\.png: the image that .*transforms_train\.json lists is missing"):
        read_capture(tmp_path)
    (tmp_path / "train").mkdir()
    Image.new("RGB", (80, 60)).save(tmp_path / "train/r_0.png")
    cameras = read_capture(tmp_path).cameras
    values = (cameras.fx[0], cameras.fy[0], cameras.cx[0], cameras.cy[0], cameras.width[0], cameras.height[0])
    np.testing.assert_allclose(values, (40, 40, 40, 30, 80, 60))


def nan_pose() -> dict:
    content = transforms(np.tile(np.eye(3, 4), (2, 1, 1)), ["a.png", "b.png"])
    content["frames"][1]["transform_matrix"][0][3] = float("nan")
    return content


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (nan_pose(), "the pose of b.png holds NaN"),
        (transforms(2 * np.eye(3, 4)[None], ["a.png"]), "the pose of a.png is not rigid"),
        (transforms(-np.eye(3, 4)[None], ["a.png"]), "the pose of a.png is not rigid"),
        ({**INTRINSICS, "frames": []}, "it lists no frames"),
        (INTRINSICS, "it lists no frames"),
        ([], "not a pose file"),
        ({**INTRINSICS, "frames": [{"transform_matrix": np.eye(4).tolist()}]}, "frame 0 has no file_path"),
        ({**INTRINSICS, "frames": [{"file_path": "a.png"}]}, "transform_matrix of a.png is not a 4x4"),
        ({"w": 4, "h": 3, "frames": transforms(np.eye(3, 4)[None], ["a.png"])["frames"]}, "intrinsics of a.png"),
        (transforms(np.eye(3, 4)[None], ["a.png"], fl_x=-1), "intrinsics of a.png are not those of a camera"),
        (transforms(np.eye(3, 4)[None], ["a.png"], ply_file_path="no.ply"), r"no\.ply: the point cloud cannot be read"),
    ],
)
def test_names_what_is_wrong_with_a_pose_file(tmp_path: Path, content, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_capture(write(tmp_path, content))


def test_names_the_file_that_is_not_json(tmp_path: Path) -> None:
    (tmp_path / "transforms.json").write_text('{"frames": [')
    with pytest.raises(UserError, match=r"transforms\.json: this is not valid JSON"):
        read_capture(tmp_path)


def test_names_the_folder_without_a_capture(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no such folder"):
        read_capture(tmp_path / "missing")
    with pytest.raises(UserError, match=r"holds neither transforms\.json .* nor a COLMAP model"):
        read_capture(tmp_path)
