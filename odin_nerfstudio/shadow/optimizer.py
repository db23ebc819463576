"""Adam over primitives that writes only the rows it must (design §3.4)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, cast

import torch
from torch import Tensor

from odin_nerfstudio.shadow import adam
from odin_nerfstudio.shadow.adam import AdamConstants, AdamRows, MissedSteps
from odin_nerfstudio.shadow.scope import Drift

AdamKind = Literal["dense", "selective"]
_Place = tuple[int, int]
"""Group, and position in it."""


class LazyAdam(torch.optim.Optimizer):
    """Adam whose step touches only the rows of a sparse gradient; the others are brought up to date when they are read.

    ``dense`` gives the values of ``torch.optim.Adam`` over all rows: a row without gradient still moves with its
    momentum, but those steps are taken at the next :meth:`catch_up`. ``selective`` leaves out the steps in which a row
    had no gradient (Taming-3DGS, Mallick et al. 2024).

    The state of each parameter holds torch's ``step``, ``exp_avg`` and ``exp_avg_sq``, and ``row_step``: (N,) float32,
    the step each row is up to date with (floating point, since gsplat's strategies extend states by float zeros). Rows
    that a strategy adds have zero moments, for which any number of missed steps is no change.

    Args:
        params: parameters or groups; the first dimension is the primitive.
        lr: learning rate.
        betas: decay rates of the moments, β₁ < β₂.
        eps: added to the denominator.
        kind: ``dense`` or ``selective``.

    Raises:
        ValueError: for a β outside [0, 1) or β₁ ≥ β₂, for which the missed steps would not die out.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        kind: AdamKind = "dense",
    ) -> None:
        if not 0 < betas[0] < betas[1] < 1:
            raise ValueError(f"betas must satisfy 0 < β₁ < β₂ < 1, not {betas}")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})
        self.kind = kind
        self._missed: dict[_Place, MissedSteps] = {}
        self._announced = False

    def catch_up(self, rows: Tensor | None = None) -> None:
        """Applies the steps that ``rows`` have missed, as every reader must before it reads.

        Args:
            rows: (R,) int64, all different; None for every row.
        """
        adam.catch_up(self._late(), rows)

    def announce(self) -> None:
        """Fixes the learning rate of the coming step before its gradients are known.

        Rows that will have no part in the step can be caught up through it from now on; its own rows must have been
        caught up before, and must not be again until :meth:`take` has taken it on them.
        """
        adam.announce(self._begin())

    def take(self, rows: Tensor, grad: Tensor) -> None:
        """Takes the step that was announced last on some rows of the only parameter, as nerfstudio builds optimizers.

        Args:
            rows: (R,) int64, all different, and in no other call for this step.
            grad: (R, ...) their gradient.
        """
        adam.take([self._only()], rows, [grad], None, 0)

    def drift(self) -> Tensor | None:
        """(N,) bound on how far each coordinate of a row may move when it is caught up; None where no row is late.

        See :func:`drift_of`; a step that was announced may still have a gradient.
        """
        drift = drift_of(self, pending=int(self._announced))
        return drift and drift.bounds(self.param_groups[0]["params"][0].dtype)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Takes one step on the rows of each parameter's gradient, sparse (COO, one index dimension) or dense.

        A step that was announced is only counted: :meth:`take` takes it, before or after.
        """
        loss = closure() if closure is not None else None
        for place, group, param in self._parameters():
            if self._announced:
                self.state[param]["step"] += 1
                continue
            if param.grad is None:
                continue
            self._initialize(param)
            state = self._rows(place, param)
            rows, grad = _rows_of(param.grad)
            if self.kind == "dense":
                adam.catch_up([state], rows)
            adam.announce([(state.missed, group["lr"])])
            self.state[param]["step"] += 1
            adam.take([state], rows, [grad], None, 0)
        self._announced = False
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads torch's Adam state; a state without ``row_step`` counts as up to date."""
        super().load_state_dict(state_dict)
        self._missed.clear()
        for _, _, param in self._parameters():
            state = self.state[param]
            if state and "row_step" not in state:
                state["row_step"] = torch.full((len(param),), float(state["step"]), device=param.device)

    def _parameters(self) -> Iterator[tuple[_Place, dict[str, Any], Tensor]]:
        """Every parameter: its place, which stays when a strategy replaces it, its group and itself."""
        for index, group in enumerate(self.param_groups):
            for position, param in enumerate(group["params"]):
                yield (index, position), group, param

    def _late(self) -> list[AdamRows]:
        """The parameters of which rows may have missed steps."""
        if self.kind == "selective":
            return []
        return [self._rows(place, param) for place, _, param in self._parameters() if self.state[param]]

    def _begin(self) -> list[tuple[MissedSteps, float]]:
        """What there is to announce: the tables of each parameter and its learning rate."""
        self._announced = True
        steps = []
        for place, group, param in self._parameters():
            self._initialize(param)
            steps.append((self._rows(place, param).missed, group["lr"]))
        return steps

    def _end(self) -> None:
        """Counts the step that was announced."""
        for _, _, param in self._parameters():
            self.state[param]["step"] += 1
        self._announced = False
        self._opt_called = True  # torch's schedulers warn where they think that no step was taken

    def _only(self) -> AdamRows:
        """The only parameter, as nerfstudio builds optimizers."""
        (param,) = self.param_groups[0]["params"]
        return self._rows((0, 0), param)

    def _initialize(self, param: Tensor) -> None:
        state = self.state[param]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
            state["row_step"] = torch.zeros(len(param), device=param.device)

    def _rows(self, place: _Place, param: Tensor) -> AdamRows:
        """A parameter with its state. The tables begin anew after loading, when every row is up to date."""
        state = self.state[param]
        missed = self._missed.get(place)
        if missed is None:
            group = self.param_groups[place[0]]
            constants = AdamConstants(group["betas"][0], group["betas"][1], group["eps"])
            missed = self._missed[place] = MissedSteps(constants, int(state["step"]), param.device)
        return AdamRows(param, state["exp_avg"], state["exp_avg_sq"], state["row_step"], missed)


