"""Training runs of several ranks for the benches, and what each rank has to say about its own."""

from __future__ import annotations

import copy
import json
import os
import signal
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, Literal

import numpy as np
from nerfstudio.data.dataparsers.colmap_dataparser import ColmapDataParserConfig
from nerfstudio.data.dataparsers.nerfstudio_dataparser import NerfstudioDataParserConfig
from nerfstudio.engine.trainer import TrainerConfig
from nerfstudio.utils import writer
from nerfstudio.utils.rich_utils import CONSOLE

from odin_nerfstudio.comm.checkpoint import checkpoint_path, read_checkpoint
from odin_nerfstudio.comm.launch import Layout, launch
from odin_nerfstudio.demo.capture import write_capture
from odin_nerfstudio.errors import UserError
from odin_nerfstudio.methods import odin_splatfacto
from odin_nerfstudio.plan.capture import find_colmap_model
from odin_nerfstudio.shadow.timeline import EVERY_UNIT
from odin_nerfstudio.splat.trainer import OdinTrainer, OdinTrainerConfig
from odin_nerfstudio.viewer.recording import Recording
from odin_nerfstudio.viewer.trace import read_trace, write_trace

NEVER = 1 << 30


@dataclass(frozen=True)
class RankReport:
    """What one rank measured beside its timeline."""

    seconds: list[float]
    """From the start of each step but the last to that of the next."""
    primitives_at_start: int
    """Of this rank."""
    state_bytes: int
    """Of its parameters and their moments, at the end."""


@dataclass(frozen=True)
class Run:
    """A run that went to its end."""

    reports: list[RankReport]
    """In the order of ranks."""
    recording: Recording
    """Of all steps."""
    checkpoint: dict[str, Any]
    """The last one, merged over ranks, on the CPU."""


class ReportingTrainer(OdinTrainer):
    """Trains in silence and leaves a :class:`RankReport` beside the run's config."""

    records_every_unit: ClassVar[bool] = True
    """Rather than those that a run records by itself."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        CONSOLE.quiet = True
        super().__init__(*args, **kwargs)

    def train_iteration(self, step: int) -> Any:
        self._starts.append(time.monotonic())
        return super().train_iteration(step)

    def train(self) -> None:
        pipeline, model = self.pipeline, self.pipeline.model
        if self.records_every_unit:
            pipeline.runner.timeline.sampling = EVERY_UNIT
        model.strategy.verbose = False
        self._starts: list[float] = []
        primitives_at_start = model.num_points
        super().train()
        states = [self.optimizers.optimizers[name].state[param] for name, param in model.gauss_params.items()]
        tensors = [*model.gauss_params.values(), *(state[key] for state in states for key in ("exp_avg", "exp_avg_sq"))]
        report = RankReport(
            seconds=np.diff(self._starts).tolist(),
            primitives_at_start=primitives_at_start,
            state_bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors),
        )
        write_report(self.config, pipeline.world.rank, report)
        write_trace(Recording([pipeline.runner.timeline]), _trace_path(self.config, pipeline.world.rank))


@dataclass
class RanksBench:
    """What benches that train on several ranks have in common."""

    capture: Path | None = None
    """Folder of a capture in COLMAP's or nerfstudio's format; left out, a small one of the demo scene is made."""
    world_size: int = 2
    """Number of processes on this machine."""
    steps: int = 200
    """Optimizer steps of a run, at most 1000."""
    batch: int = 4
    """Views in a step, over all ranks."""
    scale: float = 0.25
    """Of the images' width and height."""
    timeout_s: float = 3600.0
    """Seconds that one run may take."""

    def check(self, least_steps: int, most_steps: int = 1000) -> None:
        """Checks the flags that are ours.

        Raises:
            UserError: naming one.
        """
        if self.world_size < 1 or self.batch < 1 or self.batch % self.world_size:
            raise UserError(f"--batch {self.batch}: must be a multiple of --world-size {self.world_size}.")
        if not least_steps <= self.steps <= most_steps:
            raise UserError(f"--steps {self.steps}: must be {least_steps} … {most_steps}.")
        if not (0 < self.scale <= 1 and self.timeout_s > 0):
            raise UserError("--scale must be above 0 and at most 1, and --timeout-s above 0.")

    def make_config(self, folder: Path) -> OdinTrainerConfig:
        """A run on the capture whose files go to ``folder``; the demo capture is made there if there is no other."""
        config = copy.deepcopy(odin_splatfacto.config)
        assert isinstance(config, OdinTrainerConfig)
        set_up(config, folder, self.capture, self.scale, self.steps)
        config.pipeline.model.num_downscales = 0
        config._target = ReportingTrainer
        return config


