from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from odin_nerfstudio.errors import UserError
from odin_nerfstudio.plan.ply import read_ply_positions

plyfile = pytest.importorskip("plyfile")


@pytest.mark.parametrize("layout", [{"text": True}, {"byte_order": "<"}, {"byte_order": ">"}])
@pytest.mark.parametrize("scalar", ["f4", "f8"])
def test_reads_what_plyfile_wrote(tmp_path: Path, layout: dict, scalar: str) -> None:
    points = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
    vertices = np.zeros(20, dtype=[("red", "u1"), ("x", scalar), ("y", scalar), ("z", scalar), ("nx", "f4")])
    vertices["x"], vertices["y"], vertices["z"] = points.T
    plyfile.PlyData([plyfile.PlyElement.describe(vertices, "vertex")], **layout).write(str(tmp_path / "cloud.ply"))
    np.testing.assert_allclose(read_ply_positions(tmp_path / "cloud.ply"), points, rtol=1e-6)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not a ply",
        b"ply\nformat ascii 1.0\nelement vertex 2\nproperty float x\nproperty float y\nproperty float z\n"
        b"end_header\n0 0 0\n",
        b"ply\nformat binary_little_endian 1.0\nelement vertex 1\nproperty float x\nend_header\n0000",
        b"ply\nformat binary_little_endian 1.0\nelement vertex 2\nproperty float x\nproperty float y\n"
        b"property float z\nend_header\n0000",
    ],
)
def test_names_the_file_that_is_no_point_cloud(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "cloud.ply").write_bytes(content)
    with pytest.raises(UserError, match=r"cloud\.ply"):
        read_ply_positions(tmp_path / "cloud.ply")
