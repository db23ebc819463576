"""nerfstudio's Trainer, with optimizers that know of missed steps and checkpoints that resume to the same run."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from nerfstudio.engine.optimizers import OptimizerConfig, Optimizers
from nerfstudio.utils.misc import step_check
from nerfstudio.utils.rich_utils import CONSOLE

from odin_nerfstudio.comm.exchange import Signal
from odin_nerfstudio.errors import UserError
from odin_nerfstudio.runs.trainer import RankTrainer, RankTrainerConfig
from odin_nerfstudio.shadow.optimizer import AdamKind, LazyAdam, catch_up_rows
from odin_nerfstudio.splat.pipeline import OdinPipeline, OdinPipelineConfig, total
from odin_nerfstudio.splat.rows import collect, from_checkpoint, to_checkpoint


@dataclass
class LazyAdamConfig(OptimizerConfig):
    """Adam for the parameters of primitives."""

    _target: type = LazyAdam
    lr: float = 1e-3
    """The learning rate for one view per step."""
    eps: float = 1e-15
    """Added to the denominator."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of the two moments for one view per step."""
    kind: AdamKind = "dense"
    """Set by ``--adam``."""

    def scaled(self, views: int, kind: AdamKind) -> LazyAdamConfig:
        """The same optimizer for steps of ``views`` views: lr·√B, βᴮ, ε/√B (Zhao et al. 2024, Grendel, §5)."""
        beta1, beta2 = (beta**views for beta in self.betas)
        root = views**0.5
        return replace(self, lr=self.lr * root, eps=self.eps / root, betas=(beta1, beta2), kind=kind)


@dataclass
class OdinTrainerConfig(RankTrainerConfig):
    """Configuration of :class:`OdinTrainer`."""

    _target: type = field(default_factory=lambda: OdinTrainer)
    pipeline: OdinPipelineConfig = field(default_factory=OdinPipelineConfig)
    """Data and model."""
    adam: AdamKind = "dense"
    """``dense`` gives the values of torch's Adam; ``selective`` leaves out the steps in which a primitive was not seen
    (Taming-3DGS)."""
    batch_scaling: bool = True
    """Scale learning rates and moments with the number of views in a step, as Grendel does."""

    def check(self) -> None:
        """Checks the flags that need no look at the data.

        Raises:
            UserError: for one that cannot be followed.
        """
        super().check()
        if any(steps != 1 for steps in self.gradient_accumulation_steps.values()):
            raise UserError(
                "--gradient-accumulation-steps: every step publishes what it learned. For gradients of more views "
                "leave the flag out and raise --pipeline.datamanager.batch-per-rank."
            )
        if self.log_gradients:
            raise UserError(
                f"--log-gradients {self.log_gradients}: gradients exist only for the rows that a step has seen, and "
                "are gone after it. Leave the flag out."
            )


