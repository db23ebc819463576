"""A task unit on one rank, and the two ways in which its rows and gradients travel between ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from odin_nerfstudio.comm.device_exchange import DeviceExchange
from odin_nerfstudio.comm.exchange import Exchange, Signal
from odin_nerfstudio.comm.splat_block import SplatGradBlock
from odin_nerfstudio.shadow.bitmap import Bitmap
from odin_nerfstudio.shadow.contention import Touched
from odin_nerfstudio.shadow.policy import Quality
from odin_nerfstudio.shadow.timeline import Timeline
from odin_nerfstudio.shadow.unit import TaskUnit as Locks
from odin_nerfstudio.splat.densify import SplatStatistics
from odin_nerfstudio.splat.model import OdinSplatfactoModel
from odin_nerfstudio.splat.raster import PinholeCamera, Rows, Splats

FEW = 0.5
"""Share of a scope up to which wanted gradients travel apart from the rest; above it nothing would be left to hide."""
DIFFERENTIATED = ("means2d", "depths", "conics", "opacities", "colors")
"""Fields of a splat that have a gradient."""


@dataclass(frozen=True)
class RowGradients:
    """Gradients of some rows of a unit, summed over its views in their order."""

    rows: Tensor
    """(R,) int64, all different."""
    values: dict[str, Tensor]
    """(R, ...) for each parameter, contiguous."""
    active: Tensor
    """(R,) bool: which rows have a gradient at all; that of the others is zero."""
    statistics: list[SplatStatistics]
    """Of the views, about these rows."""
    written: list[Touched]
    """Which of the rows, as far as this rank knows, the views have a gradient for; empty where nobody wants to know."""


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
    scope: Bitmap
    """Rows of this rank that the views may read."""
    locks: Locks = field(init=False)
    """What the Shadow Graph knows of it: what it has read and published. From its admission on."""
    begun: bool = False
    """Whether the Shadow Graph has admitted it."""
    parts: list[Part] = field(default_factory=list)
    """Early rows, then late ones."""
    leaves: list[Splats] = field(default_factory=list)
    """Splats of the views that this rank renders."""
    order: Tensor | None = None
    """(M,) where each splat of the leaves, one after the other, lay among those that arrived."""
    early: Bitmap | None = None
    """Rows that are read while the unit before is in flight; None: none are."""
    wanted: Bitmap | None = None
    """Rows whose gradients the next unit waits for, so that they travel first; None: all of them."""
    nothing_wanted: bool = False
    """Whether the next unit waits for no row of any rank, so that all gradients may travel when they like."""
    dense: dict[str, Tensor] = field(default_factory=dict)
    """(N, ...) gradients that do not come from splats but from a regulariser."""
    postponed: tuple[RowGradients, Tensor] | None = None
    """What is published last, because the next unit reads these rows as they were before (policy ``throughput``): some
    gradients, and which of them are meant."""

    @property
    def has_late(self) -> bool:
        """Whether this rank may have something left to read once the unit before is published."""
        return True

    @property
    def pushes(self) -> list[bool]:
        """What is pushed, one after the other: wanted gradients (True) and the rest."""
        if self.wanted is None:
            return [True]
        return [False] if self.nothing_wanted else [True, False]

    def views_of(self, rank: int) -> list[int]:
        """Numbers within the group of the views that a rank renders."""
        return [view for view, renderer in enumerate(self.ranks) if renderer == rank]

    def reads(self) -> Iterator[Touched]:
        """Rows that the views which this rank projects are made of."""
        for part in self.parts:
            for view, splats in part.splats.items():
                yield Touched(self.ranks[view], part.rows[splats.index])


class UnitExchange(ABC):
    """How rows get to the ranks that render them, and gradients to those that step them.

    All ranks call the same methods for the same units in the same order.

    Args:
        model: the rows of this rank and the renderer.
        exchange: moves blocks between ranks.
        timeline: where waiting and work are recorded.
    """

    plans_ahead: ClassVar[bool] = False
    """Whether units are planned before the one before them is rendered, rather than after: a GPU has then counted what
    the host must know when the host comes to wait for the GPU anyway."""

    def __init__(self, model: OdinSplatfactoModel, exchange: Exchange | DeviceExchange, timeline: Timeline) -> None:
        self._model = model
        self._exchange: Any = exchange
        self._timeline = timeline
        self._world = exchange.world
        self._params = list(model.gauss_params)

    def close(self) -> None:
        """Ends the exchange. All ranks, with no unit in flight."""
        self._exchange.close()

    @abstractmethod
    def plan(
        self,
        step: int,
        ranks: list[int],
        cameras: list[PinholeCamera],
        before: Unit | None,
        policy: Quality,
        pending: int,
        signal: Signal,
    ) -> Any:
        """A unit and its scope.

        Args:
            step: of the unit.
            ranks: which of them renders each view.
            cameras: of the views.
            before: the unit that is in flight; its scope is pending while this unit's early rows are read. None:
                nothing is read before everything is published.
            policy: says what is read while the unit before is in flight.
            pending: steps before this one that may still change rows by their gradients.
            signal: what this rank wants the others to know.
        """

    @abstractmethod
    def begin(self, unit: Any, before: Any) -> Signal:
        """Sets ``before.wanted``, for which rows of the unit before this one waits, where this one reads any early; and
        lets all ranks know.

        Returns:
            What the ranks have let each other know with the plan.
        """

    @abstractmethod
    def read(self, unit: Any, rows: Bitmap, stale: Bitmap | None, name: str) -> None:
        """Brings ``rows`` up to date, copies and projects them, and sends what others need of them.

        Args:
            unit: whose views read them.
            rows: the early ones of its scope, or the others.
            stale: those that are read as they are, since a step that they have not missed is still to be taken.
            name: what they are, for timelines.
        """

    @abstractmethod
    def leaves(self, unit: Any) -> list[Splats]:
        """Waits for all that was read; the splats of this rank's views in ascending order of id, as leaves."""

    @abstractmethod
    def push(self, unit: Any, first: bool, signal: Signal = Signal.NONE) -> Any:
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


def is_active(values: Mapping[str, Tensor]) -> Tensor:
    """(R,) bool: which rows have any gradient that is not zero; ``values`` are (R, ...) for each parameter."""
    return torch.stack([(value.flatten(1) != 0).any(1) for value in values.values()]).any(0)


def gradients_of(values: Rows, params: Sequence[str]) -> dict[str, Tensor]:
    """What :func:`pull_back` has added up on the leaves ``values``, zero where nothing was."""
    leaves = {name: getattr(values, name) for name in params}
    return {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()}
