"""Space split by a KD-tree into any number of cells: Odin's shards and NeRF-XL's tiles (design §2)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LEAF = -1
SCORED_POINTS = 20_000
"""Points looked at, evenly thinned, to judge the shape of a cell."""


@dataclass(frozen=True)
class Partition:
    """A binary tree of axis-aligned faces; node 0 is the root and the k leaves are the cells, from left to right."""

    axis: NDArray[np.int64]
    """(2k − 1,) axis of the node's face; −1 at a leaf."""
    face: NDArray[np.float64]
    """(2k − 1,) where the face lies on that axis. A point on it belongs to the right child."""
    children: NDArray[np.int64]
    """(2k − 1, 2) left (below the face) and right child; at a leaf, twice the index of its cell."""
    bounds: NDArray[np.float64]
    """(k, 2, 3) lower and upper corner of every cell; ±inf where it is open."""

    def __len__(self) -> int:
        return len(self.bounds)

    @staticmethod
    def build(points: NDArray[np.floating], cells: int) -> Partition:
        """Splits space so that every cell gets as many points as the others, within one, unless coordinates repeat.

        A cell that will hold k leaves splits its points in proportion ⌊k/2⌋ : ⌈k/2⌉, along the axis whose two
        children are the most cubic. Points that no face can separate (too few, or duplicates) leave cells empty.

        Args:
            points: (N, 3) finite positions; N may be smaller than ``cells``, also 0.
            cells: k ≥ 1.
        """
        if cells < 1:
            raise ValueError(f"a partition has at least one cell, not {cells}")
        points = np.asarray(points, dtype=np.float64).reshape(-1, 3)
        return _Builder().build(points, cells)

    def owner(self, points: NDArray[np.floating]) -> NDArray[np.int64]:
        """(N, 3) positions → (N,) the cell that each lies in."""
        points = np.asarray(points, dtype=np.float64).reshape(-1, 3)
        owner = np.empty(len(points), dtype=np.int64)
        waiting = [(0, np.arange(len(points)))]
        while waiting:
            node, rows = waiting.pop()
            left, right = self.children[node]
            if self.axis[node] == LEAF:
                owner[rows] = left
                continue
            below = points[rows, self.axis[node]] < self.face[node]
            waiting += [(left, rows[below]), (right, rows[~below])]
        return owner


class _Builder:
    """Collects the nodes while :meth:`split` walks down."""

    def __init__(self) -> None:
        self.axis: list[int] = []
        self.face: list[float] = []
        self.children: list[list[int]] = []
        self.bounds: list[NDArray[np.float64]] = []

    def build(self, points: NDArray[np.float64], cells: int) -> Partition:
        low, high = (points.min(axis=0), points.max(axis=0)) if len(points) else (np.zeros(3), np.zeros(3))
        # Without any extent there is still space to divide.
        margin = float((high - low).max()) / 2 or 1.0
        flat = high - low < 1e-6 * margin
        box = np.array([np.where(flat, low - margin, low), np.where(flat, high + margin, high)])
        everywhere = np.array([np.full(3, -np.inf), np.full(3, np.inf)])
        self.split(points, cells, box, everywhere)
        return Partition(np.array(self.axis), np.array(self.face), np.array(self.children), np.array(self.bounds))

    def split(self, points: NDArray[np.float64], cells: int, box: NDArray[np.float64], bounds: NDArray) -> int:
        """Adds the subtree of a cell. ``box`` is the finite part of ``bounds`` that the scene fills."""
        node = len(self.axis)
        self.axis.append(LEAF)
        self.face.append(0.0)
        self.children.append([len(self.bounds)] * 2)
        if cells == 1:
            self.bounds.append(bounds)
            return node
        left = cells // 2
        faces = [_face(points[:, axis], left / cells, box[:, axis]) for axis in range(3)]
        sample = points[:: max(len(points) // SCORED_POINTS, 1)]
        axis = min(range(3), key=lambda a: _elongation(sample, a, faces[a], box))
        below = points[:, axis] < faces[axis]
        self.axis[node], self.face[node] = axis, faces[axis]
        for side, (part, leaves) in enumerate([(points[below], left), (points[~below], cells - left)]):
            part_box, part_bounds = (_cut(region, axis, faces[axis], side) for region in (box, bounds))
            self.children[node][side] = self.split(part, leaves, part_box, part_bounds)
        return node


def _cut(region: NDArray[np.float64], axis: int, face: float, side: int) -> NDArray[np.float64]:
    """(2, 3) corners → those of its part below (side 0) or above (side 1) the face."""
    part = region.copy()
    part[1 - side, axis] = face
    return part


def _face(coordinates: NDArray[np.float64], share: float, extent: NDArray[np.float64]) -> float:
    """Where to cut so that ``share`` of the points lies below; where the points do not say, ``share`` of the extent."""
    values = np.sort(coordinates)
    # Only between two different values can a face separate points; take the gap nearest to the wanted count.
    gaps = np.flatnonzero(values[1:] > values[:-1]) + 1
    if len(gaps) == 0:
        return float(extent[0] + share * (extent[1] - extent[0]))
    gap = gaps[np.abs(gaps - share * len(values)).argmin()]
    below, above = values[gap - 1], values[gap]
    middle = below + (above - below) / 2
    return float(middle if middle > below else above)


def _elongation(points: NDArray[np.float64], axis: int, face: float, box: NDArray[np.float64]) -> float:
    """Longest over shortest side of the less cubic child. Sides are measured between percentiles: SfM has outliers."""
    below = points[:, axis] < face
    worst = 1.0
    for side, part in enumerate([points[below], points[~below]]):
        whole = np.diff(_cut(box, axis, face, side), axis=0)[0]
        sides = np.diff(np.percentile(part, [2, 98], axis=0), axis=0)[0] if len(part) > 1 else whole
        worst = max(worst, float(sides.max() / max(sides.min(), 1e-9 * whole.max())))
    return worst
