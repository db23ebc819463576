"""A task unit on one rank, and the two ways in which its rows and gradients travel between ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from odin_nerfstudio.comm.exchange import Exchange, Job, Signal
from odin_nerfstudio.comm.splat_block import SplatGradBlock
from odin_nerfstudio.shadow.timeline import Timeline
from odin_nerfstudio.shadow.unit import TaskUnit as Locks
from odin_nerfstudio.splat.densify import SplatStatistics
from odin_nerfstudio.splat.model import OdinSplatfactoModel
from odin_nerfstudio.splat.raster import PinholeCamera, Rows, Splats

DIFFERENTIATED = ("means2d", "depths", "conics", "opacities", "colors")
"""Fields of a splat that have a gradient."""


@dataclass(frozen=True)
class RowGradients:
    """Gradients of some rows of a unit, summed over its views in their order."""

    rows: Tensor
    """(R,) int64 ascending."""
    values: dict[str, Tensor]
    """(R, ...) for each parameter."""
    statistics: list[SplatStatistics]
    """Of the views, about these rows."""
    written: list[Tensor]
    """For each view, (W,) int64: those of the rows, as far as this rank knows, that it has a gradient for."""

    def select(self, kept: Tensor) -> RowGradients:
        """Those of the rows that ``kept`` ((R,) bool) names."""
        return replace(self, rows=self.rows[kept], values={name: value[kept] for name, value in self.values.items()})

    def join(self, other: RowGradients) -> RowGradients:
        """These together with those of other rows."""
        rows, order = torch.cat([self.rows, other.rows]).sort()
        values = {name: torch.cat([value, other.values[name]])[order] for name, value in self.values.items()}
        return replace(self, rows=rows, values=values)


@dataclass
class Part:
    """Rows of a unit that were read together, and what was made of them."""

    rows: Tensor
    """(R,) int64 rows of the model, ascending."""
    values: Rows
    """Copies of the rows, leaves of the projection's graph: a publication cannot change them."""
    splats: dict[int, Splats]
    """By view of the group, those that this rank projects."""


@dataclass
class Unit:
    """One group on one rank."""

    step: int
    """The optimizer step."""
    ranks: list[int]
    """The rank that renders each view of the group."""
    cameras: list[PinholeCamera]
    """The camera of each view."""
    locks: Locks
    """What the Shadow Graph knows of it: its scope, and what it has read and published."""
    parts: list[Part] = field(default_factory=list)
    """Early rows, then late ones."""
    leaves: list[Splats] = field(default_factory=list)
    """Splats of the views that this rank renders."""
    order: Tensor | None = None
    """(M,) where each splat of the leaves, one after the other, lay among those that arrived."""
    wanted: Tensor | None = None
    """(N,) bool: rows whose gradients the next unit waits for, so that they travel first; None: all of them."""
    dense: dict[str, Tensor] = field(default_factory=dict)
    """(N, ...) gradients that do not come from splats but from a regulariser."""
    postponed: RowGradients | None = None
    """What is published last, because the next unit reads these rows as they were before (policy ``throughput``)."""

    def views_of(self, rank: int) -> list[int]:
        """Numbers within the group of the views that a rank renders."""
        return [view for view, renderer in enumerate(self.ranks) if renderer == rank]

    def reads(self) -> Iterator[tuple[int, Tensor]]:
        """For each view that this rank projects, the rank that renders it and rows ((R,) int64) that it is made of."""
        for part in self.parts:
            for view, splats in part.splats.items():
                yield self.ranks[view], part.rows[splats.index]


class UnitExchange(ABC):
    """How rows get to the ranks that render them, and gradients to those that step them.

    All ranks call the same methods for the same units in the same order.

    Args:
        model: the rows of this rank and the renderer.
        exchange: moves blocks between ranks.
        timeline: where waiting and work are recorded.
    """

    unit_type: ClassVar[type[Unit]]
    """A unit with what this exchange has to remember of it."""

    def __init__(self, model: OdinSplatfactoModel, exchange: Exchange, timeline: Timeline) -> None:
        self._model = model
        self._exchange = exchange
        self._timeline = timeline
        self._world = exchange.world
        self._params = list(model.gauss_params)

    @abstractmethod
    def read(self, unit: Any, rows: Tensor, name: str) -> None:
        """Copies ``rows`` ((R,) int64 ascending) as they are, projects them, and sends what others need of them."""

    @abstractmethod
    def leaves(self, unit: Any) -> list[Splats]:
        """Waits for all that was read; the splats of this rank's views in ascending order of id, as leaves."""

    @abstractmethod
    def want(self, unit: Any) -> None:
        """Lets the other ranks know of ``unit.wanted``."""

    @abstractmethod
    def push(self, unit: Any, first: bool, signal: Signal = Signal.NONE) -> Job:
        """Sends the gradients of the leaves: those that are wanted first, or the rest."""

    @abstractmethod
    def gradients(self, unit: Any, first: bool) -> RowGradients:
        """Waits for what was pushed: gradients of the rows of this rank."""

    @abstractmethod
    def look(self, cameras: Sequence[PinholeCamera], ranks: Sequence[int]) -> list[Splats]:
        """Splats of this rank's views outside units, each view rendered by one of ``ranks``."""


def read_rows(model: OdinSplatfactoModel, rows: Tensor) -> Rows:
    """Copies of ``rows`` ((R,) int64) as leaves."""
    with torch.no_grad():
        ids, *values = model.rows(rows)
    return Rows(ids, *(value.requires_grad_() for value in values))


def pull_back(splats: Splats, gradients: SplatGradBlock, camera: PinholeCamera) -> None:
    """Takes the gradients of a view's splats through its projection, where they are added to those of the rows."""
    torch.autograd.backward(
        [getattr(splats, name) for name in DIFFERENTIATED],
        [getattr(gradients, name) for name in DIFFERENTIATED],
        retain_graph=camera.viewmat.requires_grad,
    )


def gradients_of(values: Rows, params: Sequence[str]) -> dict[str, Tensor]:
    """What :func:`pull_back` has added up on the leaves ``values``, zero where nothing was."""
    leaves = {name: getattr(values, name) for name in params}
    return {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()}
