"""One process: outputs, draws, losses, bad input."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from nerfstudio.cameras.cameras import Cameras
from torch import Tensor
from xl_runs import make_model, make_rays, make_scene

from odin_nerfstudio.errors import UserError
from odin_nerfstudio.nerfxl.model import tile_of


@pytest.mark.parametrize("tiles", [1, 2, 3, 5])
@pytest.mark.parametrize("points", [0, 2, 100])
@pytest.mark.parametrize("step", [0, 10])
def test_any_number_of_tiles_and_points(tiles: int, points: int, step: int) -> None:
    """Before and after the occupancy grids' warm-up; with fewer points than tiles too."""
    model = make_model(make_scene(points), tiles=tiles)
    model.prepare_step(step)
    model.train()
    outputs = model(make_rays())
    shapes = {name: tuple(value.shape) for name, value in outputs.items()}
    assert shapes == {
        "rgb": (50, 3),
        "accumulation": (50, 1),
        "depth": (50, 1),
        "tile": (50, 3),
        "distortion": (50, 1),
        "background": (50, 3),
    }
    assert all(torch.isfinite(value).all() for value in outputs.values())
    losses = model.get_loss_dict(outputs, {"image": torch.rand(50, 3)})
    torch.stack(list(losses.values())).sum().backward()
    assert all(torch.isfinite(param.grad).all() for param in model.parameters() if param.grad is not None)
    assert all(tile.field.grid.table.grad is not None for tile in model.fields.values())


def test_tile_without_a_sample() -> None:
    """Rays that end before they reach it; its optimizer still takes part."""
    model = make_model(make_scene(), tiles=4, near_plane=0.01, far_plane=0.02)
    model.train()
    model(make_rays())["rgb"].sum().backward()
    grads = [tile.field.grid.table.grad for tile in model.fields.values()]
    assert sum(bool((grad == 0).all()) for grad in grads if grad is not None) == 3


def test_draws_belong_to_steps() -> None:
    model = make_model(make_scene(), tiles=2)
    model.train()

    def rgb(step: int) -> Tensor:
        model.prepare_step(step)
        return model(make_rays())["rgb"].detach()

    assert torch.equal(rgb(1), rgb(1))
    assert not torch.equal(rgb(1), rgb(2))
    assert torch.equal(make_model(make_scene(), tiles=2).train()(make_rays())["rgb"], rgb(0))


def test_exchanges_agree_in_one_process() -> None:
    images = [
        make_model(make_scene(), tiles=3, exchange=kind).eval()(make_rays())["rgb"] for kind in ("tile", "sample")
    ]
    torch.testing.assert_close(*images, rtol=1e-5, atol=1e-6)


def test_background_shows_behind_everything() -> None:
    black, white = (
        make_model(make_scene(), tiles=2, background_color=colour).eval()(make_rays()) for colour in ("black", "white")
    )
    torch.testing.assert_close(white["rgb"] - black["rgb"], (1 - black["accumulation"]).expand(-1, 3))
    rgba = make_model(make_scene(), background_color="white").get_rgba_image(white)
    torch.testing.assert_close(rgba[:, :3] * rgba[:, 3:], black["rgb"], rtol=1e-4, atol=1e-5)


def test_depth_and_tile_of_opaque_space() -> None:
    """Everything is opaque: rays see what is right before them, and the tile that it lies in."""
    model = make_model(make_scene(), tiles=3).eval()
    for tile in model.fields.values():
        tile.field.mlp[-1].bias.data[0] = 14.0
    rays = make_rays()
    outputs = model(rays)
    assert (outputs["accumulation"] > 0.999).all()
    assert (outputs["depth"] < 0.5 + 3.0 * 2 / 32 * 4).all()
    owner = model.tiles.owner(rays.origins + 0.6 * rays.directions)
    seen = (outputs["tile"] - model.palette[owner]).abs().amax(dim=1) < 0.05
    assert seen.float().mean() > 0.9


