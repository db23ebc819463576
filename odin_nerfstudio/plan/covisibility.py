"""Visibility P_i (design §2): which points each view sees, from the best evidence a capture has.

Best are the SfM tracks; without them the seed points are projected into every camera; without points the cameras'
frusta are sampled on a coarse grid of the world, whose cells then stand for points.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from odin_nerfstudio.plan.cameras import ViewCameras
from odin_nerfstudio.plan.colmap_model import ColmapModel, read_colmap_model

VisibilitySource = Literal["tracks", "points", "frusta"]

MAX_PROJECTIONS = 1_000_000_000
"""Point × view projections that :func:`visibility_from_points` makes at most; beyond, it thins the points evenly."""

FRUSTUM_PIXELS = (9, 7)
"""Rays of a sampled frustum, across and down."""
FRUSTUM_DEPTHS = 12
"""Samples along each ray of a frustum."""
FRUSTUM_CELLS = 6
"""Cells of the grid along the reach of a frustum."""


@dataclass(frozen=True)
class Visibility:
    """What V views see of P points."""

    incidence: sp.csr_array
    """(V, P) bool. A row without an entry is a view of which nothing is known; it couples to no other view."""
    positions: NDArray[np.float64] | None
    """(P, 3) where the points lie, in the world of the cameras; None where tracks could not be brought into it."""
    source: VisibilitySource
    """The evidence used."""
    reason: str
    """One sentence: what was used and, for a fallback, why."""

    def ownership(self, owner: NDArray[np.int64], owners: int) -> NDArray[np.float64]:
        """The share of each view's points that each owner holds.

        Args:
            owner: (P,) owner of every point, in [0, owners).
            owners: G.

        Returns:
            (V, G); rows sum to 1, or to 0 for a view that sees nothing.
        """
        held = sp.csr_array((np.ones(len(owner)), (np.arange(len(owner)), owner)), shape=(len(owner), owners))
        counts = (self.incidence.astype(np.float64) @ held).toarray()
        return counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)


def measure_visibility(
    image_names: Sequence[str | Path],
    cameras: ViewCameras,
    points: NDArray[np.float64] | None,
    colmap_dir: Path | None,
) -> Visibility:
    """Measures who sees what, by tracks if the COLMAP model has them for these views, else by points, else by frusta.

    Args:
        image_names: V names or paths of the views' images.
        cameras: the V views' cameras.
        points: (P, 3) seed points in the world of ``cameras``, if there are any.
        colmap_dir: folder of the COLMAP model, if there is one.

    Raises:
        UserError: the COLMAP model is there but cannot be read.
    """
    if colmap_dir is None:
        why = "there is no COLMAP model"
    else:
        model = read_colmap_model(colmap_dir)
        visibility = visibility_from_tracks(model, image_names, cameras)
        observed = int((np.diff(visibility.incidence.indptr) > 0).sum())
        if 2 * observed >= len(image_names) and observed > 0:
            return visibility
        why = (
            f"the COLMAP model in {colmap_dir} has no tracks"
            if model.tracks.nnz == 0
            else f"the COLMAP model in {colmap_dir} observes only {observed} of the {len(image_names)} views"
        )
    if points is not None and len(points) > 0:
        return visibility_from_points(points, cameras, f"Seed points projected into the cameras, since {why}.")
    return visibility_from_frusta(cameras, f"Frusta sampled on a grid, since {why} and there are no seed points.")


def visibility_from_tracks(
    model: ColmapModel, image_names: Sequence[str | Path], cameras: ViewCameras | None = None
) -> Visibility:
    """The model's tracks, restricted to the given images and in their order.

    Args:
        model: the sparse model.
        image_names: V names or paths; one that the model lacks gets an empty row.
        cameras: the same views' cameras, possibly in another world than the model's (a data parser orients and scales
            it): the points' positions are brought there by the similarity that takes the model's poses to these. None:
            positions stay in the model's world.
    """
    row = match_images(model.names, image_names)
    found = row >= 0
    selection = sp.csr_array(
        (np.ones(found.sum(), dtype=bool), (np.flatnonzero(found), row[found])), shape=(len(row), len(model.names))
    )
    incidence = selection @ model.tracks
    incidence.sort_indices()
    positions = model.points if cameras is None else points_in_world_of(model, image_names, cameras)
    reason = f"COLMAP tracks of {found.sum()} of {len(row)} views."
    return Visibility(incidence, positions, "tracks", reason)


def points_in_world_of(
    model: ColmapModel, image_names: Sequence[str | Path], cameras: ViewCameras
) -> NDArray[np.float64] | None:
    """(P, 3) the model's points where ``cameras`` (of these V images) place the world; None if they do not tell."""
    row = match_images(model.names, image_names)
    found = np.flatnonzero(row >= 0)
    similarity = pose_similarity(model.cameras.camera_to_worlds[row[found]], cameras.camera_to_worlds[found])
    return None if similarity is None else model.points @ similarity[:, :3].T + similarity[:, 3]


