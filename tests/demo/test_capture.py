"""The procedural capture: the same every time, and as exact as it claims to be."""

from __future__ import annotations

import filecmp
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pycolmap
import pytest
from PIL import Image

from odin_nerfstudio.demo.capture import write_capture
from odin_nerfstudio.demo.raytrace import Tracer
from odin_nerfstudio.demo.scene import temple_court
from odin_nerfstudio.errors import UserError

SMALL = {"views": 6, "width": 48, "height": 36, "seed": 3}


@pytest.fixture(scope="module")
def small_capture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("small") / "capture"
    write_capture(directory, **SMALL)
    return directory


def test_the_same_flags_give_the_same_bytes(small_capture: Path, tmp_path: Path) -> None:
    write_capture(tmp_path / "again", **SMALL)
    files = [file.relative_to(small_capture) for file in small_capture.rglob("*") if file.is_file()]
    assert len(files) == 6 + 5 + 3
    same, different, missing = filecmp.cmpfiles(small_capture, tmp_path / "again", files, shallow=False)
    assert (len(same), different, missing) == (len(files), [], [])


def test_another_seed_gives_other_images(small_capture: Path, tmp_path: Path) -> None:
    write_capture(tmp_path / "other", **{**SMALL, "seed": 4})
    assert not filecmp.cmp(small_capture / "images/0001.png", tmp_path / "other/images/0001.png", shallow=False)


def test_tracks_reproject_exactly(demo_capture: Path) -> None:
    model = pycolmap.Reconstruction(demo_capture / "sparse/0")
    assert model.num_reg_images() == 12
    assert model.num_points3D() > 500
    assert 2 <= model.compute_mean_track_length() <= 8
    for image in model.images.values():
        for point in image.points2D:
            landed = image.project_point(model.points3D[point.point3D_id].xyz)
            assert landed is not None
            assert np.abs(landed - point.xy).max() < 1e-6


def test_observed_points_are_what_the_view_sees(demo_capture: Path) -> None:
    """The scene is traced along rays made by pycolmap from the model alone: they end at the model's points."""
    model = pycolmap.Reconstruction(demo_capture / "sparse/0")
    to_scene = np.array([[1.0, 0, 0], [0, 0, 1], [0, -1, 0]])
    tracer = Tracer(temple_court(), seed=0)
    for image in model.images.values():
        points = np.array([model.points3D[point.point3D_id].xyz for point in image.points2D])
        centre, sight = to_scene @ image.projection_center(), (points - image.projection_center()) @ to_scene.T
        distance = np.linalg.norm(sight, axis=1)
        reached = tracer.cast(np.broadcast_to(centre, sight.shape), sight / distance[:, None]).distance
        np.testing.assert_allclose(reached, distance, rtol=1e-5)


def test_points_have_the_colours_of_the_images(demo_capture: Path) -> None:
    model = pycolmap.Reconstruction(demo_capture / "sparse/0")
    differences = []
    for image in model.images.values():
        pixels = np.array(Image.open(demo_capture / "images" / image.name)).astype(float)
        for point in image.points2D:
            x, y = np.minimum(point.xy, (95, 71)).astype(int)
            differences.append(np.abs(pixels[y, x] - model.points3D[point.point3D_id].color).mean())
    assert np.median(differences) < 12  # of 255; textures are finer than these pixels


def test_transforms_agree_with_the_model(demo_capture: Path) -> None:
    meta = json.loads((demo_capture / "transforms.json").read_text())
    model = pycolmap.Reconstruction(demo_capture / "sparse/0")
    applied = np.array(meta["applied_transform"])
    assert len(meta["frames"]) == model.num_images()
    for frame in meta["frames"]:
        image, pose = model.images[frame["colmap_im_id"]], np.array(frame["transform_matrix"])
        assert frame["file_path"] == f"images/{image.name}"
        assert (demo_capture / frame["file_path"]).is_file()
        np.testing.assert_allclose(pose[:3, 3], applied[:, :3] @ image.projection_center(), atol=1e-9)
        forward = applied[:, :3] @ image.cam_from_world().rotation.matrix()[2]
        np.testing.assert_allclose(-pose[:3, 2], forward, atol=1e-9)
    assert pose[2, 1] > 0.5, "z is up in transforms.json"


def test_both_parsers_place_cameras_and_points_alike(demo_capture: Path) -> None:
    from nerfstudio.data.dataparsers.colmap_dataparser import ColmapDataParserConfig
    from nerfstudio.data.dataparsers.nerfstudio_dataparser import NerfstudioDataParserConfig

    shared = {"data": demo_capture, "eval_mode": "all", "load_3D_points": True, "downscale_factor": 1}
    from_colmap = ColmapDataParserConfig(colmap_path=Path("sparse/0"), **shared).setup().get_dataparser_outputs()
    from_json = NerfstudioDataParserConfig(**shared).setup().get_dataparser_outputs()
    assert [p.name for p in from_colmap.image_filenames] == [p.name for p in from_json.image_filenames]
    poses = [outputs.cameras.camera_to_worlds.numpy() for outputs in (from_colmap, from_json)]
    np.testing.assert_allclose(*poses, atol=1e-5)
    clouds = [np.array(sorted(outputs.metadata["points3D_xyz"].tolist())) for outputs in (from_colmap, from_json)]
    np.testing.assert_allclose(*clouds, atol=1e-4)


def test_a_finished_capture_is_left_alone(small_capture: Path) -> None:
    before = {file: file.stat().st_mtime_ns for file in small_capture.rglob("*")}
    write_capture(small_capture, **SMALL)
    assert {file: file.stat().st_mtime_ns for file in small_capture.rglob("*")} == before


def test_other_flags_or_other_files_are_refused(small_capture: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not the capture of these flags"):
        write_capture(small_capture, **{**SMALL, "views": 7})
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="is not the capture of these flags"):
        write_capture(tmp_path, **SMALL)
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


def test_from_the_shell_mistakes_get_a_sentence(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "odin_nerfstudio.demo.capture", str(tmp_path / "capture"), "--views", "1"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (1, "error: --views 1 is too small; the least is 3\n")
    assert not list(tmp_path.iterdir())
