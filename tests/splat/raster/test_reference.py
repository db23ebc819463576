"""The reference on cases that can be worked out by hand."""

import math

import torch
from torch import Tensor

from odin_nerfstudio.splat.raster.protocol import PinholeCamera, RasterSettings, Rows, Splats
from odin_nerfstudio.splat.raster.reference import ReferenceRasterizer, spherical_harmonics


def _tensor(values: list) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _camera(width: int = 9, height: int = 7) -> PinholeCamera:
    K = _tensor([[20, 0, width / 2], [0, 20, height / 2], [0, 0, 1]])
    return PinholeCamera(torch.eye(4, dtype=torch.float64), K, width, height)


def _row(z: float, opacity: float, color: float, deviation: float = 0.1, number: int = 0) -> Rows:
    """One ball on the optical axis, of one grey for every direction."""
    return Rows(
        ids=torch.tensor([number]),
        means=_tensor([[0, 0, z]]),
        scales=_tensor([[math.log(deviation)] * 3]),
        quats=_tensor([[2, 0, 0, 0]]),
        features_dc=_tensor([[math.log(color / (1 - color))] * 3]),
        features_rest=torch.zeros(1, 0, 3, dtype=torch.float64),
        opacities=_tensor([[math.log(opacity / (1 - opacity))]]),
    )


def _join(*rows: Rows) -> Rows:
    return Rows(*(torch.cat(t) for t in zip(*rows, strict=True)))


def _project(rows: Rows, **settings) -> Splats:
    return ReferenceRasterizer().project(rows, _camera(), RasterSettings(sh_degree=None, **settings))


def test_a_ball_on_the_axis_projects_to_a_disc() -> None:
    splats = _project(_row(2.0, 0.5, 0.3))
    variance = (20 * 0.1 / 2) ** 2 + 0.3
    torch.testing.assert_close(splats.means2d[0], _tensor([4.5, 3.5]))
    torch.testing.assert_close(splats.conics[0], _tensor([1, 0, 1]) / variance)
    assert splats.depths.item() == 2.0
    assert splats.radii.item() == math.ceil(3 * math.sqrt(variance + math.sqrt(0.1)))


def test_antialiasing_dims_by_the_ratio_of_areas() -> None:
    splats = _project(_row(2.0, 0.5, 0.3), mode="antialiased")
    assert math.isclose(splats.opacities.item(), 0.5 * 1.0 / 1.3)


def test_two_balls_blend_front_to_back() -> None:
    splats = _project(_join(_row(4.0, 0.5, 0.9, number=1), _row(2.0, 0.25, 0.2, number=7)))
    image = ReferenceRasterizer().rasterize(splats, 9, 7)
    centre = image.rgb[3, 4, 0].item(), image.alpha[3, 4, 0].item(), image.depth[3, 4, 0].item()
    alpha = 0.25 + 0.75 * 0.5
    expected = (0.25 * 0.2 + 0.75 * 0.5 * 0.9, alpha, (0.25 * 2.0 + 0.75 * 0.5 * 4.0) / alpha)
    assert all(math.isclose(a, b, rel_tol=1e-12) for a, b in zip(centre, expected, strict=True))


def test_equal_depths_are_drawn_by_id() -> None:
    splats = _project(_join(_row(2.0, 0.5, 0.9, number=8), _row(2.0, 0.5, 0.1, number=3)))
    image = ReferenceRasterizer().rasterize(splats, 9, 7)
    assert math.isclose(image.rgb[3, 4, 0].item(), 0.5 * 0.1 + 0.25 * 0.9)


def test_a_pixel_ends_before_the_splat_that_would_close_it() -> None:
    balls = [_row(2.0 + i, 0.95, 0.5, deviation=1.0, number=i) for i in range(6)]
    alpha = ReferenceRasterizer().rasterize(_project(_join(*balls)), 9, 7).alpha[3, 4, 0].item()
    assert math.isclose(alpha, 1 - 0.05**3, rel_tol=1e-9)  # the fourth would leave 6e-6


def test_harmonics_are_orthonormal() -> None:
    # A Fibonacci sphere integrates low degrees nearly exactly.
    n = 20000
    z = 1 - (2 * torch.arange(n, dtype=torch.float64) + 1) / n
    angle = math.pi * (3 - math.sqrt(5)) * torch.arange(n, dtype=torch.float64)
    across = torch.sqrt(1 - z * z)
    basis = spherical_harmonics(torch.stack((across * torch.cos(angle), across * torch.sin(angle), z), dim=-1), 3)
    torch.testing.assert_close(4 * math.pi / n * basis.T @ basis, torch.eye(16, dtype=torch.float64), atol=1e-3, rtol=0)
