"""The two stages as differentiable functions of torch tensors."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from odin_nerfstudio.cpu.threads import run
from odin_nerfstudio.splat.raster.numba.blend import (
    PARTIAL_WIDTH,
    PIXELS,
    blend,
    blend_backward,
    gather_partials,
)
from odin_nerfstudio.splat.raster.numba.order import front_to_back
from odin_nerfstudio.splat.raster.numba.project import BLOCK, project, project_backward
from odin_nerfstudio.splat.raster.numba.shade import shade, shade_backward
from odin_nerfstudio.splat.raster.numba.tiles import PACKED_WIDTH, TileLists, list_tiles, pack
from odin_nerfstudio.splat.raster.protocol import Image, PinholeCamera, RasterSettings, Rows, Splats


def _array(tensor: Tensor) -> np.ndarray:
    """The memory of a tensor as the kernels want it.

    Raises:
        TypeError: if it is not float32 (or an integer of 32 or 64 bits) on the CPU.
    """
    if tensor.device.type != "cpu" or tensor.dtype not in (torch.float32, torch.int32, torch.int64):
        raise TypeError(
            f"The numba rasterizer works on float32 tensors on the CPU, not {tensor.dtype} on {tensor.device}."
        )
    return tensor.detach().contiguous().numpy()


def _blocks(items: int) -> int:
    return -(-items // BLOCK)


class _Project(torch.autograd.Function):
    """Rows → splats, for the inputs that can have a gradient."""

    @staticmethod
    def forward(ctx, means, scales, quats, dc, rest, opacities, viewmat, ids, camera: PinholeCamera, settings):
        rows = [_array(t) for t in (means, scales, quats, opacities)]
        size = len(ids)
        lens = _array(camera.K).astype(np.float64)
        view = _array(viewmat).astype(np.float64)
        packed_camera = (*view.ravel().tolist(), lens[0, 0], lens[1, 1], lens[0, 2], lens[1, 2])
        shape = (float(camera.width), float(camera.height))
        antialiased = settings.mode == "antialiased"

        means2d, conics = np.empty((size, 2), np.float32), np.empty((size, 3), np.float32)
        depths, opacity = np.empty(size, np.float32), np.empty(size, np.float32)
        radii = np.empty(size, np.int32)
        depth_range = (float(settings.near), float(settings.far))
        run(
            project, _blocks(size), *rows, packed_camera, *shape, *depth_range, float(settings.eps2d), antialiased,
            means2d, depths, conics, opacity, radii,
        )  # fmt: skip
        index = np.flatnonzero(radii)
        index = index[np.argsort(_array(ids)[index], kind="stable")]

        degree = -1 if settings.sh_degree is None else settings.sh_degree
        colors = np.empty((len(index), 3), np.float32)
        inverse = np.linalg.inv(view[:3, :3])
        centre = tuple((-inverse @ view[:3, 3]).tolist())
        run(shade, _blocks(len(index)), index, rows[0], _array(dc), _array(rest), centre, degree, colors)

        ctx.save_for_backward(means, scales, quats, dc, rest, opacities)
        ctx.index = index
        ctx.projection = (packed_camera, *shape, float(settings.eps2d), antialiased)
        ctx.centre, ctx.inverse, ctx.degree = centre, inverse, degree
        outputs = [torch.from_numpy(a) for a in (means2d[index], depths[index], conics[index], opacity[index], colors)]
        integers = torch.from_numpy(index), torch.from_numpy(radii[index])
        ctx.mark_non_differentiable(*integers)
        return (*outputs, *integers)

    @staticmethod
    @once_differentiable
    def backward(ctx, g_means2d, g_depths, g_conics, g_opacities, g_colors, *_):
        saved = ctx.saved_tensors
        means, scales, quats, dc, rest, opacities = (_array(t) for t in saved)
        index, blocks = ctx.index, _blocks(len(ctx.index))
        # NumPy's zeros cost nothing until written to, and rows that are not visible never are.
        gradients = [np.zeros(tuple(t.shape), np.float32) for t in saved]
        g_means, g_scales, g_quats, g_dc, g_rest, g_logits = gradients
        g_centre, g_camera = np.empty((blocks, 3)), np.empty((blocks, 12))
        run(
            shade_backward, blocks, index, means, dc, rest, ctx.centre, ctx.degree, _array(g_colors),
            g_means, g_dc, g_rest, g_centre,
        )  # fmt: skip
        run(
            project_backward, blocks, index, means, scales, quats, opacities, *ctx.projection,
            _array(g_means2d), _array(g_depths), _array(g_conics), _array(g_opacities),
            g_means, g_scales, g_quats, g_logits, g_camera,
        )  # fmt: skip
        g_viewmat = None
        if ctx.needs_input_grad[6]:
            g_view = np.zeros((4, 4))
            g_view[:3] = g_camera.sum(axis=0).reshape(3, 4)
            # The camera's position is −W⁻¹·t.
            pull = -ctx.inverse.T @ g_centre.sum(axis=0)
            g_view[:3, :3] += np.outer(pull, ctx.centre)
            g_view[:3, 3] += pull
            g_viewmat = torch.from_numpy(g_view.astype(np.float32))
        return (*map(torch.from_numpy, gradients), g_viewmat, None, None, None)


class _Blended(NamedTuple):
    """An image and what its derivative needs; see :func:`~odin_nerfstudio.splat.raster.numba.blend.blend`."""

    rgb: Tensor
    alpha: Tensor
    depth: Tensor
    order: np.ndarray
    packed: np.ndarray
    lists: TileLists
    transmittance: np.ndarray
    stop: np.ndarray
    tests: np.ndarray


def _blend(splats: Splats, width: int, height: int) -> _Blended:
    order = front_to_back(_array(splats.depths), _array(splats.ids))
    packed = np.empty((len(order), PACKED_WIDTH), np.float32)
    fields = (splats.means2d, splats.conics, splats.opacities, splats.colors, splats.depths, splats.radii)
    run(pack, _blocks(len(order)), BLOCK, order, *map(_array, fields), packed)
    lists = list_tiles(packed, width, height)
    tiles = len(lists.starts) - 1
    blended = _Blended(
        rgb=torch.empty(height, width, 3),
        alpha=torch.empty(height, width, 1),
        depth=torch.empty(height, width, 1),
        order=order,
        packed=packed,
        lists=lists,
        transmittance=np.empty((tiles, PIXELS), np.float32),
        stop=np.empty((tiles, PIXELS), np.float32),
        tests=np.empty(tiles, np.int64),
    )
    image = (blended.rgb.numpy(), blended.alpha.numpy(), blended.depth.numpy())
    run(
        blend, tiles, packed, lists.entries, lists.starts, lists.columns, width, height,
        *image, blended.transmittance, blended.stop, blended.tests,
    )  # fmt: skip
    return blended


class _Rasterize(torch.autograd.Function):
    """Splats → colour, alpha and expected depth; the five tensors are those of ``splats``, for autograd to see."""

    @staticmethod
    def forward(
        ctx, means2d, depths, conics, opacities, colors, splats: Splats, width: int, height: int, absgrad: bool
    ):
        blended = _blend(splats, width, height)
        ctx.save_for_backward(blended.alpha, blended.depth)
        ctx.state = blended[3:]
        ctx.size = (width, height)
        ctx.absgrad_into = splats if absgrad else None
        return blended.rgb, blended.alpha, blended.depth

    @staticmethod
    @once_differentiable
    def backward(ctx, g_rgb, g_alpha, g_depth):
        order, packed, lists, transmittance, stop, _ = ctx.state
        partials = np.empty((len(lists.entries), PARTIAL_WIDTH), np.float32)
        upstream = (_array(g_rgb), _array(g_alpha), _array(g_depth))
        run(
            blend_backward, len(stop), packed, lists.entries, lists.starts, lists.columns, *ctx.size,
            *map(_array, ctx.saved_tensors), transmittance, stop, *upstream, partials,
        )  # fmt: skip
        gradients = torch.empty(len(order), PARTIAL_WIDTH)
        run(gather_partials, _blocks(len(order)), BLOCK, order, lists.slots, partials, gradients.numpy())
        means2d, conics, opacities, colors, depths, absolute = gradients.split((2, 3, 1, 3, 1, 2), dim=1)
        if ctx.absgrad_into is not None:
            ctx.absgrad_into.absgrad = absolute.contiguous()
        return means2d, depths[:, 0], conics, opacities[:, 0], colors, None, None, None, None


class NumbaRasterizer:
    """The :class:`~odin_nerfstudio.splat.raster.protocol.Rasterizer` for float32 tensors on the CPU.

    The gradient of the camera's matrix is that of its upper three rows; the last row is constant. Safe to call from
    several threads. Both stages raise TypeError for tensors that are not float32 (ids: int64) on the CPU.
    """

    def project(self, rows: Rows, camera: PinholeCamera, settings: RasterSettings) -> Splats:
        means2d, depths, conics, opacities, colors, index, radii = _Project.apply(
            rows.means,
            rows.scales,
            rows.quats,
            rows.features_dc,
            rows.features_rest,
            rows.opacities,
            camera.viewmat,
            rows.ids,
            camera,
            settings,
        )
        return Splats(rows.ids[index], index, means2d, depths, conics, opacities, colors, radii)

    def rasterize(self, splats: Splats, width: int, height: int, absgrad: bool = False, depth: bool = True) -> Image:
        rgb, alpha, distance = _Rasterize.apply(
            splats.means2d,
            splats.depths,
            splats.conics,
            splats.opacities,
            splats.colors,
            splats,
            width,
            height,
            absgrad,
        )
        return Image(rgb, alpha, distance if depth else None)

    def count_tests(self, splats: Splats, width: int, height: int) -> int:
        """How many alpha tests an image costs: splats looked at per pixel, until it is finished, over all pixels."""
        return int(_blend(splats, width, height).tests.sum())
