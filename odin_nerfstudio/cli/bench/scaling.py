"""``odin-bench scaling``: the time of a step by number of ranks, size of the scene, and link between ranks."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from odin_nerfstudio.cli.bench.cases import possible_sizes, run_cases
from odin_nerfstudio.cli.bench.step import SystemName
from odin_nerfstudio.errors import UserError

Link = Literal["nvlink", "host", "socket", "local"]
LINKS: dict[Link, dict[str, str]] = {
    "nvlink": {},
    "host": {"NCCL_P2P_DISABLE": "1"},
    "socket": {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NET": "Socket"},
    "local": {},
}
"""What NCCL is told to take each of them; gloo, on CPUs, takes what there is (local)."""
SYSTEMS: tuple[SystemName, ...] = ("gsplat", "barrier", "quality", "throughput")


@dataclass(frozen=True)
class Case:
    """One run of ``odin-bench step``."""

    link: Link
    num_primitives: int
    world_size: int

    def __str__(self) -> str:
        return f"{self.num_primitives:,} primitives, {self.world_size} × {self.link}"


@dataclass
class ScalingBench:
    """Runs ``odin-bench step`` again and again, each time in processes of its own, for as long as there is time.

    The city grows with its primitives, so that a view sees as many of them. A case that fails is told, and the others
    go on; what there was no time for is named.
    """

    world_sizes: tuple[int, ...] = (1, 2, 4, 8)
    """Numbers of ranks; on GPUs those for which there are enough."""
    num_primitives: tuple[int, ...] = (6_000_000, 24_000_000)
    """Of the scene."""
    links: tuple[Link, ...] = ()
    """Between ranks. Left out, nvlink, host and socket on GPUs, and local on CPUs."""
    systems: tuple[SystemName, ...] = ()
    """See ``odin-bench step``. Left out, gsplat and our sharded ones on GPUs, ours on CPUs."""
    density: float = 6.0
    """Primitives per square metre."""
    num_views: int = 512
    """To train on."""
    width: int = 1600
    """Of an image, pixels."""
    height: int = 1200
    """Of an image, pixels."""
    device: Literal["cpu", "cuda"] = "cuda"
    """``cpu`` (gloo) or ``cuda`` (NCCL, a GPU for every rank)."""
    rounds: int = 2
    """Timed turns of every system."""
    steps: int = 15
    """Timed steps of a turn."""
    warmup: int = 8
    """Steps before them."""
    recorded: int = 8
    """Steps of one more turn, in which waits and bytes are recorded."""
    budget_s: float = 540.0
    """Seconds that everything may take."""

    def run(self) -> dict[str, Any]:
        """Prints a table and returns the figures.

        ``cases`` holds ``link``, ``num_primitives``, ``world_size`` and ``systems``, as ``odin-bench step`` gives them;
        ``weak_scaling``, by link, primitives and ranks, is the step of quality on one rank ÷ that on so many, each of
        which has a view of its own; ``failed`` names cases and says why; ``left_out`` names those without time.

        Raises:
            UserError: for a flag that does not fit, or when no case ended well.
        """
        self._check()
        cases = run_cases(self._cases(), self._measure, self.budget_s)
        done = cases.done
        scaling = {case: _weak_scaling(case, done) for case in done}
        self._print(done, scaling)
        return {
            "cases": [{**vars(case), "systems": figures["systems"]} for case, figures in done.items()],
            "weak_scaling": {str(case): value for case, value in scaling.items() if value is not None},
            "failed": cases.failed,
            "left_out": cases.left_out,
        }

    def _check(self) -> None:
        if not self.world_sizes or min(self.world_sizes) < 1:
            raise UserError(f"--world-sizes {' '.join(map(str, self.world_sizes))}: numbers from 1 on are needed.")
        if not self.num_primitives or min(self.num_primitives) < 4:
            raise UserError(f"--num-primitives {' '.join(map(str, self.num_primitives))}: at least 4 are needed.")
        if self.density <= 0 or self.budget_s <= 0:
            raise UserError("--density and --budget-s must be above 0.")
        if self.device == "cpu" and set(self.links) - {"local"}:
            raise UserError(f"--links {' '.join(self.links)}: on CPUs there is only local.")
        possible_sizes(self.world_sizes, self.device)

    def _cases(self) -> list[Case]:
        """Smaller scenes first; on one rank the link does not matter."""
        links: tuple[Link, ...] = self.links or (("local",) if self.device == "cpu" else ("nvlink", "host", "socket"))
        every = product(self.num_primitives, links, possible_sizes(self.world_sizes, self.device))
        return [Case(link, count, size) for count, link, size in every if size > 1 or link == links[0]]

    def _measure(self, case: Case, left: float) -> dict[str, Any]:
        """What ``odin-bench step`` prints last.

        Raises:
            UserError: with the last line of a run that failed.
        """
        systems = self.systems or tuple(name for name in SYSTEMS if self.device == "cuda" or name != "gsplat")
        flags = {
            "num-primitives": case.num_primitives,
            "side": math.sqrt(case.num_primitives / self.density),
            "world-size": case.world_size,
            "timeout-s": left,
            **{name.replace("_", "-"): getattr(self, name) for name in ("num_views", "width", "height", "device")},
            **{name: getattr(self, name) for name in ("rounds", "steps", "warmup", "recorded")},
        }
        command = [sys.executable, "-m", "odin_nerfstudio.cli.bench", "step", "--systems", *systems]
        command += [part for name, value in flags.items() for part in (f"--{name}", str(value))]
        result = subprocess.run(command, env=os.environ | LINKS[case.link], capture_output=True, text=True)
        if result.returncode != 0:
            lines = (result.stderr.strip() or result.stdout.strip() or f"status {result.returncode}").splitlines()
            raise UserError(lines[-1])
        return json.loads(result.stdout.splitlines()[-1])

    def _print(self, done: dict[Case, dict[str, Any]], scaling: dict[Case, float | None]) -> None:
        names = list(dict.fromkeys(name for figures in done.values() for name in figures["systems"]))
        table = Table(title="Median step, ms, with a view for each rank")
        for heading in ("primitives", "link", "ranks", *names, "scaling", "hidden, %"):
            table.add_column(heading, justify="right" if heading not in ("primitives", "link") else "left")
        for case, figures in done.items():
            steps = (f"{figures['systems'][n]['step_ms']:.2f}" if n in figures["systems"] else "–" for n in names)
            efficiency, hidden = scaling[case], figures["hidden_of_barrier"]
            shown = (
                "–" if value is None else text.format(value)
                for value, text in ((efficiency, "{:.2f}"), (hidden and 100 * hidden, "{:.0f}"))
            )
            table.add_row(f"{case.num_primitives:,}", case.link, str(case.world_size), *steps, *shown)
        Console().print(table)


def _weak_scaling(case: Case, done: dict[Case, dict[str, Any]]) -> float | None:
    """The step of quality on one rank ÷ that of a case; None where either was not measured."""
    alone = [other for other in done if other.world_size == 1 and other.num_primitives == case.num_primitives]
    if case.world_size == 1 or not alone or "quality" not in done[case]["systems"]:
        return None
    one = done[alone[0]]["systems"].get("quality")
    return None if one is None else one["step_ms"] / done[case]["systems"]["quality"]["step_ms"]
