"""Primitives in the colours of what happened to them: whose they are, how contended, how old, how new."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from odin_nerfstudio.viewer.colors import heat, rank_color

STALE = 100
"""Units since its publication after which a primitive has the darkest colour of ``staleness``."""


@dataclass(frozen=True)
class History:
    """What is known of N primitives at the end of a unit."""

    ids: Tensor
    """(N,) int64 ascending."""
    owner: Tensor
    """(N,) int64 rank."""
    conflict: Tensor
    """(N,) float32 in [0, 1]: in which part of the last units it was contended."""
    version: Tensor
    """(N,) int32: the unit that published it last, -1 for none."""
    step: int
    """The unit after which this was known."""

    PREFIX: ClassVar[str] = "history."
    """Before its names among other values of primitives."""

    def to_rows(self) -> dict[str, Tensor]:
        """(N,) each, by names that no parameter has; the ids travel apart."""
        named = {"owner": self.owner, "conflict": self.conflict, "version": self.version}
        return {self.PREFIX + name: row for name, row in named.items()}

    @staticmethod
    def from_rows(rows: Mapping[str, Tensor], ids: Tensor, step: int) -> History:
        """What :meth:`to_rows` gave, for primitives with these ((N,) int64) ids."""
        owner, conflict, version = (rows[History.PREFIX + name] for name in ("owner", "conflict", "version"))
        return History(ids, owner.long(), conflict, version, step)

    @staticmethod
    def unknown(ids: Tensor) -> History:
        """Of primitives ((N,) int64 ids, ascending) that nothing was recorded of."""
        zero = torch.zeros_like(ids)
        return History(ids, zero, zero.float(), (zero - 1).int(), 0)

    def select(self, ids: Tensor) -> History:
        """That of ``ids`` ((M,) int64, in any order); of those that are newer than this, nothing is known."""
        if not len(self.ids):
            return History.unknown(ids)
        place = torch.searchsorted(self.ids, ids).clamp_(max=len(self.ids) - 1)
        known, none = self.ids[place] == ids, History.unknown(ids)
        return History(
            ids,
            torch.where(known, self.owner[place], none.owner),
            torch.where(known, self.conflict[place], none.conflict),
            torch.where(known, self.version[place], none.version),
            self.step,
        )


def owner_colors(history: History) -> Tensor:
    """(N, 3) the colour of the rank that owns each primitive."""
    palette = [rank_color(rank) for rank in range(int(history.owner.max()) + 1 if len(history.ids) else 1)]
    return torch.tensor(palette, dtype=torch.float32, device=history.ids.device)[history.owner]


def conflict_colors(history: History) -> Tensor:
    """(N, 3) from never contended to contended in every unit of the window."""
    return heat(history.conflict)


def staleness_colors(history: History) -> Tensor:
    """(N, 3) from just published to published :data:`STALE` units ago or never."""
    age = torch.where(history.version < 0, STALE, history.step - history.version)
    return heat((age / STALE).clamp(0, 1))


def version_colors(history: History) -> Tensor:
    """(N, 3) from never published to published by the last unit."""
    return heat(((history.version + 1) / (history.step + 1)).clamp(0, 1))


HEATMAPS: dict[str, Callable[[History], Tensor]] = {
    "owner": owner_colors,
    "conflict": conflict_colors,
    "staleness": staleness_colors,
    "version": version_colors,
}
"""By the name of the render output: colours in [0, 1], which keep their meaning from frame to frame."""
