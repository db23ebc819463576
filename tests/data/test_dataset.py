"""Images of every kind, undistortion, and the sentences for those that cannot be used."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from nerfstudio.cameras.cameras import Cameras, CameraType
from nerfstudio.data.dataparsers.base_dataparser import DataparserOutputs
from nerfstudio.data.scene_box import SceneBox
from PIL import Image

from odin_nerfstudio.data.dataset import UndistortedDataset
from odin_nerfstudio.data.loader import ViewLoader
from odin_nerfstudio.errors import UserError

W, H = 40, 30


def make_dataset(
    paths: list[Path],
    masks: list[Path] | None = None,
    distortion: list[float] | None = None,
    sizes: list[tuple[int, int]] | None = None,
    scale_factor: float = 1.0,
) -> UndistortedDataset:
    sizes = sizes or [(W, H)] * len(paths)
    width, height = (torch.tensor([s[i] for s in sizes]) for i in (0, 1))
    cameras = Cameras(
        camera_to_worlds=torch.eye(4)[:3].repeat(len(paths), 1, 1),
        fx=width.float(),
        fy=width.float(),
        cx=width / 2,
        cy=height / 2,
        width=width,
        height=height,
        distortion_params=None if distortion is None else torch.tensor([distortion] * len(paths)),
        camera_type=CameraType.PERSPECTIVE,
    )
    box = SceneBox(torch.tensor([[-1.0, -1, -1], [1, 1, 1]]))
    return UndistortedDataset(DataparserOutputs(paths, cameras, scene_box=box, mask_filenames=masks), scale_factor)


def picture(width: int = W, height: int = H) -> np.ndarray:
    y, x = np.mgrid[:height, :width]
    return np.stack([x * 255 // width, y * 255 // height, (x + y) % 256], axis=-1).astype(np.uint8)


def save(path: Path, array: np.ndarray, mode: str | None = None) -> Path:
    image = Image.fromarray(array)
    (image if mode is None else image.convert(mode)).save(path)
    return path


def test_grey_palette_alpha_and_16_bit(tmp_path: Path) -> None:
    rgb, grey = picture(), picture()[..., 0]
    paths = [
        save(tmp_path / "rgb.png", rgb),
        save(tmp_path / "grey.png", grey),
        save(tmp_path / "deep.png", grey.astype(np.uint16) * 257),
        save(tmp_path / "palette.png", rgb, "P"),
        save(tmp_path / "rgba.png", np.dstack([rgb, grey])),
        save(tmp_path / "la.png", rgb, "LA"),
    ]
    dataset = make_dataset(paths)
    dataset.check_files()
    images = [dataset.get_data(i)["image"] for i in range(len(paths))]
    assert all(image.dtype == torch.uint8 for image in images)
    assert [image.shape[2] for image in images] == [3, 3, 3, 3, 4, 4]
    assert np.array_equal(images[0].numpy(), rgb)
    for image in images[1:3]:  # 16 bits keep their upper byte, so both greys are the same picture
        assert np.array_equal(image.numpy(), np.repeat(grey[..., None], 3, axis=2))


def test_undistorted_cameras_match_undistorted_images(tmp_path: Path) -> None:
    path = save(tmp_path / "a.png", picture())
    dataset = make_dataset([path, path], distortion=[0.12, -0.05, 0, 0, 0.001, -0.002])
    image = dataset.get_data(0)["image"]
    assert tuple(image.shape[:2]) == (int(dataset.cameras.height[0]), int(dataset.cameras.width[0]))
    assert dataset.cameras.fx[0] != dataset.raw_cameras.fx[0]
    assert torch.equal(dataset.cameras.fx[0], dataset.cameras.fx[1])
    assert not np.array_equal(image.numpy(), picture()[: image.shape[0], : image.shape[1]])


def test_images_of_mixed_sizes(tmp_path: Path) -> None:
    paths = [save(tmp_path / "a.png", picture()), save(tmp_path / "b.png", picture(64, 50))]
    dataset = make_dataset(paths, sizes=[(W, H), (64, 50)])
    dataset.check_files()
    assert [tuple(dataset.get_data(i)["image"].shape[:2]) for i in (0, 1)] == [(H, W), (50, 64)]


def test_scaled_images_match_scaled_cameras(tmp_path: Path) -> None:
    dataset = make_dataset([save(tmp_path / "a.png", picture())], scale_factor=0.5)
    dataset.check_files()
    assert tuple(dataset.get_data(0)["image"].shape) == (H // 2, W // 2, 3)
    assert int(dataset.cameras.width[0]) == W // 2


def test_missing_image_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gone\.png: is listed in the capture but does not exist"):
        make_dataset([tmp_path / "gone.png"]).check_files()


def test_truncated_image_is_named(tmp_path: Path) -> None:
    path = tmp_path / "cut.jpg"
    Image.fromarray(picture(400, 300)).save(path, quality=95)
    path.write_bytes(path.read_bytes()[:2000])
    loader = ViewLoader(make_dataset([path], sizes=[(400, 300)]), budget=1 << 20)
    with pytest.raises(UserError, match=r"cut\.jpg: cannot be decoded"):
        loader.fill("reading")


def test_wrong_size_is_named(tmp_path: Path) -> None:
    path = save(tmp_path / "small.png", picture(20, 15))
    with pytest.raises(UserError, match=r"small\.png: is 20×15 pixels, but its camera has 40×30"):
        make_dataset([path]).check_files()


def test_mask_is_read_and_its_size_checked(tmp_path: Path) -> None:
    image = save(tmp_path / "a.png", picture())
    mask = save(tmp_path / "mask.png", (picture()[..., 0] > 100).astype(np.uint8) * 255)
    assert make_dataset([image], [mask]).get_data(0)["mask"].shape == (H, W, 1)
    bad = save(tmp_path / "bad.png", np.zeros((H, W - 1), np.uint8))
    with pytest.raises(UserError, match=r"bad\.png: is 39×30 pixels, but image a\.png has 40×30"):
        make_dataset([image], [bad]).check_files()


@pytest.mark.parametrize("budget_views", [0, 2, 100])
def test_loader_stays_within_its_budget(tmp_path: Path, budget_views: int) -> None:
    paths = [save(tmp_path / f"{i}.png", np.full((H, W, 3), i, np.uint8)) for i in range(6)]
    size = H * W * 3
    loader = ViewLoader(make_dataset(paths), budget=budget_views * size)
    for index in (3, 1, 5, 0, 2, 4, 3, 1):
        loader.prefetch([index, (index + 1) % 6])
        assert int(loader.get(index)["image"][0, 0, 0]) == index
    assert loader._kept_bytes <= budget_views * size
    assert len(loader._kept) == min(budget_views, 6)


def test_loader_hands_out_copies(tmp_path: Path) -> None:
    loader = ViewLoader(make_dataset([save(tmp_path / "a.png", picture())]), budget=1 << 20)
    loader.get(0)["extra"] = 1
    assert "extra" not in loader.get(0)
