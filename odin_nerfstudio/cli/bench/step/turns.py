"""What every rank does in ``odin-bench step``: its systems take turns, and each turn is measured alike."""

from __future__ import annotations

import gc
import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console

from odin_nerfstudio.cli.bench.step.city import City
from odin_nerfstudio.cli.bench.step.clock import StepClock
from odin_nerfstudio.cli.bench.step.ours import VARIANTS, Odin
from odin_nerfstudio.cli.bench.step.peers import Floor, Peer
from odin_nerfstudio.cli.bench.step.system import Overlap, Site, System
from odin_nerfstudio.comm.world import World
from odin_nerfstudio.cpu import threads

FIRST_STEP = 3
"""From here on splatfacto's schedule of SH degrees, at its fastest, has reached degree 3."""
PEERS = {
    "gsplat": lambda site: Peer(site, sharded=True),
    "ddp": lambda site: Peer(site, sharded=False),
    "floor": Floor,
}
"""Those that need a GPU."""


@dataclass(frozen=True)
class Task:
    """What to measure."""

    city: City
    """The scene."""
    systems: tuple[str, ...]
    """Names in :data:`PEERS` or :data:`~odin_nerfstudio.cli.bench.step.ours.VARIANTS`, in the order of their turns."""
    views_per_rank: int
    """In a step."""
    rounds: int
    """Timed turns of every system."""
    steps: int
    """Timed in a turn."""
    warmup: int
    """Before them."""
    recorded: int
    """Of one more turn, which is recorded rather than timed."""
    rebuild: bool
    """Whether a system's memory is freed after each of its turns; the next one then begins from the start."""


@dataclass
class Measured:
    """What one rank measured of one system."""

    seconds: list[float] = field(default_factory=list)
    """Of every timed step of all rounds."""
    host_seconds: list[float] = field(default_factory=list)
    """Of a step by the host's clock, mean of each round."""
    memory: int | None = None
    """The most that its tensors took of the GPU in a timed turn, bytes; None on a CPU."""
    overlap: Overlap | None = None
    """Of the recorded turn."""
    visible: list[int] = field(default_factory=list)
    """Splats of a view, of each step of the recorded turn."""
    errors: list[float] = field(default_factory=list)
    """Of this rank's held-out views at the end."""


def take_turns(world: World, task: Task, folder: str) -> None:
    """Measures all systems and leaves what this rank has found in ``folder``.

    Raises:
        UserError: for fewer views than a step needs, or when the ranks do not draw the same scene.
    """
    if world.device.type == "cpu":
        threads.claim()
    torch.manual_seed(task.city.seed)
    site = Site.build(world, task.city, task.views_per_rank)
    stages = {name: _Stage(site, name) for name in task.systems}
    console = Console(stderr=True, quiet=world.rank > 0)
    first = FIRST_STEP
    with ExitStack() as stack:
        for stage in stages.values():
            stack.callback(stage.clear)
        for number in range(task.rounds):
            for name, stage in stages.items():
                seconds = stage.time(range(first, first + task.warmup + task.steps + 1), task.warmup)
                console.print(f"[dim]round {number + 1} of {task.rounds}, {name}: {1e3 * seconds:.2f} ms a step")
                if task.rebuild:
                    stage.clear()
            if not task.rebuild:
                first += task.warmup + task.steps + 1
        for stage in stages.values():
            stage.record(range(first, first + task.warmup + task.recorded + 1), task.warmup)
            if task.rebuild:
                stage.clear()
    report = {name: asdict(stage.measured) for name, stage in stages.items()}
    report_path(folder, world.rank).write_text(json.dumps(report))


def read_reports(folder: str, ranks: int) -> dict[str, list[Measured]]:
    """By system, what each rank has measured."""
    reports: Sequence[dict[str, Any]] = [json.loads(report_path(folder, rank).read_text()) for rank in range(ranks)]
    return {name: [_measured(report[name]) for report in reports] for name in reports[0]}


def report_path(folder: str, rank: int) -> Path:
    """Where a rank leaves what it has found."""
    return Path(folder) / f"rank-{rank}.json"


class _Stage:
    """A system's turns on one rank. It is built for the first one."""

    def __init__(self, site: Site, name: str) -> None:
        self.measured = Measured()
        self._site = site
        self._name = name
        self._system: System | None = None
        self._own = 0
        self._clock = StepClock(site.world.device)

    def time(self, steps: range, warmup: int) -> float:
        """A timed turn: warm-up, timed steps, and one more in which everything under way ends.

        Returns:
            The median step, seconds.
        """
        others = self._begin(steps)
        self._run(steps[:warmup])
        self._clock.begin()
        for step in steps[warmup:-1]:
            self._built.step(step, last=False)
            self._clock.mark()
        seconds, total = self._clock.end()
        self._end(steps)
        self.measured.seconds += seconds
        self.measured.host_seconds.append(total / len(seconds))
        if self._is_gpu:
            device = self._site.world.device
            peak = torch.cuda.max_memory_allocated(device) - others
            self.measured.memory = max(peak, self.measured.memory or 0)
            self._own = torch.cuda.memory_allocated(device) - others
        return median(seconds)

    def record(self, steps: range, warmup: int) -> None:
        """A recorded turn, whose time does not count."""
        self._begin(steps)
        self._built.watch()
        self._run(steps[:-1])
        self._end(steps)
        self.measured.overlap = self._built.overlap(steps[warmup:-1])
        self.measured.visible = self._built.visible[warmup:-1]
        self.measured.errors = self._built.errors()

    def clear(self) -> None:
        """Frees what the system holds."""
        if self._system is not None:
            self._system.close()
            self._system, self._own = None, 0
            gc.collect()
            if self._is_gpu:
                torch.cuda.empty_cache()

    @property
    def _built(self) -> System:
        if self._system is None:
            site, name = self._site, self._name
            self._system = PEERS[name](site) if name in PEERS else Odin(site, VARIANTS[name])
        return self._system

    @property
    def _is_gpu(self) -> bool:
        return self._site.world.device.type == "cuda"

    def _begin(self, steps: range) -> int:
        """Makes everything ready for a turn that all ranks begin together; bytes that are not this system's."""
        device = self._site.world.device
        gc.collect()
        others = torch.cuda.memory_allocated(device) - self._own if self._is_gpu else 0
        self._built.prepare(steps)
        gc.collect()
        self._site.world.any(False)
        if self._is_gpu:
            torch.cuda.reset_peak_memory_stats(device)
        return others

    def _run(self, steps: range) -> None:
        for step in steps:
            self._built.step(step, last=False)

    def _end(self, steps: range) -> None:
        self._built.step(steps[-1], last=True)


def _measured(report: dict[str, Any]) -> Measured:
    overlap = report.pop("overlap")
    return Measured(**report, overlap=None if overlap is None else Overlap(**overlap))
