"""What a renderer of Gaussians is to the rest of the project: two stages and the values that pass between them.

The stages are apart because they run on different ranks: the owner of the rows projects and shades them, the rank
that holds the view rasterizes the splats it is sent (design §3.1). Everything between the stages is a leaf-able tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

RasterizeMode = Literal["classic", "antialiased"]


class Rows(NamedTuple):
    """Primitives as the model stores them (before activation), any subset. N rows, K = (degree + 1)²."""

    ids: Tensor
    """(N,) int64: global ids, all different, ascending (the CPU backends take any order). They alone decide in which
    order equal depths are blended."""
    means: Tensor
    """(N, 3) world position."""
    scales: Tensor
    """(N, 3) logarithm of the standard deviations along the principal axes, world units."""
    quats: Tensor
    """(N, 4) rotation w, x, y, z; not necessarily normalised."""
    features_dc: Tensor
    """(N, 3) SH coefficient of degree 0; a logit of the colour where ``RasterSettings.sh_degree`` is None."""
    features_rest: Tensor
    """(N, K − 1, 3) SH coefficients of degrees 1 and up; more than ``sh_degree`` needs are allowed and ignored."""
    opacities: Tensor
    """(N, 1) logit of the opacity."""


@dataclass(frozen=True)
class PinholeCamera:
    """One undistorted perspective camera."""

    viewmat: Tensor
    """(4, 4) world → camera, OpenCV axes (x right, y down, z forward). May require grad (camera optimizer); its last
    row, 0 0 0 1, gets none."""
    K: Tensor
    """(3, 3) intrinsics in pixels, without skew; pixel centres lie at half-integers."""
    width: int
    """Image width in pixels."""
    height: int
    """Image height in pixels."""

    @cached_property
    def row(self) -> Tensor:
        """(18,) world → camera, 3×4 row by row; fx, fy, cx, cy; width, height. Made once; no gradient goes through."""
        viewmat, K = self.viewmat.detach(), self.K.detach()
        size = torch.tensor([self.width, self.height]).to(K, non_blocking=True)
        return torch.cat([viewmat[:3].flatten(), K[0, :2:2], K[1, 1:2], K[:2, 2], size])


@dataclass(frozen=True)
class RasterSettings:
    """How the image is formed; the constants are gsplat 1.4.0's defaults as splatfacto uses them."""

    sh_degree: int | None = 3
    """Highest SH degree to evaluate; None: the colour is ``sigmoid(features_dc)``."""
    mode: RasterizeMode = "classic"
    """``antialiased`` scales opacity by √(det Σ / det(Σ + eps2d·I)) (Mip-Splatting)."""
    near: float = 0.01
    """Rows nearer than this, in camera z and world units, are dropped."""
    far: float = 1e10
    """Rows farther than this are dropped."""
    eps2d: float = 0.3
    """Added to the diagonal of the projected covariance, pixels²."""


@dataclass
class Splats:
    """The visible rows of one view after projection and shading; M ≤ N splats in ascending order of id.

    The float tensors may be replaced by detached leaves: that is what travels between ranks.
    """

    ids: Tensor
    """(M,) int64 global ids, ascending."""
    index: Tensor
    """(M,) int64 position of each splat in the ``Rows`` it came from."""
    means2d: Tensor
    """(M, 2) centre in pixels."""
    depths: Tensor
    """(M,) camera z."""
    conics: Tensor
    """(M, 3) upper triangle a, b, c of the inverse 2D covariance: exponent −½(a·dx² + c·dy²) − b·dx·dy."""
    opacities: Tensor
    """(M,) after activation and compensation."""
    colors: Tensor
    """(M, 3) view-dependent RGB, clamped below at 0 where it comes from SH."""
    radii: Tensor
    """(M,) int32 screen radius in pixels, ⌈3·√λ_max⌉ > 0."""
    absgrad: Tensor | None = None
    """(M, 2) Σ over pixels of |∂loss/∂means2d|, filled in by the backward of ``rasterize`` when ``absgrad=True``."""


class Image(NamedTuple):
    """What ``rasterize`` returns, before any background."""

    rgb: Tensor
    """(H, W, 3) premultiplied colour."""
    alpha: Tensor
    """(H, W, 1) accumulated opacity."""
    depth: Tensor | None
    """(H, W, 1) expected camera z, Σ w z / max(alpha, 1e-10); None where it was not asked for."""


class Rasterizer(Protocol):
    """A renderer backend. Both stages are differentiable in every float tensor they take."""

    def project(self, rows: Rows, camera: PinholeCamera, settings: RasterSettings) -> Splats:
        """Culls, projects (EWA, Zwicker et al. 2001) and shades ``rows``; see gsplat's ``fully_fused_projection``."""
        ...

    def rasterize(self, splats: Splats, width: int, height: int, absgrad: bool = False, depth: bool = True) -> Image:
        """Blends ``splats`` front to back over 16×16 tiles; see gsplat's ``rasterize_to_pixels``.

        Ties in depth are broken by id. That the splats ascend in id is for the caller to see to: the CUDA backend does
        not look, since that would wait for the device, and the CPU backends take any order.

        Args:
            splats: of one view.
            width, height: of the image in pixels.
            absgrad: whether the backward fills in ``splats.absgrad``.
            depth: whether the image has a depth.
        """
        ...
