"""What ``odin-bench step`` and ``odin-bench ablation`` have in common: their flags, their ranks and their figures."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from odin_nerfstudio.cli.bench.ranks import time_limit
from odin_nerfstudio.cli.bench.step.city import MARGIN, City
from odin_nerfstudio.cli.bench.step.turns import Measured, Task, read_reports, take_turns
from odin_nerfstudio.comm.launch import Layout, launch
from odin_nerfstudio.errors import UserError

MOST_RECORDED = 500
"""Steps; a time line keeps a thousand."""
Figures = dict[str, float | None]
"""Of one system, by name; None where they are not known."""


@dataclass
class CityBench:
    """Systems that take turns in one process group, on a synthetic city seen from the air."""

    scene: Literal["city"] = "city"
    """What is trained: primitives on a square, views straight down at random places."""
    num_primitives: int = 6_000_000
    """Of the scene."""
    side: float = 1000.0
    """Of the square that they lie on, metres. Four times as many on a side twice as long are as dense as before: a view
    sees as many of them."""
    num_views: int = 512
    """To train on."""
    width: int = 1600
    """Of an image, pixels."""
    height: int = 1200
    """Of an image, pixels."""
    world_size: int = 2
    """Number of processes on this machine."""
    views_per_rank: int = 1
    """That each rank renders in a step."""
    device: Literal["cpu", "cuda"] = "cuda"
    """``cpu`` (gloo) or ``cuda`` (NCCL, a GPU for every rank)."""
    rounds: int = 5
    """Timed turns of every system."""
    steps: int = 30
    """Timed steps of a turn."""
    warmup: int = 10
    """Steps before them."""
    recorded: int = 20
    """Steps of one more turn, in which waits and bytes are recorded."""
    rebuild: bool = False
    """Free each system's memory after its turn, for scenes of which only one fits; every turn then begins with an
    untrained scene."""
    seed: int = 0
    """Of scene and schedule."""
    timeout_s: float = 1800.0
    """Seconds that everything may take."""

    def check(self) -> None:
        """Checks the flags.

        Raises:
            UserError: naming one.
        """
        least = {
            "num-primitives": 4,
            "width": 1,
            "height": 1,
            "world-size": 1,
            "views-per-rank": 1,
            "rounds": 1,
            "steps": 1,
            "warmup": 1,
            "recorded": 1,
        }
        for name, value in least.items():
            if (given := getattr(self, name.replace("-", "_"))) < value:
                raise UserError(f"--{name} {given}: at least {value} is needed.")
        gpus = torch.cuda.device_count()
        if self.device == "cuda" and gpus < self.world_size:
            raise UserError(f"--world-size {self.world_size}: torch sees {gpus} GPUs here; --device cpu needs none.")
        if self.num_views < (needed := self.world_size * self.views_per_rank):
            raise UserError(f"--num-views {self.num_views}: a step takes {needed} different ones.")
        if self.recorded > MOST_RECORDED:
            raise UserError(f"--recorded {self.recorded}: at most {MOST_RECORDED}.")
        if self.side <= 2 * MARGIN:
            raise UserError(f"--side {self.side:g}: must be above {2 * MARGIN:g}, twice the margin around cameras.")
        if self.timeout_s <= 0:
            raise UserError(f"--timeout-s {self.timeout_s:g}: must be above 0.")

    def measure(self, systems: Sequence[str]) -> dict[str, Figures]:
        """Lets the systems take turns.

        Returns:
            By system, ``step_ms`` (median over all timed steps of all ranks), ``step_ms_p10``, ``step_ms_p90``,
            ``host_step_ms`` (the same by the host's clock: median over rounds of a mean step), ``memory_gib`` (the
            largest of any rank), ``visible`` (splats of a view, mean), ``error`` (mean absolute error of held-out
            views); and, of a rank, means of a step: ``exposed_wait_ms``, ``bytes``, ``hidden_fraction`` of the
            communication, ``scope`` (primitives that may be read), ``early_share`` of them.

        Raises:
            UserError: when a rank failed or time was up.
        """
        city = City(self.num_primitives, self.num_views, self.width, self.height, self.seed, self.side)
        counts = self.views_per_rank, self.rounds, self.steps, self.warmup, self.recorded
        task = Task(city, tuple(systems), *counts, rebuild=self.rebuild)
        layout = Layout(self.world_size, device_type=self.device)
        os.environ.setdefault("PYTHONWARNINGS", "ignore")  # the libraries' deprecations, in processes to come and here
        with TemporaryDirectory(prefix="odin-bench-") as folder:
            with time_limit(self.timeout_s), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                launch(f"{take_turns.__module__}:{take_turns.__name__}", (task, folder), layout)
            reports = read_reports(folder, self.world_size)
        return {name: _figures(ranks) for name, ranks in reports.items()}

    @property
    def settings(self) -> dict[str, Any]:
        """What the figures are of."""
        names = ["scene", "num_primitives", "side", "num_views", "width", "height", "world_size", "views_per_rank"]
        names += ["device", "rounds", "steps", "rebuild"]
        return {name: getattr(self, name) for name in names}

    def print_table(
        self, what: str, systems: Mapping[str, Figures], columns: Mapping[str, Callable[[Figures], str]]
    ) -> None:
        """Prints a row for each system.

        Args:
            what: the table shows.
            systems: their figures.
            columns: by heading, what stands there.
        """
        size = f"{self.num_primitives:,} primitives, {self.width}×{self.height}"
        table = Table(title=f"{size}, {self.world_size} × {self.views_per_rank} views: {what}")
        for heading in ("", *columns):
            table.add_column(heading, justify="right" if heading else "left", no_wrap=not heading)
        for name, figures in systems.items():
            table.add_row(name, *(cell(figures) for cell in columns.values()))
        Console().print(table)


def shown(name: str, digits: int = 2, scale: float = 1.0) -> Callable[[Figures], str]:
    """A column with one of the figures, times ``scale``; a dash where it is not known."""

    def cell(figures: Figures) -> str:
        value = figures.get(name)
        return "–" if value is None else f"{value * scale:,.{digits}f}"

    return cell


def spread(figures: Figures) -> str:
    """A column with the 10th and 90th percentile of a step, ms."""
    return f"{figures['step_ms_p10']:,.2f} … {figures['step_ms_p90']:,.2f}"


def hidden_of_barrier(figures: Figures, barrier: Figures | None) -> float | None:
    """1 − exposed wait ÷ that of barrier, where both are known and barrier waits at all."""
    wait, whole = figures["exposed_wait_ms"], barrier and barrier["exposed_wait_ms"]
    return None if wait is None or not whole else 1 - wait / whole


def _figures(ranks: Sequence[Measured]) -> Figures:
    milliseconds = 1e3 * np.concatenate([rank.seconds for rank in ranks])
    p10, p50, p90 = np.percentile(milliseconds, [10, 50, 90]).tolist()
    overlaps = [rank.overlap for rank in ranks if rank.overlap is not None]
    memory = [rank.memory for rank in ranks if rank.memory is not None]
    visible, errors = ([each for rank in ranks for each in getattr(rank, name)] for name in ("visible", "errors"))

    def over_ranks(name: str, scale: float = 1.0) -> float | None:
        return scale * mean(getattr(overlap, name) for overlap in overlaps) if overlaps else None

    scope, early = over_ranks("scope"), over_ranks("early")
    return {
        "step_ms": p50,
        "step_ms_p10": p10,
        "step_ms_p90": p90,
        "host_step_ms": float(1e3 * np.median(np.mean([rank.host_seconds for rank in ranks], axis=0))),
        "exposed_wait_ms": over_ranks("exposed_wait_s", 1e3),
        "hidden_fraction": over_ranks("hidden_fraction"),
        "scope": scope,
        "early_share": early / scope if scope and early is not None else None,
        "bytes": over_ranks("bytes_sent"),
        "memory_gib": max(memory) / 2**30 if memory else None,
        "visible": mean(visible) if visible else None,
        "error": mean(errors) if errors else None,
    }
