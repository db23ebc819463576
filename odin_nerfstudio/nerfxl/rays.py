"""Rays against tiles: where each ray is in which tile, and in which order it passes through them (design §4)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from odin_nerfstudio.nerfxl.tiles import Tiles
from odin_nerfstudio.plan.partition import LEAF


class Crossings(NamedTuple):
    """The intervals of R rays in K tiles. Taken in entry order they chain up: the first enters at near, each leaves
    where the next enters, the last leaves at far. A tile that the ray misses has an interval of length zero.
    """

    enter: Tensor
    """(R, K) distance t at which the ray enters the tile."""
    leave: Tensor
    """(R, K) distance t ≥ ``enter`` at which it leaves."""
    order: Tensor
    """(R, K) int64 the tiles in the order in which the ray passes them, missed ones included."""

    @property
    def hit(self) -> Tensor:
        """(R, K) bool, whether the ray spends any length in the tile."""
        return self.leave > self.enter


@torch.no_grad()
def cross(tiles: Tiles, origins: Tensor, directions: Tensor, near: Tensor, far: Tensor) -> Crossings:
    """Walks all rays down the KD-tree. A face cuts a ray's interval in two, and the sign of the direction says which
    child comes first; so the order depends on no computed distance, and there are no ties to break.

    A ray in a face's plane belongs to the upper side, as positions do. Rounded coordinates ``origin + t·direction``
    never turn back, so the owners of positions along a ray follow ``order`` exactly, in floating point too.

    Args:
        tiles: K tiles.
        origins: (R, 3).
        directions: (R, 3); components may be zero.
        near: (R, 1) finite, where the ray begins; inside a tile or outside the scene.
        far: (R, 1) where it ends; a ray with far ≤ near misses every tile.
    """
    tree, count = tiles.partition, len(tiles)
    enter, leave = (origins.new_empty(len(origins), count) for _ in range(2))
    place = torch.empty(len(origins), count, dtype=torch.int64, device=origins.device)
    start = torch.zeros(len(origins), dtype=torch.int64, device=origins.device)
    # Per subtree: its node, the ray's interval in it, how many tiles come before it, how many leaves it has.
    waiting = [(0, near[:, 0], torch.maximum(near, far)[:, 0], start, count)]
    while waiting:
        node, begin, end, before, leaves = waiting.pop()
        left, right = tree.children[node].tolist()
        if tree.axis[node] == LEAF:
            enter[:, left], leave[:, left], place[:, left] = begin, end, before
            continue
        # Partition gives the lower child the smaller half of the leaves.
        face, axis, below = float(tree.face[node]), int(tree.axis[node]), leaves // 2
        origin, direction = origins[:, axis], directions[:, axis]
        at = (face - origin) / direction
        # Along the face the quotient is ±inf or, within its plane, no number.
        at = torch.where(direction == 0, torch.where(origin < face, torch.inf, -torch.inf).to(at), at)
        at = torch.minimum(torch.maximum(at, begin), end)
        upward = direction >= 0
        left_end, right_begin = torch.where(upward, at, end), torch.where(upward, at, begin)
        left_begin, right_end = torch.where(upward, begin, at), torch.where(upward, end, at)
        after_left, after_right = before + below * upward, before + (leaves - below) * ~upward
        waiting.append((left, left_begin, left_end, after_right, below))
        waiting.append((right, right_begin, right_end, after_left, leaves - below))
    return Crossings(enter, leave, place.argsort(dim=1))
