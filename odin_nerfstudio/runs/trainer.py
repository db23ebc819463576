"""nerfstudio's Trainer on several ranks: they stop after the same step, save together, and say what is wrong."""

from __future__ import annotations

import signal
import threading
import time
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from nerfstudio.configs.base_config import MachineConfig, ViewerConfig
from nerfstudio.engine.optimizers import Optimizers
from nerfstudio.engine.trainer import Trainer, TrainerConfig
from nerfstudio.utils.rich_utils import CONSOLE

from odin_nerfstudio.comm.checkpoint import checkpoint_path, read_checkpoint, write_checkpoint
from odin_nerfstudio.errors import UserError, exit_with_sentence
from odin_nerfstudio.viewer.scalars import put_scalars
from odin_nerfstudio.viewer.trace import FILE_NAME, write_trace

SECONDS_BETWEEN_SHOWS = 1.0
"""How old what the viewer shows of a scene may be while somebody looks at it."""
UNITS_BETWEEN_MEETINGS = 200
"""After so many units rank 0 hears what the others recorded, if it did not before."""


@dataclass
class RankTrainerConfig(TrainerConfig):
    """Configuration of a :class:`RankTrainer`."""

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
            _check_processes(self.machine, self.method_name)

    def check(self) -> None:
        """Checks the flags that need no look at the data.

        Raises:
            UserError: for one that cannot be followed.
        """
        device = self.machine.device_type
        if device not in ("cpu", "cuda"):
            raise UserError(f"--machine.device-type {device}: {self.method_name} runs on cpu and cuda only.")
        if device == "cuda" and not torch.cuda.is_available():
            raise UserError(
                "--machine.device-type cuda: torch sees no CUDA device here. Leave the flag out or set it to cpu."
            )
        for flag, chosen in {"mixed-precision": self.mixed_precision, "use-grad-scaler": self.use_grad_scaler}.items():
            if chosen:
                raise UserError(f"--{flag} {chosen}: {self.method_name} trains in float32 only. Leave the flag out.")

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


