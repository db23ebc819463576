"""Reading a capture through nerfstudio's data parsers: what they cannot do, and sentences for what is wrong with it."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.data.dataparsers.base_dataparser import DataparserOutputs
from nerfstudio.data.dataparsers.colmap_dataparser import ColmapDataParserConfig
from nerfstudio.data.dataparsers.nerfstudio_dataparser import NerfstudioDataParserConfig
from nerfstudio.utils.rich_utils import CONSOLE

from odin_nerfstudio.errors import UserError
from odin_nerfstudio.plan.cameras import ViewCameras
from odin_nerfstudio.plan.capture import find_colmap_model, read_capture
from odin_nerfstudio.plan.colmap_model import holds_points, read_colmap_model
from odin_nerfstudio.plan.covisibility import points_in_world_of


def plan_cameras(cameras: Cameras) -> ViewCameras:
    """nerfstudio's cameras as the plan takes them."""

    def column(name: str) -> np.ndarray:
        return getattr(cameras, name).reshape(-1).cpu().numpy()

    intrinsics = {name: column(name) for name in ("fx", "fy", "cx", "cy", "width", "height")}
    return ViewCameras(cameras.camera_to_worlds.cpu().numpy().astype(np.float64), **intrinsics)


def check_folder(data: Path) -> None:
    """Checks that there is anything.

    Raises:
        UserError: naming ``--data``.
    """
    if not data.exists():
        raise UserError(f"--data {data}: does not exist.")
    if data.is_dir() and not any(data.iterdir()):
        raise UserError(f"--data {data}: is empty.")


def leave_points_to_us(data: Path, dataparser: Any) -> bool:
    """Keeps nerfstudio's parsers from what they cannot do with points; True where the COLMAP model has to give them.

    The COLMAP parser fails on a model without points. The nerfstudio parser, where transforms.json names no point
    cloud, asks on the terminal whether to rewrite the capture, or starts from random primitives.
    """
    if isinstance(dataparser, ColmapDataParserConfig) and dataparser.load_3D_points:
        dataparser.load_3D_points = holds_points(data / dataparser.colmap_path)
        if not dataparser.load_3D_points:
            CONSOLE.log(f"The COLMAP model in {data / dataparser.colmap_path} holds no points.")
    elif isinstance(dataparser, NerfstudioDataParserConfig) and dataparser.load_3D_points:
        file = data if data.suffix == ".json" else data / "transforms.json"
        if file.is_file() and b'"ply_file_path"' not in file.read_bytes():
            dataparser.load_3D_points = False
            return True
    return False


class parsing:
    """Turns what a data parser raises about ``data``, or a pose that is none, into a sentence.

    The parsers know the trouble but seldom the file. Ours, which checks as it reads, is asked first.
    """

    def __init__(self, data: Path, dataparser: Any) -> None:
        self._data = data
        self._colmap = getattr(dataparser, "colmap_path", None)
        self._parser = type(dataparser).__name__.removesuffix("Config")

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        mistakes = (AssertionError, ArithmeticError, EOFError, LookupError, OSError, RuntimeError, ValueError)
        if not isinstance(error, (*mistakes, struct.error, UserError)):
            return
        if self._colmap is not None and not (self._data / self._colmap).is_dir():
            found = find_colmap_model(self._data)
            hint = f" There is one in {found}: --colmap-path {found.relative_to(self._data)}" if found else ""
            raise UserError(f"{self._data / self._colmap}: there is no COLMAP model.{hint}") from error
        if self._colmap is not None:
            read_colmap_model(self._data / self._colmap)
        else:
            read_capture(self._data)
        if not isinstance(error, UserError):
            detail = f"missing entry {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__
            raise UserError(f"{self._data}: {self._parser} cannot read this capture: {detail}") from error


def colmap_model_of(data: Path, dataparser: Any) -> Path | None:
    """The COLMAP model of a capture: the one the data parser reads, else where captures keep it."""
    chosen = getattr(dataparser, "colmap_path", None)
    if chosen is not None:
        return data / chosen
    return find_colmap_model(data if data.is_dir() else data.parent)


def seed_points_of(folder: Path, outputs: DataparserOutputs, cameras: Cameras) -> dict[str, torch.Tensor]:
    """A COLMAP model's points as a data parser would give those of a point cloud; empty where the model has none.

    Args:
        folder: of the model.
        outputs: of the data parser, whose images have the names that the model knows.
        cameras: of these images.
    """
    model = read_colmap_model(folder)
    points = points_in_world_of(model, outputs.image_filenames, plan_cameras(cameras))
    if points is None or not len(points):
        return {}
    CONSOLE.log(f"{len(points)} seed points from the COLMAP model in {folder}.")
    return {"points3D_xyz": torch.from_numpy(points).float(), "points3D_rgb": torch.from_numpy(model.colors)}
