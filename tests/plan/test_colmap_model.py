from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from odin_nerfstudio.errors import UserError
from odin_nerfstudio.plan.colmap_model import ColmapModel, read_colmap_model

pycolmap = pytest.importorskip("pycolmap")


def assert_same_as_pycolmap(model: ColmapModel, reference) -> None:
    images = [reference.images[i] for i in sorted(reference.images)]
    assert model.names == [image.name for image in images]
    for i, image in enumerate(images):
        world_to_camera = np.vstack([image.cam_from_world().matrix(), [0, 0, 0, 1]])
        expected = np.linalg.inv(world_to_camera)[:3] * [1, -1, -1, 1]
        np.testing.assert_allclose(model.cameras.camera_to_worlds[i], expected, atol=1e-9)
        camera = image.camera
        ours = [getattr(model.cameras, name)[i] for name in ("fx", "fy", "cx", "cy", "width", "height")]
        theirs = [camera.focal_length_x, camera.focal_length_y, camera.principal_point_x, camera.principal_point_y]
        np.testing.assert_allclose(ours, [*theirs, camera.width, camera.height])
    np.testing.assert_array_equal(
        model.points[np.lexsort(model.points.T)],
        (xyz := np.array([point.xyz for point in reference.points3D.values()]).reshape(-1, 3))[np.lexsort(xyz.T)],
    )
    for i, image in enumerate(images):
        seen = {tuple(model.points[p]) for p in model.tracks[[i]].indices}
        assert seen == {tuple(reference.points3D[p.point3D_id].xyz) for p in image.points2D if p.has_point3D()}


@pytest.mark.parametrize("kind", ["binary", "text"])
def test_reads_what_pycolmap_wrote(tmp_path: Path, write_model, kind: str) -> None:
    reference = pycolmap.Reconstruction(str(write_model(tmp_path / "binary")))
    if kind == "text":
        (tmp_path / "text").mkdir()
        reference.write_text(str(tmp_path / "text"))
        reference = pycolmap.Reconstruction(str(tmp_path / "text"))
    assert_same_as_pycolmap(read_colmap_model(tmp_path / kind), reference)


@pytest.mark.parametrize("name", ["fox", "alexander"])
def test_reads_real_models(shared_data, name: str) -> None:
    folder = shared_data(name) / "sparse/0"
    assert_same_as_pycolmap(read_colmap_model(folder), pycolmap.Reconstruction(str(folder)))


@pytest.mark.parametrize("part", ["cameras", "images", "points3D"])
@pytest.mark.parametrize("share", [0.0, 0.03, 0.5, 0.99])
def test_names_the_file_that_is_cut_off(tmp_path: Path, write_model, part: str, share: float) -> None:
    file = write_model(tmp_path) / f"{part}.bin"
    data = file.read_bytes()
    file.write_bytes(data[: int(share * len(data))])
    with pytest.raises(UserError, match=rf"{part}\.bin.*cut off"):
        read_colmap_model(tmp_path)


@pytest.mark.parametrize("part", ["cameras", "images", "points3D"])
def test_names_the_line_that_is_malformed(tmp_path: Path, write_model, part: str) -> None:
    pycolmap.Reconstruction(str(write_model(tmp_path / "binary"))).write_text(str(tmp_path))
    file = tmp_path / f"{part}.txt"
    lines = file.read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if not line.startswith("#"))
    lines[first] = lines[first][:3]
    file.write_text("\n".join(lines))
    with pytest.raises(UserError, match=rf"{part}\.txt: line {first + 1} is malformed"):
        read_colmap_model(tmp_path)


@pytest.mark.parametrize("part", ["cameras", "images", "points3D"])
def test_names_the_file_that_is_missing(tmp_path: Path, write_model, part: str) -> None:
    (write_model(tmp_path) / f"{part}.bin").unlink()
    with pytest.raises(UserError, match=rf"{part}\..*missing"):
        read_colmap_model(tmp_path)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_refuses_a_pose_that_is_not_finite(tmp_path: Path, write_model, value: float) -> None:
    file = write_model(tmp_path) / "images.bin"
    data = bytearray(file.read_bytes())
    data[12 + 32 : 12 + 40] = np.array([value]).tobytes()  # the first image's t_x
    file.write_bytes(data)
    with pytest.raises(UserError, match=r"images\.bin: the pose of ring/\d+\.jpg holds NaN or infinity"):
        read_colmap_model(tmp_path)