def test_a_crop_limits_rays() -> None:
    model = make_model(make_scene()).eval()
    rays = make_rays()
    missed = copy.copy(rays)
    missed.nears = missed.fars = torch.full((50, 1), 1e10)
    assert (model(missed)["accumulation"] == 0).all()
    part = copy.copy(rays)
    part.nears, part.fars = torch.full((50, 1), 1.0), torch.full((50, 1), 2.0)
    assert (model(part)["accumulation"] <= model(rays)["accumulation"] + 1e-6).all()


@pytest.mark.parametrize(
    ("planes", "first", "last"), [({}, 1.8, 0.5), ({"near_plane": 2.5}, 2.5, 2.5), ({"far_plane": 1.5}, 1.0, 0.5)]
)
def test_rays_begin_nearer_from_step_to_step(planes: dict[str, float], first: float, last: float) -> None:
    """Everything is opaque, so depth says where rays begin; while training as for tools."""
    model = make_model(make_scene(), near_warmup_steps=8, samples_per_ray=1024, **planes)
    model.fields["0"].field.mlp[-1].bias.data[0] = 14.0
    for training in (True, False):
        model.train(training)
        for step, expected in ((0, first), (4, (first + last) / 2), (8, last), (100, last)):
            model.update_to_step(step)
            depth = model(make_rays())["depth"]
            torch.testing.assert_close(depth, torch.full_like(depth, expected), rtol=0, atol=0.03)


def test_a_camera_is_rendered_in_chunks() -> None:
    pose = torch.eye(4)[None, :3]
    camera = Cameras(pose, fx=20.0, fy=20.0, cx=8.0, cy=6.0, width=16, height=12)
    model = make_model(make_scene(), tiles=2).eval()
    whole = model.get_outputs_for_camera(camera)
    model.config.eval_num_rays_per_chunk = 50
    parts = model.get_outputs_for_camera(camera)
    assert whole["rgb"].shape == (12, 16, 3)
    for name, value in whole.items():
        torch.testing.assert_close(parts[name], value, rtol=1e-4, atol=1e-5)
    metrics, images = model.get_image_metrics_and_images(whole, {"image": torch.rand(12, 16, 4)})
    assert {"psnr", "ssim"} <= metrics.keys()
    assert images["img"].shape == (12, 32, 3)


def test_regularisers() -> None:
    model = make_model(make_scene(), tiles=2, hash_decay_mult=1.0, distortion_loss_mult=1.0)
    model.train()
    losses = model.get_loss_dict(model(make_rays()), {"image": torch.rand(50, 3)})
    assert {"rgb_loss", "distortion_loss", "hash_decay"} <= losses.keys()
    tables = [tile.field.grid.table for tile in model.fields.values()]
    levels = [level.entries for level in model.fields["0"].field.grid.layout.levels]
    expected = sum(rows.square().mean() for table in tables for rows in table.split(levels))
    torch.testing.assert_close(losses["hash_decay"], expected)


def test_a_checkpoint_brings_its_tiles() -> None:
    saved = make_model(make_scene(seed=1), tiles=3).eval()
    state = saved.state_dict()
    other = make_model(make_scene(seed=2), tiles=3).eval()
    other.load_state_dict(state)
    assert torch.equal(other(make_rays())["rgb"], saved(make_rays())["rgb"])
    assert {tile_of(name) for name in state} == {None, 0, 1, 2}


def test_checkpoints_that_do_not_fit() -> None:
    model, scene = make_model(make_scene(), tiles=3), make_scene()
    with pytest.raises(UserError, match="the checkpoint has 2 tiles, not 3"):
        model.load_state_dict(make_model(scene, tiles=2).state_dict())
    with pytest.raises(UserError, match="capture garden; this is demo"):
        model.load_state_dict(make_model(replace(scene, name="garden", images="other"), tiles=3).state_dict())
    with pytest.raises(UserError, match="holds no tiles"):
        model.load_state_dict({"gauss_params.means": torch.zeros(1, 3)})


@pytest.mark.parametrize(("name", "value"), [("tiles", 0), ("samples_per_ray", 0), ("occupancy_resolution", 0)])
def test_sizes_that_cannot_be_followed(name: str, value: int) -> None:
    with pytest.raises(UserError, match=f"{name.replace('_', '-')} {value}"):
        make_model(make_scene(), **{name: value})