def visibility_from_points(points: NDArray[np.float64], cameras: ViewCameras, reason: str) -> Visibility:
    """A view sees the points that project into its image; what hides behind what is not known.

    Args:
        points: (P, 3) in the world of ``cameras``. Many are thinned evenly (:data:`MAX_PROJECTIONS`).
        cameras: V cameras.
        reason: kept in the result.
    """
    stride = -(-len(points) * len(cameras) // MAX_PROJECTIONS)
    points = np.asarray(points, dtype=np.float64)[:: max(stride, 1)]
    fx, fy, cx, cy = cameras.fx, cameras.fy, cameras.cx, cameras.cy
    zero = np.zeros_like(fx)
    # Inward normals of the frustum's left, right, upper and lower side; together they also exclude what lies behind.
    sides = np.array(
        [[fx, zero, -cx], [-fx, zero, cx - cameras.width], [zero, -fy, -cy], [zero, fy, cy - cameras.height]]
    ).transpose(2, 0, 1)

    columns = np.ascontiguousarray(points.T)

    def seen(i: int) -> NDArray[np.int32]:
        pose = cameras.camera_to_worlds[i]
        normals = sides[i] @ pose[:, :3].T
        inside = normals @ columns > (normals @ pose[:, 3])[:, None]
        return np.flatnonzero(inside.all(axis=0)).astype(np.int32)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        incidence = _incidence(list(pool.map(seen, range(len(cameras)))), len(points))
    return Visibility(incidence, points, "points", reason)


def visibility_from_frusta(cameras: ViewCameras, reason: str) -> Visibility:
    """A view sees the cells of a coarse world grid that its frustum reaches into.

    Args:
        cameras: V cameras.
        reason: kept in the result.
    """
    reach = _reach(cameras)
    cell = reach / FRUSTUM_CELLS
    across, down = ((np.arange(count) + 0.5) / count for count in FRUSTUM_PIXELS)
    depths = reach * (np.arange(FRUSTUM_DEPTHS) + 0.5) / FRUSTUM_DEPTHS
    cells = []
    for i, pose in enumerate(cameras.camera_to_worlds):
        x = (across * cameras.width[i] - cameras.cx[i]) / cameras.fx[i]
        y = (down * cameras.height[i] - cameras.cy[i]) / cameras.fy[i]
        x, y = (axis.ravel() for axis in np.meshgrid(x, y))
        rays = np.stack([x, -y, -np.ones_like(x)], axis=1) @ pose[:, :3].T
        samples = pose[:, 3] + (depths[:, None, None] * rays).reshape(-1, 3)
        cells.append(np.unique(np.floor(samples / cell).astype(np.int64), axis=0))
    grid, index = np.unique(np.concatenate(cells), axis=0, return_inverse=True)
    seen = np.split(index.reshape(-1).astype(np.int32), np.cumsum([len(c) for c in cells])[:-1])
    return Visibility(_incidence(seen, len(grid)), (grid + 0.5) * cell, "frusta", reason)


def _incidence(seen: list[NDArray[np.int32]], points: int) -> sp.csr_array:
    indices = np.concatenate(seen)
    index_type = np.int32 if len(indices) <= np.iinfo(np.int32).max else np.int64
    indptr = np.cumsum([0, *map(len, seen)]).astype(index_type)
    return sp.csr_array((np.ones(len(indices), dtype=bool), indices, indptr), shape=(len(seen), points))


def _reach(cameras: ViewCameras) -> float:
    """How far the frusta are followed: to twice the distance of what the cameras look at.

    That is the point nearest to all optical axes. Where these are close to parallel (a survey from above) there is no
    such point, and the reach follows from the distance between neighbours, which see much of the same in any capture.
    """
    centres, directions = cameras.centres, cameras.directions
    across = np.eye(3) - directions[:, :, None] * directions[:, None, :]
    normal = across.mean(axis=0)
    if np.linalg.eigvalsh(normal)[0] > 0.05:
        focus = np.linalg.solve(normal, (across @ centres[:, :, None]).mean(axis=0)[:, 0])
        distance = float(np.median(np.linalg.norm(focus - centres, axis=1)))
    else:
        sample = centres[:: -(-len(centres) // 1000)]
        apart = np.linalg.norm(sample[:, None] - centres[None], axis=2)
        apart[apart == 0] = np.inf
        nearest = apart.min(axis=1)
        distance = 4 * float(np.median(nearest[np.isfinite(nearest)])) if np.isfinite(nearest).any() else 0.0
    return 2 * distance if distance > 0 else 1.0


def match_images(model_names: Sequence[str], image_names: Sequence[str | Path]) -> NDArray[np.int64]:
    """Finds images in a COLMAP model by the longest tail of their path that names one image only.

    A data parser knows ``/data/images_2/left/001.jpg``; the model may call it ``left/001.jpg``, ``images/left/001.jpg``
    or ``001.jpg``. A whole name of the model wins over a part of one.

    Args:
        model_names: the names in the model.
        image_names: V names or paths to find.

    Returns:
        (V,) index into ``model_names``, −1 where none or several fit.
    """
    whole = {PurePosixPath(name).parts: i for i, name in enumerate(model_names)}
    tails: dict[tuple[str, ...], set[int]] = defaultdict(set)
    for parts, i in whole.items():
        for start in range(len(parts)):
            tails[parts[start:]].add(i)

    def find(name: str | Path) -> int:
        parts = PurePosixPath(Path(name).as_posix()).parts
        candidates = [parts[start:] for start in range(len(parts))]
        for tail in candidates:
            if tail in whole:
                return whole[tail]
        for tail in candidates:
            if len(tails.get(tail, ())) == 1:
                return next(iter(tails[tail]))
        return -1

    return np.array([find(name) for name in image_names], dtype=np.int64)


def pose_similarity(source: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64] | None:
    """The similarity that takes one set of camera poses to the same cameras in another world.

    Args:
        source: (N, 3, 4) camera → world.
        target: (N, 3, 4) camera → another world.

    Returns:
        (3, 4) ``[s R | t]``; None if the poses do not determine it (fewer than two places) or do not agree (residual of
        the centres above 5 % of their spread).
    """
    if len(source) < 2:
        return None
    u, _, vt = np.linalg.svd(np.einsum("nij,nkj->ik", target[:, :, :3], source[:, :, :3]))
    rotation = u @ np.diag([1.0, 1.0, np.linalg.det(u @ vt)]) @ vt
    a, b = source[:, :, 3], target[:, :, 3]
    a_centred, b_centred = a - a.mean(axis=0), b - b.mean(axis=0)
    spread = float(np.square(a_centred).sum())
    if spread <= 0:
        return None
    scale = float((b_centred * (a_centred @ rotation.T)).sum()) / spread
    residual = b_centred - scale * a_centred @ rotation.T
    if scale <= 0 or np.square(residual).sum() > 0.05**2 * np.square(b_centred).sum():
        return None
    return np.column_stack([scale * rotation, b.mean(axis=0) - scale * rotation @ a.mean(axis=0)])
