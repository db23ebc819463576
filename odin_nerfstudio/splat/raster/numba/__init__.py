"""CPU rasterizer in numba: deterministic, parallel over tiles, forward and backward.

The image and every gradient are the same bits from run to run, with any number of threads, and for any order of the
rows: rows are computed one by one, tiles one by one, and all sums over tiles, splats or blocks have a fixed order.
"""

from __future__ import annotations

from odin_nerfstudio.splat.raster.numba.rasterizer import NumbaRasterizer

__all__ = ["NumbaRasterizer"]
