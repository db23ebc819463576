"""``python -m odin_nerfstudio.demo.capture DIR``: images, COLMAP model and transforms.json of the demo scene.

    DIR/images/0001.png …         what the cameras see
    DIR/sparse/0/*.bin            COLMAP model: one PINHOLE camera, exact poses, points with tracks
    DIR/transforms.json           the same in nerfstudio's format, as ns-process-data writes it
    DIR/sparse_pc.ply             its points
    DIR/capture.json              the flags it was made with

The same flags give the same capture, so a DIR that already holds it is left as it is.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from PIL import Image
from rich.progress import Progress

from odin_nerfstudio import __version__
from odin_nerfstudio.demo.camera import Camera, walk
from odin_nerfstudio.demo.raytrace import Tracer
from odin_nerfstudio.demo.scene import temple_court
from odin_nerfstudio.demo.tracks import Tracks, find_tracks
from odin_nerfstudio.errors import UserError, exit_with_sentence

SCENE_TO_COLMAP = np.array([[1.0, 0, 0], [0, 0, -1], [0, 1, 0]])
"""Rotation from the scene's frame (z up) to COLMAP's habit (y down); nerfstudio's ``applied_transform`` undoes it."""


def write_capture(
    directory: Annotated[Path, tyro.conf.arg(metavar="DIR"), tyro.conf.Positional],
    views: int = 48,
    width: int = 288,
    height: int = 216,
    seed: int = 0,
) -> None:
    """Writes a capture of the demo scene.

    Args:
        directory: Folder to make. One that holds the capture of the same flags is left alone.
        views: Number of images; a sixth of them are close-ups.
        width: Image width in pixels.
        height: Image height in pixels.
        seed: Of the camera positions, the textures and the points.

    Raises:
        UserError: DIR is a file or holds something else, or a number is too small.
    """
    for name, value, least in (("views", views, 3), ("width", width, 16), ("height", height, 16), ("seed", seed, 0)):
        if value < least:
            raise UserError(f"--{name} {value} is too small; the least is {least}")
    flags = {"version": __version__, "views": views, "width": width, "height": height, "seed": seed}
    if _holds(directory, flags):
        print(f"{directory} already holds this capture")
        return

    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}-", dir=directory.parent) as scratch:
        unfinished = Path(scratch) / "capture"
        (unfinished / "images").mkdir(parents=True)
        cameras = walk(views, width, height, seed)
        names = [f"{i + 1:04d}.png" for i in range(views)]
        _write_images(cameras, [unfinished / "images" / name for name in names], seed)
        tracks = find_tracks(Tracer(temple_court(), seed), cameras, seed)
        write_colmap(unfinished / "sparse" / "0", cameras, names, tracks)
        _write_transforms(unfinished)
        (unfinished / "capture.json").write_text(json.dumps(flags) + "\n")
        os.replace(unfinished, directory)
    length = len(tracks.point) / len(tracks.points)
    print(f"{directory}: {views} images of {width}×{height}, {len(tracks.points)} points, mean track {length:.1f}")


def write_colmap(directory: Path, cameras: Sequence[Camera], names: Sequence[str], tracks: Tracks) -> None:
    """Writes cameras, poses, 2D points and tracks as a COLMAP model in binary form; image i has id i + 1."""
    import pycolmap

    model, camera = pycolmap.Reconstruction(), cameras[0]
    intrinsics = [camera.focal, camera.focal, camera.width / 2, camera.height / 2]
    model.add_camera_with_trivial_rig(
        pycolmap.Camera(camera_id=1, model="PINHOLE", width=camera.width, height=camera.height, params=intrinsics)
    )
    place = np.zeros(len(tracks.point), int)
    """Of each observation, its index among the 2D points of its image."""
    for index, (camera, name) in enumerate(zip(cameras, names, strict=True)):
        rotation = (SCENE_TO_COLMAP @ camera.axes).T
        pose = pycolmap.Rigid3d(pycolmap.Rotation3d(rotation), -camera.axes.T @ camera.position)
        mine = np.flatnonzero(tracks.view == index)
        place[mine] = np.arange(len(mine))
        image = pycolmap.Image(name=name, keypoints=tracks.pixels[mine], camera_id=1, image_id=index + 1)
        model.add_image_with_trivial_frame(image, pose)
    ends = np.cumsum(np.bincount(tracks.point))
    for point, (colour, end, length) in enumerate(zip(tracks.colours, ends, np.diff(ends, prepend=0), strict=True)):
        sightings = range(end - length, end)
        track = pycolmap.Track([pycolmap.TrackElement(tracks.view[i] + 1, place[i]) for i in sightings])
        model.add_point3D(SCENE_TO_COLMAP @ tracks.points[point], track, colour)
    model.update_point_3d_errors()
    directory.mkdir(parents=True)
    model.write_binary(str(directory))


def _write_transforms(capture: Path) -> None:
    """transforms.json and sparse_pc.ply, by the function that ns-process-data calls."""
    from nerfstudio.process_data.colmap_utils import colmap_to_json

    colmap_to_json(recon_dir=capture / "sparse" / "0", output_dir=capture)


def _holds(directory: Path, flags: dict[str, object]) -> bool:
    """Whether ``directory`` is the capture of these flags; False where it is absent or empty.

    Raises:
        UserError: there is something else.
    """
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return False
    try:
        if json.loads((directory / "capture.json").read_text()) == flags:
            return True
    except (OSError, ValueError):
        pass  # not a capture of ours
    raise UserError(f"{directory} exists and is not the capture of these flags; remove it or name another folder")


def _write_images(cameras: Sequence[Camera], files: Sequence[Path], seed: int) -> None:
    """Ray-traces the images, one process a core, with a progress bar."""
    workers = min(len(cameras), os.cpu_count() or 1)
    context = multiprocessing.get_context("spawn")  # a fork would copy the caller's threads' locks
    with (
        Progress() as progress,
        ProcessPoolExecutor(workers, context, _prepare_worker, (seed,)) as pool,
    ):
        for _ in progress.track(pool.map(_write_image, cameras, files), len(cameras), description="Ray tracing images"):
            pass


_tracer: Tracer
"""Of a worker process."""


def _prepare_worker(seed: int) -> None:
    global _tracer
    _tracer = Tracer(temple_court(), seed)


def _write_image(camera: Camera, file: Path) -> None:
    Image.fromarray(_tracer.image(camera)).save(file)


if __name__ == "__main__":
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # for the workers: each has one core
    with exit_with_sentence():
        tyro.cli(write_capture, prog="python -m odin_nerfstudio.demo.capture", description=__doc__)