def set_up(config: TrainerConfig, folder: Path, capture: Path | None, scale: float, steps: int) -> None:
    """Prepares a run that leaves nothing but its files in ``folder``, and neither evaluates nor saves on its way.

    Args:
        config: of any method; changed.
        folder: for the run; where there is no capture, the demo capture is made in it too.
        capture: folder in COLMAP's or nerfstudio's format, or None.
        scale: of the images' width and height.
        steps: of the run.
    """
    if capture is None:
        capture = folder / "capture"
        write_capture(capture, views=24, width=384, height=288)
    data = config.pipeline.datamanager
    data.data, data.camera_res_scale_factor = capture, scale
    model = find_colmap_model(capture)
    if model is None:
        data.dataparser = NerfstudioDataParserConfig(load_3D_points=True, downscale_factor=1)
    else:
        data.dataparser = ColmapDataParserConfig(colmap_path=model.relative_to(capture), downscale_factor=1)
    config.output_dir, config.experiment_name, config.vis = folder, "bench", "tensorboard"
    config.max_num_iterations = steps
    config.steps_per_save = config.steps_per_eval_image = config.steps_per_eval_all_images = NEVER
    config.logging.local_writer.enable = False


def train(
    config: OdinTrainerConfig, size: int, batch: int, device: Literal["cpu", "cuda"], timeout_s: float, name: str
) -> Run:
    """Trains on ``size`` ranks of this machine, real processes joined over its loopback.

    Args:
        config: of the run; not changed.
        size: number of ranks, a divisor of ``batch``.
        batch: views in a step.
        device: where ranks compute; gloo joins CPUs, NCCL joins GPUs.
        timeout_s: seconds after which they are ended.
        name: of the run, for its folder and for messages.

    Raises:
        UserError: naming the run and the rank that failed, or when the time is over.
    """
    config = copy.deepcopy(config)
    config.pipeline.datamanager.batch_per_rank = batch // size
    reports = [RankReport(**report) for report in run_ranks(config, size, device, timeout_s, name)]
    timelines = [timeline for rank in range(size) for timeline in read_trace(_trace_path(config, rank)).timelines]
    return Run(reports, Recording(timelines), read_checkpoint(checkpoint_path(config.get_checkpoint_dir())))


def run_ranks(
    config: TrainerConfig, size: int, device: Literal["cpu", "cuda"], timeout_s: float, name: str
) -> list[dict[str, Any]]:
    """Runs a config whose trainer leaves a report with :func:`write_report`; arguments and errors as of :func:`train`.

    Args:
        config: its devices and the place of its files are set here.

    Returns:
        The reports, in the order of ranks.
    """
    config.timestamp = name.replace(" ", "-")
    config.machine.device_type, config.machine.num_devices = device, size
    os.environ.setdefault("PYTHONWARNINGS", "ignore")  # the libraries' deprecations, in processes to come and here
    try:
        with time_limit(timeout_s), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            launch("odin_nerfstudio.runs.rank:train_rank", (config,), Layout(size, device_type=device))
        return [json.loads(_report_path(config, rank).read_text()) for rank in range(size)]
    except UserError as error:
        raise UserError(f"{name}: {error}") from error
    finally:  # a single rank trains in this process, and nerfstudio keeps its writers for the next run
        CONSOLE.quiet = False
        writer.EVENT_WRITERS.clear()


def write_report(config: TrainerConfig, rank: int, report: Any) -> None:
    """Leaves a rank's dataclass of numbers for the process that started it."""
    _report_path(config, rank).write_text(json.dumps(asdict(report)))


def _report_path(config: TrainerConfig, rank: int) -> Path:
    return config.get_base_dir() / f"rank-{rank}.json"


def _trace_path(config: TrainerConfig, rank: int) -> Path:
    return config.get_base_dir() / f"trace-{rank}.json"


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Ends the block after so many seconds.

    Raises:
        UserError: when it did.
    """

    def expire(number: int, frame: FrameType | None) -> None:
        raise UserError(f"did not end within --timeout-s {seconds:g}.")

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
