"""Tiles: space cut into K boxes, each with a radiance field of its own (NeRF-XL §3; design §2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from odin_nerfstudio.plan.partition import Partition

_CORE_PERCENTILES = (2.0, 98.0)
"""Points outside do not stretch the core: SfM has outliers."""
_THINNEST_CORE = 0.05
"""Least side of an open tile's core, as a share of the scene's longest side."""


@dataclass(frozen=True)
class Tiles:
    """K axis-aligned boxes that fill space without overlap: a lower face belongs to its tile, an upper one does not.

    Faces are numbers that float32 holds exactly, so positions of either precision compare alike.
    """

    partition: Partition
    """The KD-tree whose leaves the tiles are."""
    bounds: Tensor
    """(K, 2, 3) float32 lower and upper corner; ±inf where the tile is open."""
    core: Tensor
    """(K, 2, 3) float32 finite part of every tile: its faces and, where it is open, the end of the seen scene."""

    def __len__(self) -> int:
        return len(self.bounds)

    @staticmethod
    def build(points: Tensor | NDArray[np.floating], count: int) -> Tiles:
        """Cuts space so that the tiles hold equally many of the points.

        Args:
            points: (N, 3) positions, such as SfM points or :func:`~.lattice.seeds_along_rays`; any N ≥ 0. Those that
                are not finite are ignored; where they are too few or coincide, some tiles hold none.
            count: K ≥ 1.

        Raises:
            ValueError: when ``count`` is below 1.
        """
        seeds = torch.as_tensor(points).detach().cpu().double().reshape(-1, 3).numpy()
        seeds = seeds[np.isfinite(seeds).all(axis=1)]
        tree = Partition.build(seeds, count)
        tree = replace(tree, face=_single(tree.face), bounds=_single(tree.bounds))
        core = torch.from_numpy(_core(seeds, tree.bounds)).float()
        return Tiles(tree, torch.from_numpy(tree.bounds).float(), core)

    def to(self, device: torch.device | str) -> Tiles:
        """The same tiles with their tensors on ``device``."""
        return replace(self, bounds=self.bounds.to(device), core=self.core.to(device))

    def contains(self, tile: int, positions: Tensor) -> Tensor:
        """(..., 3) positions → (...) bool, whether they lie in the tile; exactly one tile says so of each."""
        low, high = self.bounds[tile].to(positions.dtype)
        return ((positions >= low) & (positions < high)).all(dim=-1)

    def owner(self, positions: Tensor) -> Tensor:
        """(..., 3) positions → (...) int64 the tile that each lies in."""
        owner = torch.zeros(positions.shape[:-1], dtype=torch.int64, device=positions.device)
        for tile in range(1, len(self)):
            owner.masked_fill_(self.contains(tile, positions), tile)
        return owner

    def state_dict(self) -> dict[str, Tensor]:
        """Tensors from which :meth:`from_state_dict` restores the tiles bit by bit, for checkpoints."""
        tree = {name: torch.from_numpy(getattr(self.partition, name)) for name in ("axis", "face", "children")}
        return {**tree, "bounds": self.bounds.cpu(), "core": self.core.cpu()}

    @staticmethod
    def from_state_dict(state: Mapping[str, Tensor]) -> Tiles:
        """The inverse of :meth:`state_dict`, on the CPU."""
        axis, face, children = (state[name].cpu().numpy() for name in ("axis", "face", "children"))
        bounds = state["bounds"].cpu()
        return Tiles(Partition(axis, face, children, bounds.double().numpy()), bounds, state["core"].cpu())


def tiles_of_rank(rank: int, ranks: int, count: int) -> range:
    """Which of ``count`` tiles a rank holds: neighbours in the tree, in rank order, as equally many as possible."""
    return range(rank * count // ranks, (rank + 1) * count // ranks)


def _single(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return values.astype(np.float32).astype(np.float64)


def _core(points: NDArray[np.float64], bounds: NDArray[np.float64]) -> NDArray[np.float64]:
    """(K, 2, 3) finite boxes: ``bounds`` with the ends of the seen scene in place of the infinite sides."""
    low, high = np.percentile(points, _CORE_PERCENTILES, axis=0) if len(points) else np.zeros((2, 3))
    thinnest = _THINNEST_CORE * float((high - low).max()) or 1.0
    below, above = bounds[:, 0], bounds[:, 1]
    # A face can lie beyond the percentiles; the core of the tile behind it must still have a width.
    lower = np.where(np.isfinite(below), below, np.minimum(low, np.where(np.isfinite(above), above, high) - thinnest))
    upper = np.where(np.isfinite(above), above, np.maximum(high, lower + thinnest))
    return np.stack([lower, upper], axis=1)
