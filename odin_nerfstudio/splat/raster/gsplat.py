"""The CUDA backend: gsplat 1.4.0's kernels in packed mode, called stage by stage.

gsplat is imported at first use, so that a machine without CUDA never tries to build its kernels. Gradients are summed
with atomics: they vary in the last bits from run to run.
"""

from __future__ import annotations

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
        splats = Splats(
            ids=rows.ids[index],
            index=index,
            means2d=means2d,
            depths=depths,
            conics=conics,
            opacities=opacities,
            colors=_colors(rows, index, camera.viewmat, settings.sh_degree),
            radii=radii,
        )
        return _ascending(splats)

    def rasterize(self, splats: Splats, width: int, height: int, absgrad: bool = False) -> Image:
        ordered = _ascending(splats)

        def keep(sums: Tensor) -> None:
            splats.absgrad = sums if ordered is splats else sums[torch.argsort(torch.argsort(splats.ids))]

        features = torch.cat((ordered.colors, ordered.depths[:, None]), dim=1)
        image, alpha = _Rasterize.apply(
            ordered.means2d.contiguous(),
            ordered.conics.contiguous(),
            features,
            ordered.opacities.contiguous(),
            ordered,
            width,
            height,
            keep if absgrad else None,
        )
        rgb, depth = image.split((3, 1), dim=-1)
        return Image(rgb, alpha, depth / alpha.clamp(min=1e-10))


class _Rasterize(torch.autograd.Function):
    """gsplat's ``rasterize_to_pixels`` for one view, which hands the sums of |∂loss/∂means2d| to a function."""

    @staticmethod
    def forward(ctx, means2d, conics, features, opacities, splats: Splats, width, height, keep):
        from gsplat.cuda._wrapper import _make_lazy_cuda_func, isect_offset_encode, isect_tiles

        ctx.keep = keep
        if not len(means2d):
            ctx.save_for_backward(means2d, conics, features, opacities)
            return features.new_zeros(height, width, 4), features.new_zeros(height, width, 1)
        columns, rows = -(-width // _TILE), -(-height // _TILE)
        # The sort by depth is stable and the splats ascend in id, so ids break ties.
        _, keys, owners = isect_tiles(
            means2d,
            splats.radii,
            splats.depths,
            _TILE,
            columns,
            rows,
            packed=True,
            n_cameras=1,
            camera_ids=torch.zeros_like(splats.ids),
            gaussian_ids=splats.index,
        )
        offsets = isect_offset_encode(keys, 1, columns, rows)
        inputs = (means2d, conics, features, opacities, None, None)
        ctx.tiling = (width, height, _TILE, offsets, owners)
        image, alpha, last = _make_lazy_cuda_func("rasterize_to_pixels_fwd")(*inputs, *ctx.tiling)
        ctx.save_for_backward(means2d, conics, features, opacities, alpha, last)
        return image[0], alpha[0]

    @staticmethod
    @once_differentiable
    def backward(ctx, g_image, g_alpha):
        from gsplat.cuda._wrapper import _make_lazy_cuda_func

        inputs, outputs = ctx.saved_tensors[:4], ctx.saved_tensors[4:]
        if outputs:
            upstream = (g_image[None].contiguous(), g_alpha[None].contiguous())
            absolute, *gradients = _make_lazy_cuda_func("rasterize_to_pixels_bwd")(
                *inputs, None, None, *ctx.tiling, *outputs, *upstream, ctx.keep is not None
            )
        else:
            absolute, gradients = torch.zeros_like(inputs[0]), [torch.zeros_like(t) for t in inputs]
        if ctx.keep is not None:
            ctx.keep(absolute)
        return (*gradients, None, None, None, None)


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


def _ascending(splats: Splats) -> Splats:
    """The same splats in ascending order of id; the very object if they are so already."""
    if bool((splats.ids[1:] > splats.ids[:-1]).all()):
        return splats
    order = torch.argsort(splats.ids)
    fields = (
        splats.ids,
        splats.index,
        splats.means2d,
        splats.depths,
        splats.conics,
        splats.opacities,
        splats.colors,
        splats.radii,
    )
    return Splats(*(field.index_select(0, order) for field in fields))
