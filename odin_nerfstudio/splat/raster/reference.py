"""The renderer in plain torch, in any float type, slow and short: what the fast backends are compared to.

In float64 it is the oracle of the tests. Memory is splats × pixels, so it is for tiny scenes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from odin_nerfstudio.splat.raster.protocol import Image, PinholeCamera, RasterSettings, Rows, Splats

TILE = 16


def rotation_matrices(quats: Tensor) -> Tensor:
    """(N, 4) quaternions w, x, y, z of any length → (N, 3, 3)."""
    w, x, y, z = torch.nn.functional.normalize(quats, dim=-1).unbind(-1)
    entries = (
        1 - 2 * (y * y + z * z),
        2 * (x * y - w * z),
        2 * (x * z + w * y),
        2 * (x * y + w * z),
        1 - 2 * (x * x + z * z),
        2 * (y * z - w * x),
        2 * (x * z - w * y),
        2 * (y * z + w * x),
        1 - 2 * (x * x + y * y),
    )
    return torch.stack(entries, dim=-1).reshape(-1, 3, 3)


def projected_covariances(covariances: Tensor, positions: Tensor, K: Tensor, width: int, height: int) -> Tensor:
    """EWA (Zwicker et al. 2001, eq. 29 ff.): J Σ Jᵀ, with J the Jacobian of the perspective division.

    J is taken at a point that lies at most 15 % of the image size outside the image.

    Args:
        covariances: (N, 3, 3) in camera axes.
        positions: (N, 3) in camera axes.
        K: (3, 3) intrinsics.
        width, height: image size.

    Returns:
        (N, 2, 2) pixels².
    """
    z = positions[:, 2]
    focal, centre = K.diagonal()[:2], K[:2, 2]
    size = torch.tensor([width, height], dtype=K.dtype)
    low, high = -(centre + 0.15 * size) / focal, (size - centre + 0.15 * size) / focal
    slopes = torch.minimum(torch.maximum(positions[:, :2] / z[:, None], low), high)
    zero = torch.zeros_like(z)
    jacobian = torch.stack(
        (
            torch.stack((focal[0] / z, zero, -focal[0] * slopes[:, 0] / z), dim=-1),
            torch.stack((zero, focal[1] / z, -focal[1] * slopes[:, 1] / z), dim=-1),
        ),
        dim=-2,
    )
    return jacobian @ covariances @ jacobian.mT


def spherical_harmonics(directions: Tensor, degree: int) -> Tensor:
    """Real basis functions, gsplat's order and signs: (N, 3) unit vectors → (N, (degree + 1)²)."""
    x, y, z = directions.unbind(-1)
    basis = [torch.full_like(x, 0.28209479177387814)]
    if degree >= 1:
        basis += [-0.4886025119029199 * y, 0.4886025119029199 * z, -0.4886025119029199 * x]
    if degree >= 2:
        basis += [
            1.0925484305920792 * x * y,
            -1.0925484305920792 * y * z,
            0.31539156525252005 * (3 * z * z - 1),
            -1.0925484305920792 * x * z,
            0.5462742152960396 * (x * x - y * y),
        ]
    if degree >= 3:
        basis += [
            -0.5900435899266435 * y * (3 * x * x - y * y),
            2.890611442640554 * x * y * z,
            -0.4570457994644658 * y * (5 * z * z - 1),
            0.3731763325901154 * z * (5 * z * z - 3),
            -0.4570457994644658 * x * (5 * z * z - 1),
            1.4453057213202769 * z * (x * x - y * y),
            -0.5900435899266435 * x * (x * x - 3 * y * y),
        ]
    return torch.stack(basis, dim=-1)


def _colors(rows: Rows, viewmat: Tensor, degree: int | None) -> Tensor:
    """(N, 3) RGB of each row as the camera sees it."""
    if degree is None:
        return torch.sigmoid(rows.features_dc)
    centre = -torch.linalg.inv(viewmat[:3, :3]) @ viewmat[:3, 3]
    basis = spherical_harmonics(torch.nn.functional.normalize(rows.means - centre, dim=-1), degree)
    coefficients = torch.cat((rows.features_dc[:, None], rows.features_rest), dim=1)[:, : basis.shape[1]]
    return (0.5 + (basis[..., None] * coefficients).sum(dim=1)).clamp(min=0)


def _touched(splats: Splats, width: int, height: int) -> Tensor:
    """(M, H, W) whether the pixel lies in a 16×16 tile that the splat's square of side 2·radius touches."""
    radii = splats.radii[:, None].to(splats.means2d)
    first = torch.floor((splats.means2d - radii) / TILE)
    end = torch.ceil((splats.means2d + radii) / TILE)
    column, row = torch.arange(width) // TILE, torch.arange(height) // TILE
    in_columns = (column >= first[:, :1]) & (column < end[:, :1])
    in_rows = (row >= first[:, 1:]) & (row < end[:, 1:])
    return in_rows[:, :, None] & in_columns[:, None, :]


