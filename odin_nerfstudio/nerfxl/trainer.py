"""nerfstudio's Trainer for tiles: sums shared gradients over ranks, and merges all tiles into one checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from nerfstudio.engine.optimizers import OptimizerConfig
from nerfstudio.utils.rich_utils import CONSOLE

from odin_nerfstudio.errors import UserError
from odin_nerfstudio.nerfxl.model import tile_of
from odin_nerfstudio.nerfxl.pipeline import NerfXLPipeline, NerfXLPipelineConfig
from odin_nerfstudio.runs.memory import peak_memory
from odin_nerfstudio.runs.trainer import RankTrainer, RankTrainerConfig

_MODEL = "_model."


def fused_adam(params: Iterable[torch.Tensor], **options: Any) -> torch.optim.Adam:
    """torch's Adam, in one pass over memory where this version of torch has that for the parameters' device."""
    params = list(params)
    try:
        return torch.optim.Adam(params, fused=True, **options)
    except RuntimeError:
        return torch.optim.Adam(params, **options)


@dataclass
class FusedAdamConfig(OptimizerConfig):
    """Adam for large tables."""

    _target: Any = fused_adam
    lr: float = 1e-2
    """The learning rate to use."""
    eps: float = 1e-15
    """Added to the denominator."""
    betas: tuple[float, float] = (0.9, 0.99)
    """Decay rates of the two moments (those of instant-ngp)."""


@dataclass
class NerfXLTrainerConfig(RankTrainerConfig):
    """Configuration of :class:`NerfXLTrainer`."""

    _target: type = field(default_factory=lambda: NerfXLTrainer)
    pipeline: NerfXLPipelineConfig = field(default_factory=NerfXLPipelineConfig)
    """Data and model."""

    def check(self) -> None:
        """Checks the flags that need no look at the data.

        Raises:
            UserError: for one that cannot be followed.
        """
        super().check()
        if any(steps != 1 for steps in self.gradient_accumulation_steps.values()):
            raise UserError(
                "--gradient-accumulation-steps: leave the flag out and raise "
                "--pipeline.datamanager.train-num-rays-per-batch."
            )
        if (rays := self.pipeline.datamanager.train_num_rays_per_batch) < 1:
            raise UserError(f"--pipeline.datamanager.train-num-rays-per-batch {rays}: at least one is needed.")


class NerfXLTrainer(RankTrainer):
    """Trainer for the tiles of a rank."""

    config: NerfXLTrainerConfig
    pipeline: NerfXLPipeline

    def _read_checkpoint(self) -> dict[str, Any] | None:
        """As every trainer's; a run that resumes has the checkpoint's number of tiles unless told otherwise."""
        state = super()._read_checkpoint()
        if state is not None and self.config.pipeline.model.tiles is None:
            extra = state["pipeline"].get(f"{_MODEL}_extra_state", {})
            if "tiles" in extra:
                self.config.pipeline.model.tiles = len(extra["tiles"]["bounds"])
        return state

    def train_iteration(self, step: int) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Render, exchange, loss, backward; then the shared gradients are summed and every rank takes its step."""
        world, timeline = self.pipeline.world, self.pipeline.timeline
        stops, meets = world.any_of([self._interrupted, self._wants_to_meet])
        if stops:
            raise KeyboardInterrupt
        self.optimizers.zero_grad_all()
        _, losses, metrics = self.pipeline.get_train_loss_dict(step)
        loss = torch.stack(list(losses.values())).sum()
        with timeline.span("compute", step, "backward"):
            loss.backward()
        if world.size > 1:
            with timeline.span("communication", step, "shared gradients"), timeline.span("wait", step, "gradients"):
                world.sum_gradients(self.pipeline.shared_parameters())
        with timeline.span("compute", step, "step"):
            self.optimizers.optimizer_step_all()
        self.optimizers.scheduler_step_all(step)
        timeline.count(step, memory=peak_memory(self.pipeline.device))
        timeline.finish(step)
        if meets or self._must_meet(step):
            self._meet(step)
        return loss, losses, metrics

    def _gather_checkpoint(self, step: int) -> dict[str, Any] | None:
        """One state as of a process that holds all tiles; rank by rank, each sends its own."""
        state = self._own_state(step)
        fields = state["optimizers"].pop("fields", None)
        private = {name: value for name, value in state["pipeline"].items() if _is_private(name)}
        parts = self.pipeline.world.gather_objects((private, fields))
        if parts is None:
            return None
        for private, _ in parts:
            state["pipeline"].update(private)
        state["optimizers"]["fields"] = merge_optimizers([fields for _, fields in parts if fields is not None])
        return state

    def _load_checkpoint(self) -> None:
        """Resumes, on any number of ranks."""
        state, self._resumed = self._resumed, None
        if state is None:
            return
        self._start_step = state["step"] + 1
        self.pipeline.load_pipeline(state["pipeline"], state["step"])
        model, optimizers = self.pipeline.model, dict(state["optimizers"])
        fields = optimizers.pop("fields")
        if len(model.held):
            each = len(fields["param_groups"][0]["params"]) // len(model.tiles)
            optimizers["fields"] = part_of_optimizer(fields, range(model.held.start * each, model.held.stop * each))
        self.optimizers.load_optimizers(optimizers)
        if self.config.load_scheduler:
            schedulers = {name: own for name, own in state["schedulers"].items() if name in self.optimizers.schedulers}
            self.optimizers.load_schedulers(schedulers)
        self.grad_scaler.load_state_dict(state["scalers"])
        CONSOLE.print(f"Resuming after step {state['step']}.")


def merge_optimizers(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The state of one optimizer over all parameters, from those over consecutive parts of them."""
    merged: dict[int, Any] = {}
    for state in states:
        first = len(merged)
        merged |= {first + index: state["state"].get(index, {}) for index in state["param_groups"][0]["params"]}
    group = {**states[0]["param_groups"][0], "params": list(merged)}
    return {"state": {index: own for index, own in merged.items() if own}, "param_groups": [group]}


def part_of_optimizer(state: dict[str, Any], params: range) -> dict[str, Any]:
    """The state of an optimizer over some consecutive parameters: the inverse of :func:`merge_optimizers`."""
    own = {index - params.start: state["state"][index] for index in params if index in state["state"]}
    group = {**state["param_groups"][0], "params": list(range(len(params)))}
    return {"state": own, "param_groups": [group]}


def _is_private(name: str) -> bool:
    """Whether an entry of the pipeline's state belongs to one tile."""
    return tile_of(name.removeprefix(_MODEL)) is not None