class RankTrainer(Trainer, ABC):
    """Trainer whose ranks stop after the same step and write one checkpoint together.

    A subclass says in :meth:`_gather_checkpoint` what a checkpoint holds, and loads it from ``_resumed``. Its
    ``train_iteration`` calls :meth:`_meet` after units on which all ranks agree. Its pipeline has a ``world``, a
    ``monitor``, and ``meet(step, show)``, which brings all ranks together.
    """

    config: RankTrainerConfig
    training_state: Literal["training", "paused", "completed"]
    _interrupted = False
    _finished = False
    """Whether the last checkpoint has been written."""
    _resumed: dict[str, Any] | None = None
    """The checkpoint to resume from, until it is loaded."""
    _shown = 0.0
    """When the ranks met last, by the monotonic clock."""

    def setup(self, test_mode: Literal["test", "val", "inference"] = "val") -> None:
        """Sets up the run. Nothing is written before the checkpoint to resume from and the capture were read."""
        self.config.pipeline.seed = self.config.machine.seed
        with exit_with_sentence():
            self._resumed = self._read_checkpoint()
            super().setup(test_mode)
        self._tell_port()

    def _tell_port(self) -> None:
        """viser takes the next port when the one it was asked for is taken, and nerfstudio does not notice."""
        wanted, viewer = self.config.viewer.websocket_port, self.viewer_state
        if viewer is None or wanted is None:
            return
        port = viewer.viser_server.get_port()
        if port != wanted:
            host = self.config.viewer.websocket_host
            CONSOLE.print(f"Port {wanted} is taken: the viewer is at http://{host}:{port}", style="bold yellow")

    def setup_optimizers(self) -> Optimizers:
        """nerfstudio calls this once the pipeline stands: the moment from which the run exists on disk."""
        super(RankTrainerConfig, self.config).save_config()
        return self._build_optimizers()

    def _build_optimizers(self) -> Optimizers:
        return super().setup_optimizers()

    def _is_last(self, step: int) -> bool:
        return step == self._start_step + self.config.max_num_iterations - 1

    def train(self) -> None:
        """Trains; an interruption or an unreadable image saves what was learned before the process ends.

        Raises:
            SystemExit: with a sentence, for mistakes in the input that show only now.
        """
        monitor = self.pipeline.monitor
        monitor.is_training, monitor.save_trace = True, self._save_trace
        try:
            with exit_with_sentence(), self._saving_on_the_way_out(), self._stopping_between_steps():
                super().train()
        finally:
            monitor.is_training = False

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
        """Writes one checkpoint of all ranks; all of them call this together.

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
        self.pipeline.monitor.is_training = False  # nerfstudio goes on serving the viewer
        if self._interrupted:
            raise KeyboardInterrupt

    @abstractmethod
    def _gather_checkpoint(self, step: int) -> dict[str, Any] | None:
        """What the checkpoint of all ranks holds; None on all but rank 0."""

    def _write_checkpoint(self, step: int) -> str | None:
        """Gathers what all ranks learned and writes it on rank 0, which returns a sentence when it could not."""
        self._write_trace(step)
        state = self._gather_checkpoint(step)
        if state is None:
            return None
        path = self.checkpoint_dir / f"step-{step:09d}.ckpt"
        try:
            write_checkpoint(path, state)
        except UserError as error:
            return str(error)
        if self.config.save_only_latest_checkpoint:
            for other in self.checkpoint_dir.glob("step-*.ckpt"):
                if other != path:
                    other.unlink()
        return None

    # ------------------------------------------------------------------------------------------------- meetings

    @property
    def _is_looked_at(self) -> bool:
        """Whether a browser shows this rank's viewer."""
        return self.viewer_state is not None and bool(self.viewer_state.viser_server.get_clients())

    @property
    def _wants_to_meet(self) -> bool:
        """Whether somebody at this rank's viewer waits for a newer scene, or for what he asked for."""
        old = time.monotonic() - self._shown > SECONDS_BETWEEN_SHOWS
        return self.pipeline.monitor.wish is not None or (old and self._is_looked_at)

    def _must_meet(self, step: int) -> bool:
        """Whether the ranks come together after a unit whether they want to or not."""
        return (step + 1) % UNITS_BETWEEN_MEETINGS == 0 or self._is_last(step)

    def _meet(self, step: int) -> None:
        """Brings the ranks together: rank 0 hears what the others recorded, and shows the scene if somebody looks."""
        self._hear(self.pipeline.meet(step, show=self._is_looked_at or self._is_last(step)))
        self._shown = time.monotonic()

    def _hear(self, units: list[int]) -> None:
        every = self.config.logging.steps_per_log
        first = {unit // every: unit for unit in reversed(units)}
        put_scalars(self.pipeline.monitor.recording, reversed(first.values()))

    def _write_trace(self, step: int) -> None:
        """Writes what was recorded beside the checkpoints; a run does not end because that fails."""
        self._hear(self.pipeline.meet(step, show=False))
        if self.pipeline.world.rank == 0 and self.pipeline.monitor.recording.steps():
            try:
                self._save_trace()
            except UserError as error:
                CONSOLE.print(str(error), style="bold red", markup=False)

    def _save_trace(self) -> Path:
        path = self.base_dir / FILE_NAME
        write_trace(self.pipeline.monitor.recording, path)
        return path

    # -------------------------------------------------------------------------------------------- checkpoints

    def _own_state(self, step: int) -> dict[str, Any]:
        """What nerfstudio's checkpoints hold, of this rank alone."""
        return {
            "step": step,
            "pipeline": self.pipeline.state_dict(),
            "optimizers": {name: optimizer.state_dict() for name, optimizer in self.optimizers.optimizers.items()},
            "schedulers": {name: scheduler.state_dict() for name, scheduler in self.optimizers.schedulers.items()},
            "scalers": self.grad_scaler.state_dict(),
        }

    def _read_checkpoint(self) -> dict[str, Any] | None:
        """What ``--load-dir`` or ``--load-checkpoint`` asks to resume from."""
        path = self.config.load_checkpoint
        if self.config.load_dir is not None:
            path = checkpoint_path(self.config.load_dir, self.config.load_step)
        return None if path is None else read_checkpoint(path)


def _check_processes(machine: MachineConfig, method: str) -> None:
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
            f"{flag}: ns-train starts several processes on GPUs only. On CPUs use odin-train {method} "
            f"--nproc-per-node {count} with the same arguments."
        )


def _check_readable(path: Path) -> None:
    """Looks at the archive's directory only: a file that was cut off has none."""
    if not zipfile.is_zipfile(path):
        raise UserError(f"{path}: is cut off or not a checkpoint. Remove it and use an earlier one.")
