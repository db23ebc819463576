"""A synthetic city from the air: as many primitives as wanted, views straight down, and images to train on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from odin_nerfstudio.draws import keyed_generator
from odin_nerfstudio.plan.cameras import ViewCameras
from odin_nerfstudio.plan.capture import Capture

TALLEST = 30.0
"""Largest z of a primitive; most are far below."""
ALTITUDE = 200.0
"""z of all cameras."""
MARGIN = 100.0
"""Between the sides of the square and the cameras."""
FOCAL = 1400 / 1600
"""Focal length ÷ width of an image."""
HELD_OUT = 16
"""Views beyond those that are trained on."""
PATCHES = 128
"""Patches of one colour along a side of the ground that the images show, before interpolation."""
SAMPLED_POINTS = 200_000
"""Positions, evenly thinned, that the plan is made from."""


@dataclass(frozen=True)
class City:
    """A scene that every rank can make again from these numbers, on devices of one kind."""

    num_primitives: int
    """N."""
    num_views: int
    """V, views to train on."""
    width: int
    """Of an image, pixels."""
    height: int
    """Of an image, pixels."""
    seed: int
    """Of all draws."""
    side: float = 1000.0
    """Of the square that the primitives lie in, world units."""

    @property
    def focal(self) -> float:
        """Focal length, pixels: whatever the size of an image, it shows as much of the ground across."""
        return FOCAL * self.width

    def primitives(self, device: torch.device) -> dict[str, Tensor]:
        """The parameters of splatfacto by name, (N, ...) each, before activation; SH coefficients of degree 3."""
        count, generator = self.num_primitives, keyed_generator(self.seed, "primitives", device=device)
        draw: dict[str, Any] = {"generator": generator, "device": device}
        ground = torch.rand(count, 2, **draw) * self.side
        heights = torch.rand(count, 1, **draw) ** 3 * TALLEST
        spacing = self.side / math.sqrt(count)
        return {
            "means": torch.cat([ground, heights], dim=1),
            "scales": torch.log(spacing * (0.5 + torch.rand(count, 3, **draw))),
            "quats": torch.randn(count, 4, **draw),
            "features_dc": torch.randn(count, 3, **draw) * 0.2,
            "features_rest": torch.randn(count, 15, 3, **draw).mul_(0.2),
            "opacities": torch.zeros(count, 1, device=device),
        }

    def centres(self) -> Tensor:
        """(V + HELD_OUT, 3) camera positions, those of held-out views last."""
        generator = keyed_generator(self.seed, "cameras")
        ground = torch.rand(self.num_views + HELD_OUT, 2, generator=generator) * (self.side - 2 * MARGIN) + MARGIN
        return torch.nn.functional.pad(ground, (0, 1), value=ALTITUDE)

    def camera_to_worlds(self) -> Tensor:
        """(V + HELD_OUT, 3, 4) in nerfstudio's axes: x right, y up, z backward. The cameras look straight down."""
        centres = self.centres()
        return torch.cat([torch.eye(3).expand(len(centres), 3, 3), centres[:, :, None]], dim=2)

    def viewmats(self) -> Tensor:
        """(V + HELD_OUT, 4, 4) world → camera, OpenCV axes."""
        axes = torch.tensor([1.0, -1.0, -1.0])
        viewmats = torch.diag(torch.cat([axes, torch.ones(1)])).repeat(self.num_views + HELD_OUT, 1, 1)
        viewmats[:, :3, 3] = -axes * self.centres()
        return viewmats

    def K(self) -> Tensor:
        """(3, 3) intrinsics, pixels."""
        return torch.tensor([[self.focal, 0, self.width / 2], [0, self.focal, self.height / 2], [0, 0, 1]])

    def capture(self, points: NDArray[np.float64]) -> Capture:
        """The views to train on as the plan takes them.

        Args:
            points: (P, 3) positions of some primitives.
        """
        views = self.num_views
        cameras = ViewCameras(
            camera_to_worlds=self.camera_to_worlds()[:views].double().numpy(),
            fx=np.full(views, self.focal),
            fy=np.full(views, self.focal),
            cx=np.full(views, self.width / 2),
            cy=np.full(views, self.height / 2),
            width=np.full(views, self.width),
            height=np.full(views, self.height),
        )
        return Capture("city", [f"{view:04d}" for view in range(views)], cameras, points, colmap_dir=None)


class Ground:
    """What the images show: patches of random colours on the ground. An image is a window of one large picture.

    Args:
        city: whose views these are.
        device: where the picture lies.
    """

    def __init__(self, city: City, device: torch.device) -> None:
        pixel = ALTITUDE / city.focal
        side = math.ceil((city.side - 2 * MARGIN) / pixel) + max(city.width, city.height) + 1
        generator = keyed_generator(city.seed, "ground", device=device)
        patches = torch.rand(1, 3, PATCHES, PATCHES, generator=generator, device=device)
        picture = torch.nn.functional.interpolate(patches, size=(side, side), mode="bilinear")[0]
        self._picture = picture.permute(1, 2, 0).contiguous()
        centres = city.centres()
        corners = torch.stack([city.side - MARGIN - centres[:, 1], centres[:, 0] - MARGIN], dim=1) / pixel
        self._corners: list[list[int]] = corners.round().long().tolist()
        self._size = city.height, city.width

    def image(self, view: int) -> Tensor:
        """(height, width, 3) in [0, 1], float32; not a copy."""
        (top, left), (height, width) = self._corners[view], self._size
        return self._picture[top : top + height, left : left + width]
