"""Training images as a pinhole rasterizer needs them: undistorted, 8 bit, with cameras to match."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from nerfstudio.cameras.cameras import Cameras, CameraType
from nerfstudio.data.datamanagers.full_images_datamanager import _undistort_image
from nerfstudio.data.dataparsers.base_dataparser import DataparserOutputs
from nerfstudio.data.datasets.base_dataset import InputDataset
from PIL import Image

from odin_nerfstudio.errors import UserError


class UndistortedDataset(InputDataset):
    """A dataset whose images and masks are undistorted when read and whose cameras are pinholes from the start.

    Undistortion is nerfstudio's (``full_images_datamanager``), so the pixels equal splatfacto's; that the cameras are
    final before any image is read is what lets a capture stay on disk.

    Args:
        dataparser_outputs: where the images are and how they were taken.
        scale_factor: applied to images, masks and cameras.

    Raises:
        UserError: an image or mask is missing, of another size than its camera says, or a camera model is not known.
    """

    def __init__(self, dataparser_outputs: DataparserOutputs, scale_factor: float = 1.0) -> None:
        super().__init__(dataparser_outputs, scale_factor)
        self.raw_cameras: Cameras = self.cameras
        self.cameras: Cameras = self._pinhole_cameras()

    def check_files(self) -> None:
        """Opens every image and mask header; decodes nothing.

        Raises:
            UserError: naming the first file that is absent, unreadable or of the wrong size.
        """
        for index, path in enumerate(self.image_filenames):
            expected = self._size_on_disk(index)
            _check_size(path, expected, "its camera has")
            masks = self._dataparser_outputs.mask_filenames
            if masks is not None:
                _check_size(masks[index], expected, f"image {path.name} has")

    def get_numpy_image(self, image_idx: int) -> np.ndarray:
        """(H, W, 3 or 4) uint8 as stored on disk, still distorted; grey, palette and 16-bit images are converted."""
        path = self.image_filenames[image_idx]
        with _decoding(path):
            image: Image.Image = Image.open(path)
            if self.scale_factor != 1.0:
                size = (int(image.width * self.scale_factor), int(image.height * self.scale_factor))
                image = image.resize(size, resample=Image.Resampling.BILINEAR)
            return _to_uint8(image)

    def get_data(self, image_idx: int, image_type: Literal["uint8", "float32"] = "uint8") -> dict[str, Any]:
        """Image ((H, W, C)), mask ((H, W, 1) bool) and whatever metadata nerfstudio adds, undistorted."""
        with _decoding(self.image_filenames[image_idx]):
            data = super().get_data(image_idx, image_type)
        camera = self.raw_cameras[image_idx].reshape(())
        if not _is_distorted(camera):
            return data
        K, distortion = camera.get_intrinsics_matrices().numpy().copy(), camera.distortion_params.numpy()
        _, image, mask = _undistort_image(camera, distortion, data, data["image"].numpy(), K)
        data["image"] = torch.from_numpy(np.ascontiguousarray(image))
        if mask is not None:
            data["mask"] = mask
        return data

    def __getitem__(self, image_idx: int) -> dict[str, Any]:
        return self.get_data(image_idx, image_type="float32")

    def _pinhole_cameras(self) -> Cameras:
        """Cameras after undistortion. One blank image per different camera stands in for the real ones."""
        cameras = self.raw_cameras.to("cpu")
        if cameras.distortion_params is None or not bool((cameras.distortion_params != 0).any()):
            return cameras
        pinhole = deepcopy(cameras)
        known: dict[bytes, tuple[np.ndarray, int, int]] = {}
        for index in range(len(cameras)):
            camera = cameras[index].reshape(())
            if not _is_distorted(camera):
                continue
            K, distortion = camera.get_intrinsics_matrices().numpy(), camera.distortion_params.numpy()
            width, height = int(camera.width), int(camera.height)
            key = b"".join(
                (K.tobytes(), distortion.tobytes(), bytes(f"{width} {height} {camera.camera_type}", "ascii"))
            )
            if key not in known:
                _check_model(camera, distortion, self.image_filenames[index])
                blank = np.zeros((height, width, 3), np.uint8)
                new_K, image, _ = _undistort_image(camera, distortion, {}, blank, K.copy())
                known[key] = (new_K, image.shape[1], image.shape[0])
            new_K, pinhole.width[index], pinhole.height[index] = known[key]
            pinhole.fx[index], pinhole.fy[index] = float(new_K[0, 0]), float(new_K[1, 1])
            pinhole.cx[index], pinhole.cy[index] = float(new_K[0, 2]), float(new_K[1, 2])
        return pinhole

    def _size_on_disk(self, index: int) -> tuple[int, int]:
        camera = self._dataparser_outputs.cameras[index]
        return int(camera.width), int(camera.height)


def _is_distorted(camera: Cameras) -> bool:
    return camera.distortion_params is not None and bool((camera.distortion_params != 0).any())


def _check_model(camera: Cameras, distortion: np.ndarray, path: Path) -> None:
    kind = CameraType(int(camera.camera_type))
    if kind not in (CameraType.PERSPECTIVE, CameraType.FISHEYE, CameraType.FISHEYE624):
        raise UserError(f"{path}: the camera is {kind.name}; splats need perspective or fisheye images. Convert them.")
    if kind == CameraType.PERSPECTIVE and distortion[3] != 0:
        raise UserError(f"{path}: its camera has k4 = {distortion[3]:g}, which cannot be undone. Solve it as OPENCV.")


def _check_size(path: Path, expected: tuple[int, int], owner: str) -> None:
    with _decoding(path), Image.open(path) as image:
        size = image.size
    if size != expected:
        raise UserError(
            f"{path}: is {size[0]}×{size[1]} pixels, but {owner} {expected[0]}×{expected[1]}. "
            "Correct the camera's size, or choose --downscale-factor to match the files."
        )


class _decoding:
    """Turns what PIL raises about ``path`` into a sentence."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, FileNotFoundError):
            raise UserError(f"{self.path}: is listed in the capture but does not exist.") from error
        if isinstance(error, (OSError, SyntaxError, ValueError)):
            raise UserError(
                f"{self.path}: cannot be decoded ({error}). Replace the file or remove its entry."
            ) from error


def _to_uint8(image: Image.Image) -> np.ndarray:
    """(H, W, 3 or 4) uint8 from any mode that PIL reads; 16-bit grey keeps its upper byte."""
    if image.mode.startswith("I"):
        grey = np.clip(np.asarray(image).astype(np.int64) // 257, 0, 255).astype(np.uint8)
        return np.repeat(grey[:, :, None], 3, axis=2)
    if image.mode not in ("RGB", "RGBA"):
        image = image.convert("RGBA" if image.mode in ("LA", "PA") or "transparency" in image.info else "RGB")
    return np.array(image)
