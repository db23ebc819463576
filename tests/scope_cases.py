"""Random scenes and cameras, and what an exact render of them touches."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from odin_nerfstudio.splat.raster.protocol import PinholeCamera, RasterSettings, Rows
from odin_nerfstudio.splat.raster.reference import ReferenceRasterizer

SETTINGS = RasterSettings(sh_degree=0)


def random_camera(generator: torch.Generator, dtype: torch.dtype = torch.float64) -> PinholeCamera:
    """Anywhere near the scene, also inside it, with an off-centre principal point."""
    rotation, _ = torch.linalg.qr(torch.randn(3, 3, dtype=dtype, generator=generator))
    viewmat = torch.eye(4, dtype=dtype)
    viewmat[:3, :3] = rotation * torch.sign(torch.det(rotation))
    viewmat[:3, 3] = torch.randn(3, dtype=dtype, generator=generator) * 2
    size = 20 + torch.randint(0, 60, (2,), generator=generator)
    focal = size.to(dtype) * (0.3 + 2 * torch.rand(2, dtype=dtype, generator=generator))
    centre = size * (0.2 + 0.6 * torch.rand(2, dtype=dtype, generator=generator))
    K = torch.tensor([[focal[0], 0, centre[0]], [0, focal[1], centre[1]], [0, 0, 1]], dtype=dtype)
    return PinholeCamera(viewmat, K, int(size[0]), int(size[1]))


def random_params(generator: torch.Generator, count: int) -> dict[str, torch.Tensor]:
    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(count, *shape, dtype=torch.float64, generator=generator)

    return {
        "means": draw(3) * 3,
        "scales": draw(3) * 1.5 - 2,
        "quats": draw(4),
        "features_dc": draw(3),
        "features_rest": draw(0, 3),
        "opacities": draw(1),
    }


def touched(params: dict[str, torch.Tensor], camera: PinholeCamera) -> torch.Tensor:
    rows = Rows(ids=torch.arange(len(params["means"])), **params)
    return ReferenceRasterizer().project(rows, camera, SETTINGS).ids


def packed(cameras: Sequence[PinholeCamera]) -> torch.Tensor:
    """(V, 18) float64, as several views are culled at once."""
    numbers = torch.zeros(len(cameras), 18, dtype=torch.float64)
    for row, camera in zip(numbers, cameras, strict=True):
        row[:12] = camera.viewmat[:3].flatten()
        row[12:14], row[14:16] = camera.K.diagonal()[:2], camera.K[:2, 2]
        row[16], row[17] = camera.width, camera.height
    return numbers