class OdinTrainer(RankTrainer):
    """Trainer for primitives: saves after every missed step was taken, and loads optimizers with the parameters."""

    config: OdinTrainerConfig
    pipeline: OdinPipeline

    def _build_optimizers(self) -> Optimizers:
        """Optimizers for the current parameters, scaled to the number of views in a step."""
        views = self.pipeline.datamanager.group_size if self.config.batch_scaling else 1
        configs: dict[str, Any] = {}
        for name, entry in self.config.optimizers.items():
            optimizer, scheduler = entry["optimizer"], entry["scheduler"]
            if isinstance(optimizer, LazyAdamConfig):
                optimizer = optimizer.scaled(views, self.config.adam)
                scheduler = scheduler and replace(scheduler, lr_final=scheduler.lr_final * views**0.5)
            configs[name] = {"optimizer": optimizer, "scheduler": scheduler}
        optimizers = Optimizers(configs, self.pipeline.get_param_groups())
        self.pipeline.model.attach(optimizers)
        return optimizers

    def train_iteration(self, step: int) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """One task unit: read → render → loss → backward → push → publish, and the start of the next unit's reading."""
        pipeline, model = self.pipeline, self.pipeline.model
        optimizers, runner = self.optimizers, pipeline.runner
        runner.request = self._request()
        if pipeline.world.size == 1:
            runner.signal |= runner.request
        # Those of primitives have no gradients to forget: the runner takes them.
        others = [optimizer for name, optimizer in optimizers.optimizers.items() if name not in model.gauss_params]
        for optimizer in others:
            optimizer.zero_grad()
        if runner.is_drained:
            pipeline.rebalance()
        found: dict[str, dict[str, torch.Tensor]] = {}

        def render() -> torch.Tensor:
            _, found["losses"], found["metrics"] = pipeline.get_train_loss_dict(step)
            return total(list(found["losses"].values()))

        loss = runner.run(step, render, lambda: self._is_fence(step))
        for optimizer in others:
            pipeline.world.sum_gradients(p for group in optimizer.param_groups for p in group["params"])
            optimizer.step()
        optimizers.scheduler_step_all(step)
        if runner.is_drained and self._meets(step):
            self._meet(step)
            runner.signal &= ~Signal.MEET
        return loss, found["losses"], found["metrics"]

    def _request(self) -> Signal:
        """What this rank wants all of them to know."""
        wants = Signal.STOP if self._interrupted else Signal.NONE
        return wants | Signal.MEET if self._wants_to_meet else wants

    def _meets(self, step: int) -> bool:
        """Whether the ranks come together after this unit; the same on all of them."""
        return self._must_meet(step) or Signal.MEET in self.pipeline.runner.signal

    def _is_fence(self, step: int) -> bool:
        """Whether the next unit must not read anything before this one is published.

        Rows change in number or order, cameras are learned, the ranks meet, the scene is evaluated, or a checkpoint is
        written, from which a run must go on as if it had not been interrupted.

        Raises:
            KeyboardInterrupt: when the run should end, with everything published up to the step before.
        """
        if Signal.STOP in self.pipeline.runner.signal:
            self.pipeline.runner.settle()
            raise KeyboardInterrupt
        config, model = self.config, self.pipeline.model
        learns_cameras = model.config.camera_optimizer.mode != "off"
        looks = (
            config.steps_per_save,
            config.steps_per_eval_batch,
            config.steps_per_eval_image,
            config.steps_per_eval_all_images,
        )
        return (
            self._meets(step)
            or learns_cameras
            or model.strategy.is_fence(step)
            or any(step_check(step, every) for every in looks)
        )

    def _gather_checkpoint(self, step: int) -> dict[str, Any] | None:
        """All ranks' rows in splatfacto's format; the strategy's statistics and the ids beside it."""
        catch_up_rows(self.optimizers.optimizers)
        model = self.pipeline.model
        beside = {"strategy": model.strategy_state, "ids": {"ids": model.ids, "next_id": model.next_id}}
        state = self._own_state(step) | beside
        merged = self.pipeline.placement.merge(collect(model, self.pipeline.history(step)))
        return None if merged is None else to_checkpoint(state, merged, step)

    def _load_checkpoint(self) -> None:
        """Resumes: parameters of the saved number of primitives, then optimizers built for these parameters."""
        state, self._resumed = self._resumed, None
        if state is None:
            return
        self._start_step = state["step"] + 1
        state = from_checkpoint(state, self.pipeline.place(state["pipeline"]["_model.gauss_params.means"]))
        self.pipeline.load_pipeline(state["pipeline"], state["step"])
        self.optimizers = self._build_optimizers()
        self.optimizers.load_optimizers(state["optimizers"])
        if self.config.load_scheduler:
            self.optimizers.load_schedulers(state["schedulers"])
        self.grad_scaler.load_state_dict(state["scalers"])
        device = self.pipeline.model.device
        self.pipeline.model.strategy_state |= {
            key: value.to(device) if isinstance(value, torch.Tensor) else value
            for key, value in state["strategy"].items()
        }
        self.pipeline.model.set_ids(**state["ids"])
        self.pipeline.model.history = None
        CONSOLE.print(f"Resuming after step {state['step']}.")
