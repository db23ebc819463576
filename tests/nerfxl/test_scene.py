"""Near, far and unit of captures of any scale, with and without points."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from xl_runs import make_scene

from odin_nerfstudio.errors import UserError
from odin_nerfstudio.nerfxl.scene import Scene
from odin_nerfstudio.plan.cameras import ViewCameras


def overhead(scale: float, views: int = 9) -> ViewCameras:
    """Cameras 64 units above the ground that look straight down."""
    places = np.stack([np.arange(views) * 20.0, np.zeros(views), np.full(views, 64.0)], axis=1) * scale
    poses = np.concatenate([np.tile(np.eye(3), (views, 1, 1)), places[:, :, None]], axis=2)
    focal, size = np.full(views, 100.0), np.full(views, 100)
    return ViewCameras(poses, focal, focal, size / 2.0, size / 2.0, size, size)


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e3])
def test_measures_follow_the_scale_of_the_world(scale: float) -> None:
    rng = np.random.default_rng(0)
    ground = np.concatenate([rng.uniform(-50, 200, (2000, 2)), rng.uniform(0, 4, (2000, 1))], axis=1) * scale
    scene = Scene.measure("fields", ["a.jpg"], overhead(scale), ground)
    assert 25 < scene.near / scale < 35
    assert 60 < scene.unit / scale < 75
    assert 200 < scene.far / scale < 400
    assert len(scene.seeds) == 2000


@pytest.mark.parametrize("points", [None, np.zeros((0, 3))])
def test_without_points_the_frusta_stand_in(points: np.ndarray | None) -> None:
    scene = Scene.measure("fields", ["a.jpg"], overhead(1.0), points)
    assert len(scene.seeds) > 10
    assert 0 < scene.near < scene.unit < scene.far < np.inf


def test_one_camera_on_the_only_point() -> None:
    scene = Scene.measure("dot", ["a.jpg"], overhead(1.0, views=1), np.array([[0.0, 0.0, 64.0]]))
    assert 0 < scene.near < scene.unit < scene.far


def test_steps_grow_with_the_distance_from_the_nearest_camera() -> None:
    scene = make_scene()
    close, distant, nowhere = torch.tensor([[2.0, 0.0, 0.0], [9.0, 0.0, 0.0], [torch.inf, 0.0, 0.0]])
    lengths = scene.step_length(torch.stack([close, distant, nowhere]), 100)
    torch.testing.assert_close(lengths, torch.tensor([0.06, 0.06 * 4, 0.06 * (20 / 3) ** 2]))


def test_another_capture_is_named() -> None:
    scene = make_scene()
    scene.check_same(replace(scene, name="moved").state_dict())  # wherever it lies now
    with pytest.raises(UserError, match="other images, those of the capture garden; this is demo"):
        scene.check_same(replace(scene, name="garden", images="other").state_dict())
    with pytest.raises(UserError, match="other camera positions of the capture demo"):
        scene.check_same(replace(scene, centres=2 * scene.centres).state_dict())