def catch_up_rows(optimizers: Mapping[str, torch.optim.Optimizer], rows: Tensor | None = None) -> None:
    """:meth:`LazyAdam.catch_up` of all optimizers at once; those that are not lazy have nothing to catch up.

    Args:
        optimizers: of parameters with the same number of rows.
        rows: (R,) int64, all different; None for every row.
    """
    adam.catch_up([param for optimizer in _lazy(optimizers) for param in optimizer._late()], rows)


def announce_all(optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
    """:meth:`LazyAdam.announce` of all optimizers at once, but those that are not lazy.

    The step announced before may still be open: :func:`take_rows` takes it with ``age`` 1 on the rows that are left.
    Until then these rows must not be caught up, as those of the new step.
    """
    adam.announce([step for optimizer in _lazy(optimizers) for step in optimizer._begin()])


def end_step(optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
    """Counts the step that was announced, as ``step()`` of each lazy optimizer would."""
    for optimizer in _lazy(optimizers):
        optimizer._end()


def take_rows(
    optimizers: Mapping[str, torch.optim.Optimizer],
    rows: Tensor,
    gradients: Mapping[str, Tensor],
    active: Tensor | None = None,
    age: int = 0,
) -> None:
    """:meth:`LazyAdam.take` of several optimizers at once, for either of the two steps announced last.

    Args:
        optimizers: of parameters with the same number of rows; lazy for every name in ``gradients``.
        rows: (R,) int64, all different; the active ones are in no other call for this step.
        gradients: (R, ...) for each parameter.
        active: (R,) bool, the rows that take the step; the others catch up with it later. None: all.
        age: 0 for the step announced last, 1 for the one before.

    Raises:
        IndexError: for a step that was not announced since the optimizer was built or loaded.
    """
    params = [cast(LazyAdam, optimizers[name])._only() for name in gradients]
    adam.take(params, rows, list(gradients.values()), active, age)


def drift_of(optimizer: torch.optim.Optimizer | None, pending: int = 0) -> Drift | None:
    """Bound on how far each coordinate of a row may move when it is caught up, by the step the row is up to date with.

    |m|/√v ≤ ``reach`` for any history, so the missed steps of a row that is up to date with s move it by at most
    ``reach · A[s]``, and each announced step that may still have a gradient multiplies that by √β₂/β₁.

    Args:
        optimizer: of a single parameter, as nerfstudio builds them; nothing is late without one.
        pending: how many of the announced steps may still have a gradient on a row. A step that is not announced is no
            part of the bound, since its learning rate is not known.

    Returns:
        The bounds, T = now + 1 of them; None where no row is late.
    """
    if not isinstance(optimizer, LazyAdam) or not (late := optimizer._late()):
        return None
    ((_, _, _, row_step, missed),) = late
    beta1, beta2, _ = missed.constants
    return Drift(row_step, missed.first, missed.constants.reach * (math.sqrt(beta2) / beta1) ** pending)


def _lazy(optimizers: Mapping[str, torch.optim.Optimizer]) -> Iterator[LazyAdam]:
    return (optimizer for optimizer in optimizers.values() if isinstance(optimizer, LazyAdam))


def _rows_of(grad: Tensor) -> tuple[Tensor, Tensor]:
    """Row numbers and (R, ...) rows of a gradient, dense or sparse."""
    if not grad.is_sparse:
        return torch.arange(len(grad), device=grad.device), grad.contiguous()
    grad = grad.coalesce()
    return grad.indices()[0], grad.values()
