"""What a capture says about where to sample: seed points, and how near and far its cameras look."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from odin_nerfstudio.errors import UserError
from odin_nerfstudio.plan.cameras import ViewCameras
from odin_nerfstudio.plan.covisibility import visibility_from_frusta

_CAMERAS, _POINTS = 64, 8192
"""How many of each are looked at, evenly thinned."""
_NEAREST, _FARTHEST = 0.5, 99.5
"""Percentiles of the distances between cameras and the points they see: SfM has outliers."""
_TO_NEAR, _TO_FAR = 0.5, 4.0
"""Rays begin at this share of the nearest distance, and end at this multiple of the farthest."""
_SAME_PLACE = 1e-3
"""How far cameras of the same capture may be apart, as a share of their extent: processors round differently."""


@dataclass(frozen=True)
class Scene:
    """A capture as its cameras see it; all lengths are those of the training cameras' world."""

    name: str
    """Of the capture's folder."""
    images: str
    """Hash of the training images' file names, in order."""
    centres: Tensor
    """(C, 3) float32 positions of up to 64 training cameras."""
    near: float
    """Where rays begin."""
    unit: float
    """The median distance from a camera to what it sees. Densities and distortions count lengths in it."""
    far: float
    """Where rays end."""
    seeds: Tensor
    """(N, 3) float32 points from which tiles are built. Not part of the state."""

    @staticmethod
    def measure(
        name: str, images: Sequence[str | PurePath], cameras: ViewCameras, points: NDArray[np.floating] | None
    ) -> Scene:
        """Looks at a capture.

        Args:
            name: of its folder.
            images: V file names.
            cameras: V training cameras.
            points: (N, 3) SfM points; where there are none, places are taken from the cameras' frusta.
        """
        if points is None or not len(points):
            points = visibility_from_frusta(cameras, "the capture has no points").positions
        points = np.asarray(points, dtype=np.float64)
        chosen = np.unique(np.linspace(0, len(cameras) - 1, min(len(cameras), _CAMERAS)).astype(int))
        distances = _distances(cameras, chosen, points[:: max(len(points) // _POINTS, 1)])
        nearest, median, farthest = np.percentile(distances, [_NEAREST, 50, _FARTHEST]).tolist()
        digest = hashlib.blake2b("\n".join(PurePath(image).name for image in images).encode(), digest_size=8)
        centres = torch.from_numpy(cameras.centres[chosen]).float()
        seeds = torch.from_numpy(points).float()
        return Scene(name, digest.hexdigest(), centres, _TO_NEAR * nearest, median, _TO_FAR * farthest, seeds)

    def state_dict(self) -> dict[str, Any]:
        """All but the seeds, for checkpoints."""
        numbers = {"near": self.near, "unit": self.unit, "far": self.far}
        return {"name": self.name, "images": self.images, "centres": self.centres, **numbers}

    def check_same(self, state: Mapping[str, Any]) -> None:
        """Checks that a checkpoint's scene is this one, wherever the capture lies now.

        Raises:
            UserError: naming both captures, when it is not.
        """
        flags = "Give --data and the flags of the dataparser as in that run."
        if state["images"] != self.images:
            raise UserError(
                f"the checkpoint was trained on other images, those of the capture {state['name']}; "
                f"this is {self.name}. {flags}"
            )
        here, there = self.centres, state["centres"]
        extent = float((here.max(0).values - here.min(0).values).max()) + self.unit
        if here.shape != there.shape or float((here - there).abs().max()) > _SAME_PLACE * extent:
            raise UserError(
                f"the checkpoint was trained with other camera positions of the capture {state['name']}. {flags}"
            )

    def with_state(self, state: Mapping[str, Any]) -> Scene:
        """This scene with the numbers of a checkpoint, to the last bit."""
        return Scene(**{**dict(state), "name": self.name, "seeds": self.seeds})

    def step_length(self, positions: Tensor, samples: int) -> Tensor:
        """How long one interval of the lattice is at positions, for a camera as near as any of :attr:`centres`.

        Args:
            positions: (M, 3), finite or not.
            samples: intervals per ray of a lattice with its knee at :attr:`unit`.

        Returns:
            (M,) length.
        """
        distance = torch.cdist(positions, self.centres.to(positions)).min(dim=1).values
        distance = distance.nan_to_num(nan=self.far, posinf=self.far).clamp(max=self.far)
        # Half the intervals lie before the knee, and beyond it they grow with the square of the distance.
        return 2 * self.unit / samples * (distance / self.unit).clamp_min(1) ** 2


def _distances(cameras: ViewCameras, chosen: NDArray[np.int64], points: NDArray[np.floating]) -> NDArray[np.float64]:
    """Distances > 0 of the chosen cameras to the points in their view; without any, to all points; at least one."""
    seen, all_of_them = [], []
    for view in chosen:
        pose = cameras.camera_to_worlds[view]
        offsets = points - pose[:, 3]
        x, y, z = (offsets @ pose[:, :3]).T * np.array([[1.0], [-1.0], [-1.0]])
        distance = np.linalg.norm(offsets, axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            u = cameras.fx[view] * x / z + cameras.cx[view]
            v = cameras.fy[view] * y / z + cameras.cy[view]
        inside = (z > 0) & (u >= 0) & (u < cameras.width[view]) & (v >= 0) & (v < cameras.height[view])
        seen.append(distance[inside])
        all_of_them.append(distance)
    for candidates in (np.concatenate(seen), np.concatenate(all_of_them)):
        positive = candidates[candidates > 0]
        if len(positive):
            return positive
    return np.ones(1)
