"""nerfstudio's Trainer, with optimizers that know of missed steps and checkpoints that resume to the same run."""

from __future__ import annotations

import signal
import threading
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from nerfstudio.configs.base_config import MachineConfig, ViewerConfig
from nerfstudio.engine.optimizers import OptimizerConfig, Optimizers
from nerfstudio.engine.trainer import Trainer, TrainerConfig
from nerfstudio.utils.misc import step_check
from nerfstudio.utils.rich_utils import CONSOLE

from odin_nerfstudio.comm.checkpoint import checkpoint_path, read_checkpoint, write_checkpoint
from odin_nerfstudio.comm.exchange import Signal
from odin_nerfstudio.errors import UserError, exit_with_sentence
from odin_nerfstudio.shadow.optimizer import AdamKind, LazyAdam
from odin_nerfstudio.splat.densify import catch_up
from odin_nerfstudio.splat.pipeline import OdinPipeline, OdinPipelineConfig
from odin_nerfstudio.splat.rows import collect, from_checkpoint, to_checkpoint

SECONDS_BETWEEN_SHOWS = 1.0
"""How old the viewer's copy of a scene on several ranks may be while somebody looks at it."""


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
class OdinTrainerConfig(TrainerConfig):
    """Configuration of :class:`OdinTrainer`."""

    _target: type = field(default_factory=lambda: OdinTrainer)
    pipeline: OdinPipelineConfig = field(default_factory=OdinPipelineConfig)
    """Data and model."""
    adam: AdamKind = "dense"
    """``dense`` gives the values of torch's Adam; ``selective`` leaves out the steps in which a primitive was not seen
    (Taming-3DGS)."""
    batch_scaling: bool = True
    """Scale learning rates and moments with the number of views in a step, as Grendel does."""
    machine: MachineConfig = field(
        default_factory=lambda: MachineConfig(device_type="cuda" if torch.cuda.is_available() else "cpu")
    )
    """Devices; without flags, what this machine has."""
    viewer: ViewerConfig = field(
        default_factory=lambda: ViewerConfig(websocket_host="127.0.0.1", num_rays_per_chunk=1 << 15)
    )
    """The live viewer; it listens on this machine only, unless ``--viewer.websocket-host`` says otherwise."""

    def save_config(self) -> None:
        """Checks what ns-train can be told before anything is set up; the trainer writes the file once the run stands.

        Raises:
            SystemExit: with a sentence.
        """
        with exit_with_sentence():
            self.check()
            _check_processes(self.machine)

    def check(self) -> None:
        """Checks the flags that need no look at the data.

        Raises:
            UserError: for one that cannot be followed.
        """
        device = self.machine.device_type
        if device not in ("cpu", "cuda"):
            raise UserError(f"--machine.device-type {device}: splats are rendered on cpu and cuda only.")
        if device == "cuda" and not torch.cuda.is_available():
            raise UserError(
                "--machine.device-type cuda: torch sees no CUDA device here. Leave the flag out or set it to cpu."
            )
        for flag, chosen in {"mixed-precision": self.mixed_precision, "use-grad-scaler": self.use_grad_scaler}.items():
            if chosen:
                raise UserError(f"--{flag} {chosen}: splats are trained in float32 only. Leave the flag out.")
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

    def get_checkpoint_dir(self) -> Path:
        """Where this run keeps its checkpoints.

        Every ns- tool asks here before it opens the latest of them, so this is where a damaged one is named.

        Raises:
            SystemExit: with a sentence, when the folder exists and its latest checkpoint cannot be read.
        """
        folder = super().get_checkpoint_dir()
        if folder.exists():
            with exit_with_sentence():
                _check_readable(checkpoint_path(folder))
        return folder


