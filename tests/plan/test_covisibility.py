from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial.transform import Rotation

from odin_nerfstudio.plan.cameras import ViewCameras
from odin_nerfstudio.plan.colmap_model import read_colmap_model
from odin_nerfstudio.plan.covisibility import (
    match_images,
    measure_visibility,
    pose_similarity,
    visibility_from_frusta,
    visibility_from_points,
    visibility_from_tracks,
)


def cameras_looking(directions: list[list[float]], centres: list[list[float]]) -> ViewCameras:
    """Square cameras of 90° that look along the given directions."""
    backward = -np.array(directions, dtype=float)
    right = np.array([np.cross([0.13, 0.99, 0.07], b) for b in backward])
    right /= np.linalg.norm(right, axis=1, keepdims=True)
    poses = np.stack([right, np.cross(backward, right), backward, np.array(centres, dtype=float)], axis=2)
    full = np.full(len(poses), 100.0)
    return ViewCameras(poses, full / 2, full / 2, full / 2, full / 2, full.astype(int), full.astype(int))


@pytest.mark.parametrize(
    ("image", "found"),
    [
        ("left/001.jpg", 0),
        ("/data/images_2/left/001.jpg", 0),
        ("images/right/001.jpg", 1),
        ("002.jpg", 2),
        ("deep/003.jpg", 3),
        ("001.jpg", -1),  # left or right?
        ("images/004.jpg", -1),
    ],
)
def test_images_are_found_by_the_tail_of_their_path(image: str, found: int) -> None:
    names = ["left/001.jpg", "right/001.jpg", "images/002.jpg", "a/deep/003.jpg"]
    assert match_images(names, [image]).tolist() == [found]
    assert match_images(names, [Path(image)]).tolist() == [found]


def test_tracks_follow_the_order_of_the_images(tmp_path: Path, write_model) -> None:
    model = read_colmap_model(write_model(tmp_path))
    wanted = [5, 2, 7]
    visibility = visibility_from_tracks(model, [*(f"images/{model.names[i]}" for i in wanted), "images/unknown.jpg"])
    np.testing.assert_array_equal(visibility.incidence.toarray()[:3], model.tracks.toarray()[wanted])
    assert visibility.incidence[[3]].nnz == 0
    assert visibility.reason == "COLMAP tracks of 3 of 4 views."


def test_positions_come_in_the_world_of_the_cameras(tmp_path: Path, write_model) -> None:
    model = read_colmap_model(write_model(tmp_path))
    turn, shift, scale = Rotation.from_euler("xyz", [0.3, 1.0, -2.0]).as_matrix(), np.array([1.0, -2.0, 0.5]), 0.3
    poses = turn @ model.cameras.camera_to_worlds
    poses[:, :, 3] = scale * (poses[:, :, 3] + shift)
    visibility = visibility_from_tracks(model, model.names, replace(model.cameras, camera_to_worlds=poses))
    np.testing.assert_allclose(visibility.positions, scale * (model.points @ turn.T + shift), atol=1e-9)


def test_poses_that_disagree_give_no_similarity(tmp_path: Path, write_model) -> None:
    poses = read_colmap_model(write_model(tmp_path)).cameras.camera_to_worlds
    moved = poses.copy()
    moved[0, :, 3] += 5
    assert pose_similarity(poses, moved) is None
    assert pose_similarity(poses[:1], poses[:1]) is None
    np.testing.assert_allclose(pose_similarity(poses, poses), np.eye(3, 4), atol=1e-12)


def test_evidence_falls_back_and_says_why(tmp_path: Path, write_model) -> None:
    model = read_colmap_model(write_model(tmp_path / "full"))
    names, cameras, points = model.names, model.cameras, model.points
    without = write_model(tmp_path / "without", tracks=False)

    tracks = measure_visibility(names, cameras, points, tmp_path / "full")
    assert tracks.source == "tracks"
    projected = measure_visibility(names, cameras, points, without)
    assert projected.source == "points" and "has no tracks" in projected.reason
    strangers = measure_visibility([f"x{i}.png" for i in range(8)], cameras, points, tmp_path / "full")
    assert strangers.source == "points" and "observes only 0 of the 8 views" in strangers.reason
    frusta = measure_visibility(names, cameras, None, None)
    assert frusta.source == "frusta" and "no COLMAP model" in frusta.reason
    assert measure_visibility(names, cameras, np.empty((0, 3)), None).source == "frusta"


def test_points_outside_the_image_or_behind_are_not_seen() -> None:
    cameras = cameras_looking([[0, 0, -1], [0, 0, 1]], [[0, 0, 0], [0, 0, 0]])
    points = np.array([[0, 0, -2.0], [1.4, 1.4, -2], [2.5, 0, -2], [0, 0, 2.0]])
    seen = visibility_from_points(points, cameras, "").incidence.toarray()
    np.testing.assert_array_equal(seen, [[True, True, False, False], [False, False, False, True]])


@given(st.integers(0, 2**32 - 1))
def test_frusta_overlap_where_cameras_look_at_the_same(seed: int) -> None:
    random = np.random.default_rng(seed)
    near = random.normal(scale=0.05, size=3)
    cameras = cameras_looking([[0, 0, -1], [0, 0, -1], [0, 0, 1]], [[0, 0, 0], near, [0, 0, 40]])
    seen = visibility_from_frusta(cameras, "").incidence.toarray()
    assert (seen[0] & seen[1]).sum() > 0
    assert (seen[0] & seen[2]).sum() == 0


def test_ownership_counts_the_points_of_each_owner(tmp_path: Path, write_model) -> None:
    model = read_colmap_model(write_model(tmp_path))
    visibility = visibility_from_tracks(model, [*model.names, "nothing.jpg"])
    owner = np.arange(len(model.points)) % 3
    share = visibility.ownership(owner, 3)
    seen = visibility.incidence.toarray()
    expected = [[np.mean(owner[row] == o) if row.any() else 0 for o in range(3)] for row in seen]
    np.testing.assert_allclose(share, expected)
