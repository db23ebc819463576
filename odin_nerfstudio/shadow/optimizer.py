"""Adam over primitives that writes only the rows it must (design §3.4)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from odin_nerfstudio.shadow.adam_rows import AdamConstants, AdamRows, MissedSteps, catch_up, step_rows

AdamKind = Literal["dense", "selective"]


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
        self._missed: dict[int, MissedSteps] = {}
        self._announced = False
        self._rates: dict[int, float] = {}

    @torch.no_grad()
    def catch_up(self, rows: Tensor | None = None) -> None:
        """Applies the steps that ``rows`` have missed, as every reader must before it reads.

        Args:
            rows: (R,) int64, all different; None for every row.
        """
        if self.kind == "selective":
            return
        for index, group in enumerate(self.param_groups):
            for param in group["params"]:
                if self.state[param]:
                    chosen = torch.arange(len(param), device=param.device) if rows is None else rows
                    catch_up(self._rows(param), chosen, self._steps(index, param))

    @torch.no_grad()
    def announce(self) -> None:
        """Fixes the learning rate of the coming step before its gradients are known.

        Rows that will have no part in the step can be caught up through it from now on; its own rows must have been
        caught up before, and must not be again until :meth:`take` has taken it on them.
        """
        for index, group in enumerate(self.param_groups):
            for param in group["params"]:
                self._initialize(param)
                self._steps(index, param).append(group["lr"])
            self._rates[index] = group["lr"]
        self._announced = True

    @torch.no_grad()
    def take(self, rows: Tensor, grad: Tensor) -> None:
        """Takes the step that was announced last on some rows of the only parameter, as nerfstudio builds optimizers.

        Args:
            rows: (R,) int64, all different, and in no other call for this step.
            grad: (R, ...) their gradient.
        """
        (param,) = self.param_groups[0]["params"]
        missed = self._steps(0, param)
        step_rows(self._rows(param), rows, _as_rows(grad), self._rates[0], missed.now, missed.constants)

    @torch.no_grad()
    def drift(self) -> Tensor | None:
        """(N,) bound on how far each coordinate of a row may move when it is caught up; None where no row is late.

        |m|/√v ≤ ``reach`` for any history, so the missed steps of a row that is up to date with s move it by at most
        ``reach · A[s]``, and an announced step with a gradient by √β₂/β₁ of that. Only for optimizers of a single
        parameter, as nerfstudio builds them.
        """
        (param,) = self.param_groups[0]["params"]
        if self.kind == "selective" or not self.state[param]:
            return None
        missed = self._steps(0, param)
        reach = missed.constants.reach
        if self._announced:
            reach *= math.sqrt(missed.constants.beta2) / missed.constants.beta1
        return (reach * missed.first[self.state[param]["row_step"].long()]).to(param.dtype)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Takes one step on the rows of each parameter's gradient, sparse (COO, one index dimension) or dense.

        A step that was announced is only counted: :meth:`take` takes it, before or after.
        """
        loss = closure() if closure is not None else None
        for index, group in enumerate(self.param_groups):
            for param in group["params"]:
                if self._announced:
                    self.state[param]["step"] += 1
                    continue
                if param.grad is None:
                    continue
                self._initialize(param)
                state, missed = self.state[param], self._steps(index, param)
                rows, grad = _rows_of(param.grad)
                if self.kind == "dense":
                    catch_up(self._rows(param), rows, missed)
                missed.append(group["lr"])
                state["step"] += 1
                step_rows(self._rows(param), rows, grad, group["lr"], missed.now, missed.constants)
        self._announced = False
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads torch's Adam state; a state without ``row_step`` counts as up to date."""
        super().load_state_dict(state_dict)
        self._missed.clear()
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if state and "row_step" not in state:
                    state["row_step"] = torch.full((len(param),), float(state["step"]), device=param.device)

    def _initialize(self, param: Tensor) -> None:
        state = self.state[param]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
            state["row_step"] = torch.zeros(len(param), device=param.device)

    def _steps(self, index: int, param: Tensor) -> MissedSteps:
        """The tables of parameter group ``index``; begun anew after loading, when every row is up to date."""
        if index not in self._missed:
            group = self.param_groups[index]
            constants = AdamConstants(group["betas"][0], group["betas"][1], group["eps"])
            self._missed[index] = MissedSteps(constants, int(self.state[param]["step"]), param.device)
        return self._missed[index]

    def _rows(self, param: Tensor) -> AdamRows:
        state = self.state[param]
        values, exp_avg, exp_avg_sq = (_as_rows(t) for t in (param.detach(), state["exp_avg"], state["exp_avg_sq"]))
        return AdamRows(values, exp_avg, exp_avg_sq, state["row_step"])


def _rows_of(grad: Tensor) -> tuple[Tensor, Tensor]:
    """Row numbers and (R, D) rows of a gradient."""
    if not grad.is_sparse:
        return torch.arange(len(grad), device=grad.device), _as_rows(grad.contiguous())
    grad = grad.coalesce()
    return grad.indices()[0], _as_rows(grad.values())


def _as_rows(tensor: Tensor) -> Tensor:
    """(N, ...) seen as (N, D), for any D including zero."""
    return tensor.view(len(tensor), math.prod(tensor.shape[1:]))
