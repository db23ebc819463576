"""The turntable: its cameras circle the scene in nerfstudio's frame."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from odin_nerfstudio.demo.turntable import write_turntable


def test_cameras_stand_where_the_parser_puts_the_same_views(demo_capture: Path, tmp_path: Path) -> None:
    """The path is made from the parser's saved transform alone; the capture's cameras are within their jitter of it."""
    from nerfstudio.cameras.camera_paths import get_path_from_json
    from nerfstudio.data.dataparsers.nerfstudio_dataparser import NerfstudioDataParserConfig

    parser = NerfstudioDataParserConfig(data=demo_capture, eval_mode="all", downscale_factor=1).setup()
    outputs = parser.get_dataparser_outputs()
    outputs.save_dataparser_transform(tmp_path / "dataparser_transforms.json")
    write_turntable(tmp_path / "path.json", tmp_path, width=96, height=72, frames=10)

    path = get_path_from_json(json.loads((tmp_path / "path.json").read_text()))
    views = outputs.cameras.camera_to_worlds.numpy()[:10]  # the rest are close-ups
    cameras = path.camera_to_worlds.numpy()
    apart = np.linalg.norm(cameras[:, :, 3] - views[:, :, 3], axis=1) / outputs.dataparser_scale
    assert apart.max() < 0.6
    assert (cameras[:, :, 2] * views[:, :, 2]).sum(1).min() > np.cos(np.deg2rad(6))
    assert (cameras[:, :, 1] * views[:, :, 1]).sum(1).min() > np.cos(np.deg2rad(6))
    np.testing.assert_allclose(path.fx.numpy(), outputs.cameras.fx.numpy()[:10], rtol=1e-5)