class OdinTrainer(Trainer):
    """Trainer for primitives: saves after every missed step was taken, and loads optimizers with the parameters."""

    config: OdinTrainerConfig
    pipeline: OdinPipeline
    training_state: Literal["training", "paused", "completed"]
    _interrupted = False
    _shown = 0.0
    """When the viewer got the scene last, by the monotonic clock."""
    _finished = False
    """Whether the last checkpoint has been written."""

    def setup(self, test_mode: Literal["test", "val", "inference"] = "val") -> None:
        """Sets up the run. Nothing is written before the checkpoint to resume from and the capture were read."""
        self.config.pipeline.seed = self.config.machine.seed
        with exit_with_sentence():
            self._resumed = self._read_checkpoint()
            super().setup(test_mode)

    def setup_optimizers(self) -> Optimizers:
        """nerfstudio calls this once the pipeline stands: the moment from which the run exists on disk."""
        super(OdinTrainerConfig, self.config).save_config()
        return self._build_optimizers()

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
        optimizers, runner, timeline = self.optimizers, pipeline.runner, pipeline.runner.timeline
        runner.request = self._request()
        if pipeline.world.size == 1:
            runner.signal |= runner.request
        self._stop_if_asked()
        optimizers.zero_grad_all()
        if runner.is_drained:
            pipeline.rebalance()
        _, losses, metrics = pipeline.get_train_loss_dict(step)
        loss = torch.stack(list(losses.values())).sum()
        runner.settle()
        self._stop_if_asked()
        for name in model.gauss_params:
            optimizers.optimizers[name].announce()
        if not self._is_fence(step):
            with timeline.span("compute", step + 1, "early splats"):
                runner.begin(step + 1)
        with timeline.span("compute", step, "backward"):
            loss.backward()
        runner.publish()
        for name, optimizer in optimizers.optimizers.items():
            if name not in model.gauss_params:
                pipeline.world.sum_gradients(p for group in optimizer.param_groups for p in group["params"])
                optimizer.step()
        optimizers.scheduler_step_all(step)
        if runner.is_drained and (Signal.SHOW in runner.signal or self._is_last(step)):
            pipeline.show()
            runner.signal, self._shown = runner.signal & ~Signal.SHOW, time.monotonic()
        return loss, losses, metrics

    def _stop_if_asked(self) -> None:
        if Signal.STOP in self.pipeline.runner.signal:
            raise KeyboardInterrupt

    def _request(self) -> Signal:
        """What this rank wants all of them to know."""
        wants = Signal.STOP if self._interrupted else Signal.NONE
        shared = self.pipeline.world.size > 1 and self.viewer_state is not None
        if (
            shared
            and self.viewer_state.viser_server.get_clients()
            and time.monotonic() - self._shown > SECONDS_BETWEEN_SHOWS
        ):
            wants |= Signal.SHOW
        return wants

    def _is_fence(self, step: int) -> bool:
        """Whether the next unit must not read anything before this one is published.

        Rows change in number or order, cameras are learned, the scene is shown or evaluated, or a checkpoint is
        written, from which a run must go on as if it had not been interrupted.
        """
        config, model = self.config, self.pipeline.model
        shown = Signal.SHOW in self.pipeline.runner.signal or model.config.camera_optimizer.mode != "off"
        looks = (
            config.steps_per_save,
            config.steps_per_eval_batch,
            config.steps_per_eval_image,
            config.steps_per_eval_all_images,
        )
        return (
            self._is_last(step)
            or shown
            or model.strategy.is_fence(step)
            or any(step_check(step, every) for every in looks)
        )

    def _is_last(self, step: int) -> bool:
        return step == self._start_step + self.config.max_num_iterations - 1

    def train(self) -> None:
        """Trains; an interruption or an unreadable image saves what was learned before the process ends.

        Raises:
            SystemExit: with a sentence, for mistakes in the input that show only now.
        """
        with exit_with_sentence(), self._saving_on_the_way_out(), self._stopping_between_steps():
            super().train()

    @contextmanager
    def _stopping_between_steps(self) -> Iterator[None]:
        """Lets Ctrl-C take effect where all ranks have finished the same step, or saved the last one.

        A second one takes effect at once.
        """

        def interrupt(*_: Any) -> None:
            if self._interrupted or self._finished:
                raise KeyboardInterrupt
            self._interrupted = True
            if self.training_state == "paused":
                self.training_state = "training"  # goes on to the next step, and stops there

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGINT, interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    @contextmanager
    def _saving_on_the_way_out(self) -> Iterator[None]:
        try:
            yield
        except (KeyboardInterrupt, UserError) as error:
            # All ranks must save together, which they do when interrupted; a mistake is met by one of them alone.
            together = self.pipeline.world.size == 1 or isinstance(error, KeyboardInterrupt)
            if together and self.training_state != "completed" and self.step > self._start_step:
                CONSOLE.log(f"Stopping: saving step {self.step - 1}.")
                self.save_checkpoint(self.step - 1)
            raise

    def save_checkpoint(self, step: int) -> None:
        """Writes one checkpoint of all ranks in splatfacto's format; the strategy's statistics and the ids beside it.

        Training goes on when that fails, since a disk may have room again at the next save.

        Raises:
            UserError: on every rank, when the last checkpoint of a run cannot be written.
            KeyboardInterrupt: after the last one, if Ctrl-C was pressed meanwhile.
        """
        problem = self._write_checkpoint(step)
        if self.training_state != "completed":
            if problem is not None:
                CONSOLE.print(problem, style="bold red", markup=False)
            return
        problem = self.pipeline.world.broadcast_object(problem)
        if problem is not None:
            raise UserError(problem)
        self._finished = True
        if self._interrupted:
            raise KeyboardInterrupt

    def _write_checkpoint(self, step: int) -> str | None:
        """Gathers all ranks' rows and writes them on rank 0, which returns a sentence when it could not."""
        optimizers = self.optimizers
        catch_up(optimizers.optimizers)
        path = self.checkpoint_dir / f"step-{step:09d}.ckpt"
        state = {
            "step": step,
            "pipeline": self.pipeline.state_dict(),
            "optimizers": {name: optimizer.state_dict() for name, optimizer in optimizers.optimizers.items()},
            "schedulers": {name: scheduler.state_dict() for name, scheduler in optimizers.schedulers.items()},
            "scalers": self.grad_scaler.state_dict(),
            "strategy": self.pipeline.model.strategy_state,
            "ids": {"ids": self.pipeline.model.ids, "next_id": self.pipeline.model.next_id},
        }
        merged = self.pipeline.placement.merge(collect(self.pipeline.model))
        if merged is None:
            return None
        state = to_checkpoint(state, merged)
        try:
            write_checkpoint(path, state)
        except UserError as error:
            return str(error)
        if self.config.save_only_latest_checkpoint:
            for other in self.checkpoint_dir.glob("step-*.ckpt"):
                if other != path:
                    other.unlink()
        return None

    def _read_checkpoint(self) -> dict[str, Any] | None:
        """What ``--load-dir`` or ``--load-checkpoint`` asks to resume from."""
        path = self.config.load_checkpoint
        if self.config.load_dir is not None:
            path = checkpoint_path(self.config.load_dir, self.config.load_step)
        return None if path is None else read_checkpoint(path)

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
        CONSOLE.print(f"Resuming after step {state['step']}.")


def _check_processes(machine: MachineConfig) -> None:
    """ns-train starts one process for each GPU, and several only where there are GPUs."""
    count = machine.num_devices
    if count < 1:
        raise UserError(f"--machine.num-devices {count}: at least one process is needed.")
    if machine.device_type == "cuda":
        if count > torch.cuda.device_count():
            raise UserError(
                f"--machine.num-devices {count}: torch sees {torch.cuda.device_count()} GPUs here, and every process "
                "needs its own."
            )
    elif count * machine.num_machines > 1:
        flag = f"--machine.num-devices {count}" if count > 1 else f"--machine.num-machines {machine.num_machines}"
        raise UserError(
            f"{flag}: ns-train starts several processes on GPUs only. On CPUs use odin-train odin-splatfacto "
            f"--nproc-per-node {count} with the same arguments."
        )


def _check_readable(path: Path) -> None:
    """Looks at the archive's directory only: a file that was cut off has none."""
    if not zipfile.is_zipfile(path):
        raise UserError(f"{path}: is cut off or not a checkpoint. Remove it and use an earlier one.")
