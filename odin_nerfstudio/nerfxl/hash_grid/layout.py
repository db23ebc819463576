"""Where the features of a multiresolution hash grid lie in memory: the same for every backend.

The layout is that of tiny-cuda-nn's ``HashGrid`` (``include/tiny-cuda-nn/encodings/grid.h``), so that a table trained
with one backend can be read by any other. It differs from the letter of Müller et al. 2022, "Instant neural graphics
primitives", §3, in two points: a resolution counts vertices, not cells, and every lattice is shifted by half a cell.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from odin_nerfstudio.errors import UserError

FEATURE_COUNTS = (1, 2, 4, 8)
"""Features per level for which there are kernels."""

MAX_LEVELS = 32

LEVEL = np.dtype(
    [("scale", np.float32)] + [(name, np.uint32) for name in ("resolution", "offset", "entries", "hashed")],
)
"""One level as the kernels read it; ``struct Level`` in cuda/hash_grid.cu mirrors it."""


@dataclass(frozen=True)
class HashGridConfig:
    """Size of a multiresolution hash grid (Müller et al. 2022, table 1)."""

    levels: int = 16
    """Number of grids, from the coarsest to the finest (L)."""
    features: int = 2
    """Features per vertex (F): 1, 2, 4 or 8."""
    log2_table_size: int = 19
    """A level keeps at most 2^this vertices (T); finer levels share entries through a hash."""
    base_resolution: int = 16
    """Vertices along an edge of the coarsest grid."""
    max_resolution: int = 2048
    """Vertices along an edge of the finest grid."""

    @property
    def layout(self) -> HashGridLayout:
        """The table this describes.

        Raises:
            UserError: for sizes that no kernel can handle; the message names the value.
        """
        return _layout(self)


@dataclass(frozen=True)
class Level:
    """One grid of the hierarchy. A position x in [0, 1] lies at ``scale · x + ½`` in units of its cells."""

    scale: float
    """Cells per unit length; a float32 value."""
    resolution: int
    """Vertices along an edge."""
    offset: int
    """First entry in the table."""
    entries: int
    """Number of entries: a multiple of 8."""
    hashed: bool
    """Whether vertices share entries; otherwise entry x + resolution · (y + resolution · z) is vertex (x, y, z)."""


@dataclass(frozen=True)
class HashGridLayout:
    """All levels of a table of shape (``entries``, ``features``)."""

    config: HashGridConfig
    levels: tuple[Level, ...]

    @property
    def features(self) -> int:
        """Features per level."""
        return self.config.features

    @property
    def entries(self) -> int:
        """Rows of the table."""
        return self.levels[-1].offset + self.levels[-1].entries

    @property
    def out_dim(self) -> int:
        """Features of a position: levels × features, the coarsest level first."""
        return len(self.levels) * self.features

    @property
    def growth(self) -> float:
        """Factor between the resolutions of neighbouring levels (b, equation 3)."""
        return _growth(self.config)

    @property
    def extent(self) -> float:
        """Positions in [0, ``extent``] use each vertex of a dense level for one place only.

        Beyond, the shift by half a cell reaches over the last vertex of a row into the first one of the next.
        """
        return 1.0 - 0.5 / self.levels[0].scale

    @cached_property
    def array(self) -> np.ndarray:
        """(L,) of dtype :data:`LEVEL`, for kernels."""
        return np.array([(v.scale, v.resolution, v.offset, v.entries, v.hashed) for v in self.levels], dtype=LEVEL)


def _growth(config: HashGridConfig) -> float:
    return float((config.max_resolution / config.base_resolution) ** (1.0 / max(config.levels - 1, 1)))


@lru_cache(maxsize=64)
def _layout(config: HashGridConfig) -> HashGridLayout:
    _validate(config)
    # In float32, as tiny-cuda-nn does: a scale next to an integer must be rounded up to the same resolution.
    log2_growth = np.log2(np.float32(_growth(config)))
    levels, offset = [], 0
    for level in range(config.levels):
        scale = np.exp2(np.float32(level) * log2_growth) * np.float32(config.base_resolution) - np.float32(1.0)
        resolution = int(np.ceil(scale)) + 1
        entries = min(-(-(resolution**3) // 8) * 8, 1 << config.log2_table_size)
        levels.append(Level(float(scale), resolution, offset, entries, hashed=resolution**3 > entries))
        offset += entries
    return HashGridLayout(config, tuple(levels))


def _validate(config: HashGridConfig) -> None:
    if config.features not in FEATURE_COUNTS:
        raise UserError(f"A hash grid has 1, 2, 4 or 8 features per level, not {config.features}.")
    if not 1 <= config.levels <= MAX_LEVELS:
        raise UserError(f"A hash grid has 1 to {MAX_LEVELS} levels, not {config.levels}.")
    if not 3 <= config.log2_table_size <= 26:
        raise UserError(f"log2_table_size of a hash grid must lie in 3 … 26, not {config.log2_table_size}.")
    if config.base_resolution < 2:
        raise UserError(f"base_resolution of a hash grid must be at least 2, not {config.base_resolution}.")
    if not config.base_resolution <= config.max_resolution <= 1 << 16:
        raise UserError(
            f"max_resolution of a hash grid must lie between its base_resolution, {config.base_resolution}, "
            f"and {1 << 16}, not {config.max_resolution}."
        )
