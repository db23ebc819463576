"""The rows of one rank, and how its strategy learns of the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from gsplat.strategy.ops import _update_param_with_optimizer
from torch import Tensor
from torch.nn import Parameter

from odin_nerfstudio.splat.densify.rowwise import sigmoid

Optimizers = Mapping[str, torch.optim.Optimizer]
Gather = Callable[[Tensor], Tensor]
"""Concatenates a tensor of any number of rows over all ranks, in the same order on each. Every rank calls it."""


def alone(rows: Tensor) -> Tensor:
    """The :data:`Gather` of a rank that has all the rows."""
    return rows


@dataclass
class Shard:
    """The N primitives that one rank owns, in ascending order of their global ids."""

    params: torch.nn.ParameterDict
    """Name → (N, ...) parameter, before activation."""
    optimizers: Optimizers
    """One of a single parameter for each name."""
    state: dict[str, Any]
    """The strategy's state; every tensor in it has N rows."""
    ids: Tensor
    """(N,) int64 global ids, ascending."""
    next_id: int
    """The id of the next new primitive of any rank."""
    total: int
    """Number of primitives of all ranks."""
    gather: Gather = alone
    """Collects rows of all ranks."""

    def __len__(self) -> int:
        return len(self.ids)

    def opacity(self) -> Tensor:
        """(N,) after activation."""
        return sigmoid(self.params["opacities"].detach().flatten())

    def scale(self) -> Tensor:
        """(N, 3) standard deviations, world units."""
        return torch.exp(self.params["scales"].detach())

    def count(self) -> None:
        """Brings ``total`` up to date. Every rank calls it."""
        self.total = int(self.gather(torch.tensor([len(self)], device=self.ids.device)).sum())

    def gather_by_id(self, ids: Tensor, *columns: Tensor) -> tuple[Tensor, ...]:
        """``ids`` (R,) int64 and ``columns`` (R, ...) of all ranks, in ascending order of the ids."""
        everyone, order = self.gather(ids).sort()
        return everyone, *(self.gather(column)[order] for column in columns)

    @torch.no_grad()
    def select(self, source: Tensor, ids: Tensor, fresh: Tensor | None = None) -> None:
        """Replaces all rows: row i becomes a copy of row ``source[i]``, called ``ids[i]``.

        Args:
            source: (M,) int64 rows.
            ids: (M,) int64, ascending.
            fresh: (M,) bool, rows whose moments are zero from now on; None for no row.
        """

        def values(_: str, param: Tensor) -> Parameter:
            return Parameter(param[source])

        def moments(name: str, state: Tensor) -> Tensor:
            selected = state[source]
            if fresh is not None and name != "row_step":
                selected[fresh] = 0
            return selected

        _update_param_with_optimizer(values, moments, self.params, dict(self.optimizers), names=list(self.params))
        for name, value in self.state.items():
            if isinstance(value, Tensor):
                self.state[name] = value[source]
        self.ids = ids
