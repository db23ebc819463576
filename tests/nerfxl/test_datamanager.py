"""Rays: the same for everyone, through the pixels whose colours come with them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from nerfstudio.data.dataparsers.nerfstudio_dataparser import NerfstudioDataParserConfig
from PIL import Image
from xl_runs import make_config

from odin_nerfstudio.errors import UserError
from odin_nerfstudio.nerfxl.datamanager import NerfXLDataManager, NerfXLDataManagerConfig
from odin_nerfstudio.nerfxl.pixels import KeyedPixelSampler, PixelStore


def make(capture: Path, json_parser: bool = False) -> NerfXLDataManager:
    config = make_config(capture, capture).pipeline.datamanager
    if json_parser:
        config.dataparser = NerfstudioDataParserConfig(load_3D_points=True, downscale_factor=1)
    return config.setup(device="cpu")


def test_everyone_draws_the_same_rays(demo_capture: Path) -> None:
    one, two = make(demo_capture), make(demo_capture)
    two.next_train(3)  # not drawn from a common stream
    (rays, batch), (same, same_batch) = one.next_train(5), two.next_train(5)
    assert torch.equal(rays.directions, same.directions)
    assert torch.equal(batch["image"], same_batch["image"])
    assert not torch.equal(one.next_train(6)[1]["indices"], batch["indices"])
    one.seed = 1
    assert not torch.equal(one.next_train(5)[1]["indices"], batch["indices"])


def test_a_step_asked_for_again_gives_other_rays(demo_capture: Path) -> None:
    """As nerfstudio's exporters do, after they have set the number of rays."""
    manager = make(demo_capture)
    manager.train_pixel_sampler.num_rays_per_batch = 10
    first, again = (manager.next_train(0)[1]["indices"] for _ in range(2))
    assert first.shape == (10, 3)
    assert not torch.equal(first, again)


def test_rays_go_through_their_pixels(demo_capture: Path) -> None:
    manager = make(demo_capture)
    rays, batch = manager.next_train(0)
    cameras = manager.train_dataset.cameras
    for ray, (image, row, column), colour in zip(rays.directions, batch["indices"], batch["image"], strict=True):
        local = cameras.camera_to_worlds[image, :, :3].T @ ray
        x = cameras.fx[image] * local[0] / -local[2] + cameras.cx[image]
        y = cameras.fy[image] * local[1] / local[2] + cameras.cy[image]
        torch.testing.assert_close(torch.cat([x, y]), torch.stack([column, row]) + 0.5, atol=1e-2, rtol=0)
        torch.testing.assert_close(colour, manager.train_dataset[int(image)]["image"][row, column])


def test_images_are_undistorted_once(demo_capture: Path) -> None:
    cameras = make(demo_capture).train_dataset.cameras
    assert cameras.distortion_params is None


@pytest.mark.parametrize("with_points", [True, False])
def test_transforms_json(demo_capture: Path, tmp_path: Path, with_points: bool) -> None:
    """Seeds come from the COLMAP model beside it; without one, from the frusta."""
    capture = tmp_path / "capture"
    shutil.copytree(demo_capture, capture, ignore=None if with_points else shutil.ignore_patterns("sparse"))
    scene = make(capture, json_parser=True).train_dataset.metadata["scene"]
    assert scene.name == "capture"
    assert len(scene.seeds) > 100
    assert 0 < scene.near < scene.unit < scene.far


def test_masked_pixels_are_never_drawn(demo_capture: Path, tmp_path: Path) -> None:
    capture = tmp_path / "capture"
    shutil.copytree(demo_capture, capture)
    mask = np.zeros((72, 96), np.uint8)
    mask[10:20, 30:40] = 255
    Image.fromarray(mask).save(capture / "mask.png")
    file = capture / "transforms.json"
    meta = json.loads(file.read_text())
    for frame in meta["frames"]:
        frame["mask_path"] = "mask.png"
    file.write_text(json.dumps(meta))
    indices = make(capture, json_parser=True).next_train(0)[1]["indices"]
    assert ((indices[:, 1] >= 10) & (indices[:, 1] < 20) & (indices[:, 2] >= 30) & (indices[:, 2] < 40)).all()


def test_images_of_different_sizes_and_channels() -> None:
    class Images:
        def __len__(self) -> int:
            return 2

        def get_data(self, index: int, kind: str) -> dict[str, torch.Tensor]:
            return {"image": torch.full(((2, 3, 3), (4, 5, 4))[index], index + 1, dtype=torch.uint8)}

    store = PixelStore.read(Images(), torch.device("cpu"), "")  # type: ignore[arg-type]
    assert store.count == 26
    indices, values = store.take(torch.tensor([0, 5, 6, 25]))
    assert indices.tolist() == [[0, 0, 0], [0, 1, 2], [1, 0, 0], [1, 3, 4]]
    assert values.tolist() == [[1, 1, 1, 255]] * 2 + [[2, 2, 2, 2]] * 2
    draws = KeyedPixelSampler(1000, "rays").sample(0, 0, store.count)
    assert set(draws.tolist()) == set(range(26))


def test_evaluation_images_come_whole(demo_capture: Path) -> None:
    manager = make(demo_capture)
    views = list(manager.fixed_indices_eval_dataloader)
    assert len(views) == len(manager.fixed_indices_eval_dataloader) == len(manager.eval_dataset)
    camera, batch = manager.next_eval_image(4)
    assert camera.shape == (1,)
    assert batch["image"].shape[:2] == (72, 96)
    assert len(manager.next_eval(0)[0]) == manager.config.eval_num_rays_per_batch


def test_bad_captures_get_sentences(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        NerfXLDataManagerConfig(data=tmp_path / "nowhere").setup(device="cpu")
