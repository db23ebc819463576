"""What a renderer of Gaussians is to the rest of the project: two stages and the values that pass between them.

The stages are apart because they run on different ranks: the owner of the rows projects and shades them, the rank
that holds the view rasterizes the splats it is sent (design §3.1). Everything between the stages is a leaf-able tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from torch import Tensor

RasterizeMode = Literal["classic", "antialiased"]


class Rows(NamedTuple):
    """Primitives as the model stores them (before activation), any subset in any order. N rows, K = (degree + 1)²."""

    ids: Tensor
    """(N,) int64: global ids, all different. They alone decide the order in which equal depths are blended."""
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
    depth: Tensor
    """(H, W, 1) expected camera z, Σ w z / max(alpha, 1e-10)."""


class Rasterizer(Protocol):
    """A renderer backend. Both stages are differentiable in every float tensor they take."""

    def project(self, rows: Rows, camera: PinholeCamera, settings: RasterSettings) -> Splats:
        """Culls, projects (EWA, Zwicker et al. 2001) and shades ``rows``; see gsplat's ``fully_fused_projection``."""
        ...

    def rasterize(self, splats: Splats, width: int, height: int, absgrad: bool = False) -> Image:
        """Blends ``splats`` front to back over 16×16 tiles; see gsplat's ``rasterize_to_pixels``.

        The image does not depend on the order of the splats: ties in depth are broken by id.
        """
        ...
