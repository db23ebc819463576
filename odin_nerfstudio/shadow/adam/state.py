"""What Adam knows of a parameter: its moments, how far each row has come, and what the steps since then add up to."""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

_NEGLIGIBLE = 1e-18
"""Decay after which a missed step cannot change a float64 parameter."""
_KEPT = 2
"""Steps at most that are announced and not taken by all of their rows."""


class AdamConstants(NamedTuple):
    """What every step of a run shares."""

    beta1: float
    beta2: float
    eps: float

    @property
    def horizon(self) -> int:
        """Number of missed steps after which the rest of the momentum moves nothing."""
        return math.ceil(math.log(_NEGLIGIBLE) / math.log(self.beta1 / self.beta2))

    @property
    def reach(self) -> float:
        """Largest |m|/√v that any gradient history can reach: (1−β₁)/√(1−β₂) · 1/√(1−β₁²/β₂), by Cauchy–Schwarz."""
        return (1 - self.beta1) / math.sqrt((1 - self.beta2) * (1 - self.beta1**2 / self.beta2))

    def corrections(self, step: int) -> tuple[float, float]:
        """c₁ and c₂ of step number ``step``, from 1."""
        return 1 - self.beta1**step, 1 - self.beta2**step


class MissedSteps:
    """The sums A and B, indexed by the step a row is up to date with, and the learning rate of every step.

    Args:
        constants: β₁, β₂ and ε of the run; β₁ must be below β₂.
        start: steps that were taken before; rows must be up to date with them.
        device: where the tables live.
    """

    def __init__(self, constants: AdamConstants, start: int, device: torch.device) -> None:
        self.constants = constants
        self.now = start
        self._latest: deque[float] = deque(maxlen=_KEPT)
        self.capacity = start + 1024
        self.tables = torch.zeros(3, self.capacity, dtype=torch.float64, device=device)
        """(3, capacity) float64: A, B and rates, of which ``now + 1`` columns are in use."""
        self._horizon = constants.horizon
        ages = torch.arange(self._horizon, 0, -1, dtype=torch.float64, device=device)
        self._decay_first = (constants.beta1 / math.sqrt(constants.beta2)) ** ages
        self._decay_second = (constants.beta1 / constants.beta2) ** ages

    @property
    def first(self) -> Tensor:
        """(now + 1,) float64: A."""
        return self.tables[0, : self.now + 1]

    @property
    def second(self) -> Tensor:
        """(now + 1,) float64: B."""
        return self.tables[1, : self.now + 1]

    @property
    def rates(self) -> Tensor:
        """(now + 1,) float64: learning rate of each step since ``start``; step t is at index t."""
        return self.tables[2, : self.now + 1]

    @property
    def reached(self) -> int:
        """How many of the last steps the newest one adds to: a row that has come no further is moved by nothing."""
        return min(self.now, self._horizon)

    def rate(self, age: int) -> float:
        """Learning rate of the newest step (``age`` 0) or of the one before it (1).

        Raises:
            IndexError: for a step before ``start``.
        """
        return self._latest[age]

    def begin(self, lr: float) -> None:
        """Counts one more step, with learning rate ``lr``, and makes room for it. The tables do not know of it yet."""
        if self.now + 2 > self.capacity:
            self.tables = torch.cat([self.tables, torch.zeros_like(self.tables)], dim=1)
            self.capacity *= 2
        self.now += 1
        self._latest.appendleft(lr)

    def weights(self) -> tuple[float, float]:
        """lr·√c₂/c₁ and lr·c₂/c₁ of the newest step: its shares in A and B, before the decay."""
        lr = self.rate(0)
        c1, c2 = self.constants.corrections(self.now)
        return lr * math.sqrt(c2) / c1, lr * c2 / c1

    def append(self, lr: float) -> None:
        """Records that a step with learning rate ``lr`` was taken; rows not in it have missed it."""
        self.begin(lr)
        weight_first, weight_second = self.weights()
        reached = slice(self.now - self.reached, self.now)
        oldest = self._horizon - self.reached
        self.tables[0, reached].add_(self._decay_first[oldest:], alpha=weight_first)
        self.tables[1, reached].add_(self._decay_second[oldest:], alpha=weight_second)
        self.tables[2, self.now].fill_(lr)


class AdamRows(NamedTuple):
    """One parameter with all that Adam knows of it; its N rows are written in place."""

    values: Tensor
    """(N, ...) the parameter."""
    exp_avg: Tensor
    """(N, ...) first moment."""
    exp_avg_sq: Tensor
    """(N, ...) second moment."""
    row_step: Tensor
    """(N,) float32: the step each row is up to date with."""
    missed: MissedSteps
    """The steps that rows may have missed."""

    def flat(self) -> tuple[Tensor, Tensor, Tensor]:
        """Values and moments as (N, D): views."""
        return flat(self.values), flat(self.exp_avg), flat(self.exp_avg_sq)


def flat(tensor: Tensor) -> Tensor:
    """(N, ...) seen as (N, D), for any D including zero."""
    return tensor.view(len(tensor), math.prod(tensor.shape[1:]))


def safety(dtype: torch.dtype) -> float:
    """Bound on ε/√v below which the third order of the expansion is under the rounding of ``dtype``."""
    return 1e-4 if dtype == torch.float32 else 1e-8
