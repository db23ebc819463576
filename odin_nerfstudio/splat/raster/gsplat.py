"""The CUDA backend: gsplat 1.4.0's kernels in packed mode, called stage by stage.

gsplat is imported at first use, so that a machine without CUDA never tries to build its kernels. Gradients are summed
with atomics: they vary in the last bits from run to run. Nothing here checks that rows and splats ascend in id: the
answer would have to come back from the device, and those of the model do.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from odin_nerfstudio.splat.raster.protocol import Image, PinholeCamera, RasterSettings, Rows, Splats

_TILE = 16


class GsplatRasterizer:
    """The :class:`~odin_nerfstudio.splat.raster.protocol.Rasterizer` for float32 tensors on a CUDA device."""

    def project(self, rows: Rows, camera: PinholeCamera, settings: RasterSettings) -> Splats:
        from gsplat.cuda._wrapper import fully_fused_projection

        _, index, radii, means2d, depths, conics, compensations = fully_fused_projection(
            rows.means,
            None,
            rows.quats,
            torch.exp(rows.scales),
            camera.viewmat[None],
            camera.K[None],
            camera.width,
            camera.height,
            eps2d=settings.eps2d,
            packed=True,
            near_plane=settings.near,
            far_plane=settings.far,
            calc_compensations=settings.mode == "antialiased",
        )
        opacities = torch.sigmoid(rows.opacities[:, 0]).index_select(0, index)
        if compensations is not None:
            opacities = opacities * compensations
        return Splats(
            ids=rows.ids[index],
            index=index,
            means2d=means2d,
            depths=depths,
            conics=conics,
            opacities=opacities,
            colors=_colors(rows, index, camera.viewmat, settings.sh_degree),
            radii=radii,
        )

    def rasterize(self, splats: Splats, width: int, height: int, absgrad: bool = False, depth: bool = True) -> Image:
        def keep(sums: Tensor) -> None:
            splats.absgrad = sums

        colors = splats.colors
        image, alpha = _Rasterize.apply(
            splats.means2d.contiguous(),
            splats.conics.contiguous(),
            torch.cat((colors, splats.depths[:, None]), dim=1) if depth else colors.contiguous(),
            splats.opacities.contiguous(),
            splats,
            width,
            height,
            keep if absgrad else None,
        )
        if not depth:
            return Image(image, alpha, None)
        rgb, distance = image.split((3, 1), dim=-1)
        return Image(rgb, alpha, distance / alpha.clamp(min=1e-10))


class _Rasterize(torch.autograd.Function):
    """gsplat's ``rasterize_to_pixels`` for one view, which hands the sums of |∂loss/∂means2d| to a function."""

    @staticmethod
    def forward(ctx, means2d, conics, features, opacities, splats: Splats, width, height, keep):
        ctx.keep = keep
        if not len(means2d):
            ctx.save_for_backward(means2d, conics, features, opacities)
            return features.new_zeros(height, width, features.shape[1]), features.new_zeros(height, width, 1)
        columns, rows = -(-width // _TILE), -(-height // _TILE)
        kernels, radii, depths = _kernels(), splats.radii.contiguous(), splats.depths.contiguous()
        # The sort by depth is stable and the splats ascend in id, so ids break ties. The kernel takes splats that are
        # not packed as those of cameras in turn: with one camera nothing needs to say whose they are.
        _, keys, owners = kernels.isect_tiles(
            means2d[None], radii, depths, None, None, 1, _TILE, columns, rows, True, True
        )
        offsets = kernels.isect_offset_encode(keys, 1, columns, rows)
        inputs = (means2d, conics, features, opacities, None, None)
        ctx.tiling = (width, height, _TILE, offsets, owners)
        image, alpha, last = kernels.rasterize_to_pixels_fwd(*inputs, *ctx.tiling)
        ctx.save_for_backward(means2d, conics, features, opacities, alpha, last)
        return image.squeeze(0), alpha.squeeze(0)

    @staticmethod
    @once_differentiable
    def backward(ctx, g_image, g_alpha):
        inputs, outputs = ctx.saved_tensors[:4], ctx.saved_tensors[4:]
        if outputs:
            upstream = (g_image.contiguous(), g_alpha.contiguous())
            absolute, *gradients = _kernels().rasterize_to_pixels_bwd(
                *inputs, None, None, *ctx.tiling, *outputs, *upstream, ctx.keep is not None
            )
        else:
            absolute, gradients = torch.zeros_like(inputs[0]), [torch.zeros_like(t) for t in inputs]
        if ctx.keep is not None:
            ctx.keep(absolute)
        return (*gradients, None, None, None, None)


@cache
def _kernels() -> Any:
    """gsplat's extension itself: its wrappers check arguments and import it on every call."""
    from gsplat.cuda._backend import _C

    return _C


def _colors(rows: Rows, index: Tensor, viewmat: Tensor, degree: int | None) -> Tensor:
    """(M, 3) RGB of the visible rows as the camera sees them."""
    from gsplat.cuda._wrapper import spherical_harmonics

    dc = rows.features_dc.index_select(0, index)
    if degree is None:
        return torch.sigmoid(dc)
    if not len(index):
        return dc  # the kernel cannot be launched on nothing
    centre = -torch.linalg.inv(viewmat[:3, :3]) @ viewmat[:3, 3]
    directions = rows.means.index_select(0, index) - centre
    coefficients = torch.cat((dc[:, None], rows.features_rest.index_select(0, index)), dim=1)
    return torch.clamp_min(spherical_harmonics(degree, directions, coefficients) + 0.5, 0.0)