class ReferenceRasterizer:
    """The :class:`~odin_nerfstudio.splat.raster.protocol.Rasterizer` by the book; gradients are autograd's."""

    def project(self, rows: Rows, camera: PinholeCamera, settings: RasterSettings) -> Splats:
        width, height = camera.width, camera.height
        turn, shift = camera.viewmat[:3, :3], camera.viewmat[:3, 3]
        K = camera.K.to(rows.means)

        positions = rows.means @ turn.T + shift
        in_range = (positions[:, 2] >= settings.near) & (positions[:, 2] <= settings.far)
        # Only rows in range from here on: behind the camera the formulas mean nothing.
        index = torch.nonzero(in_range)[:, 0]
        index = index[torch.argsort(rows.ids[index])]
        positions, rows = positions[index], Rows(*(t[index] for t in rows))

        axes = turn @ rotation_matrices(rows.quats) * torch.exp(rows.scales)[:, None, :]
        sharp = projected_covariances(axes @ axes.mT, positions, K, width, height)
        blurred = sharp + settings.eps2d * torch.eye(2, dtype=sharp.dtype)
        determinants = torch.linalg.det(blurred)
        conics = torch.linalg.inv(blurred)
        middle = 0.5 * (blurred[:, 0, 0] + blurred[:, 1, 1])
        largest = middle + torch.sqrt((middle**2 - determinants).clamp(min=0.1))
        radii = torch.ceil(3 * torch.sqrt(largest)).detach()
        means2d = positions[:, :2] / positions[:, 2:] * K.diagonal()[:2] + K[:2, 2]

        opacities = torch.sigmoid(rows.opacities[:, 0])
        if settings.mode == "antialiased":
            # The floor keeps the slope of the root finite; such a splat is invisible anyway.
            opacities = opacities * torch.sqrt((torch.linalg.det(sharp) / determinants).clamp(min=1e-12))

        size = torch.tensor([width, height], dtype=means2d.dtype)
        seen = ((means2d + radii[:, None] > 0) & (means2d - radii[:, None] < size)).all(dim=1) & (determinants > 0)
        return Splats(
            ids=rows.ids[seen],
            index=index[seen],
            means2d=means2d[seen],
            depths=positions[seen, 2],
            conics=torch.stack((conics[:, 0, 0], conics[:, 0, 1], conics[:, 1, 1]), dim=-1)[seen],
            opacities=opacities[seen],
            colors=_colors(rows, camera.viewmat, settings.sh_degree)[seen],
            radii=radii[seen].to(torch.int32),
        )

    def rasterize(self, splats: Splats, width: int, height: int, absgrad: bool = False, depth: bool = True) -> Image:
        rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        pixels = torch.stack((columns, rows), dim=-1).to(splats.means2d) + 0.5
        centres = splats.means2d[:, None, None, :].expand(-1, height, width, -1)
        if absgrad and centres.requires_grad:

            def keep(gradient: Tensor) -> None:
                splats.absgrad = gradient.abs().sum(dim=(1, 2))

            centres.register_hook(keep)

        dx, dy = (centres - pixels).unbind(-1)
        a, b, c = (t[:, None, None] for t in splats.conics.unbind(-1))
        exponents = 0.5 * (a * dx**2 + c * dy**2) + b * dx * dy
        alphas = (splats.opacities[:, None, None] * torch.exp(-exponents)).clamp(max=0.999)
        drawn = _touched(splats, width, height) & (exponents >= 0) & (alphas >= 1 / 255)
        alphas = torch.where(drawn, alphas, 0)

        by_id = torch.argsort(splats.ids)
        front_to_back = by_id[torch.argsort(splats.depths[by_id], stable=True)]
        alphas = alphas[front_to_back]
        after = torch.cumprod(1 - alphas, dim=0)
        # A pixel ends before the splat that would leave 1e-4 or less; after it the product only falls.
        alphas = torch.where(after > 1e-4, alphas, 0)
        after = torch.cumprod(1 - alphas, dim=0)
        before = torch.cat((torch.ones_like(after[:1]), after[:-1]))
        weights = alphas * before

        rgb = torch.einsum("mhw,mc->hwc", weights, splats.colors[front_to_back])
        alpha = 1 - torch.prod(1 - alphas, dim=0)[..., None]
        if not depth:
            return Image(rgb, alpha, None)
        distance = torch.einsum("mhw,m->hw", weights, splats.depths[front_to_back])[..., None]
        return Image(rgb, alpha, distance / alpha.clamp(min=1e-10))
