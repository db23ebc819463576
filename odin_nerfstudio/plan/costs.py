"""What it costs to render each view, as far as all ranks know (design §2)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray


class ViewCosts:
    """Costs that ranks measured, each of its own views, and told each other.

    What they have told counts from a step on that no rank has planned yet. So all of them assign the views of a step
    by the same costs, whenever they ask.

    Args:
        views: V, number of them.
    """

    def __init__(self, views: int) -> None:
        self._latest = np.full(views, np.nan)
        self._mine: dict[int, float] = {}
        self._from_step: list[tuple[int, NDArray[np.float64]]] = []

    def measure(self, view: int, cost: float) -> None:
        """This rank has rendered a view; ``cost`` > 0 in any unit, the same on all ranks."""
        self._mine[view] = cost

    def take(self) -> dict[int, float]:
        """View → cost, what this rank has measured since it was asked last."""
        taken, self._mine = self._mine, {}
        return taken

    def hear(self, shares: Iterable[Mapping[int, float]], step: int, ahead: int = 0) -> None:
        """Takes up what all ranks have measured since they heard of each other last.

        Args:
            shares: of :meth:`take`, one of each rank, in their order.
            step: the last that was taken.
            ahead: how many after it may be planned already; later ones go by what is heard.
        """
        for share in shares:
            self._latest[list(share)] = list(share.values())
        known = self._latest[~np.isnan(self._latest)]
        if not len(known):
            return
        costs = np.where(np.isnan(self._latest), known.mean(), self._latest)
        self._from_step.append((step + ahead + 1, costs))
        while len(self._from_step) > 1 and self._from_step[1][0] <= step + 1:
            self._from_step.pop(0)

    def at(self, step: int) -> NDArray[np.float64] | None:
        """(V,) the costs that count at a step that was not taken before :meth:`hear` was called last; those that nobody
        has measured are the mean. None before any count."""
        return next((costs for first, costs in reversed(self._from_step) if first <= step), None)
