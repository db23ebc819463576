"""``odin-bench step``: the time of a training step, ours and others', on one scene and in one run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Console

from odin_nerfstudio.cli.bench.step.bench import CityBench, hidden_of_barrier, shown, spread
from odin_nerfstudio.cli.bench.step.turns import PEERS
from odin_nerfstudio.errors import UserError

SystemName = Literal[
    "gsplat",
    "ddp",
    "floor",
    "barrier",
    "quality",
    "throughput",
    "replicated-barrier",
    "replicated-quality",
    "replicated-throughput",
]
ON_CPUS: tuple[SystemName, ...] = ("barrier", "quality", "throughput")
ON_GPUS: tuple[SystemName, ...] = ("gsplat", "ddp", *ON_CPUS, "replicated-barrier", "replicated-quality", "floor")
YARDSTICKS = ("gsplat", "ddp", "floor")


@dataclass
class StepBench(CityBench):
    """Times training steps of several systems, which take turns in one process group: all see the same views of the
    same scene in the same order, with the same L1 loss and learning rates.

    gsplat: its distributed rasterization of a share of the primitives on every rank, packed. ddp: all primitives on
    every rank, a dense all-reduce of gradients. Both with torch's fused Adam. floor: rendering and Adam over nothing
    but the rows that a view sees, selected beforehand, without communication. barrier, quality, throughput: our
    policies, sharded; replicated-barrier and so on: the same with all primitives on every rank.
    """

    systems: tuple[SystemName, ...] = ()
    """Which of them, in the order of their turns. Left out, all that the device can run but replicated-throughput;
    on CPUs barrier, quality and throughput."""

    def run(self) -> dict[str, Any]:
        """Prints a table and returns the figures.

        ``systems`` holds those of :meth:`CityBench.measure` by system. Beside them ``ratio_gsplat``, ``ratio_ddp`` and
        ``ratio_floor``: the median step ÷ that of the named system; ``hidden_of_barrier``: 1 − exposed wait ÷ that of
        barrier with the same placement. Unknown figures are null: gsplat, ddp and floor record no waits.
        ``hidden_of_barrier`` by itself is that of quality. The memory of floor is that of copies for several groups.

        Raises:
            UserError: for a flag that does not fit, or when a rank failed or time was up.
        """
        self.check()
        names = self.systems or (ON_CPUS if self.device == "cpu" else ON_GPUS)
        systems = self.measure(names)
        for name, figures in systems.items():
            for other in YARDSTICKS:
                yardstick = systems.get(other, {}).get("step_ms")
                figures[f"ratio_{other}"] = figures["step_ms"] / yardstick if yardstick else None  # type: ignore[operator]
            barrier = "replicated-barrier" if name.startswith("replicated-") else "barrier"
            figures["hidden_of_barrier"] = hidden_of_barrier(figures, systems.get(barrier))
        times = {"median": shown("step_ms"), "p10 … p90": spread}
        ratios = {f"÷ {other}": shown(f"ratio_{other}") for other in YARDSTICKS if other in systems}
        self.print_table("a step, ms", systems, times | ratios)
        self.print_table(
            "a rank's step",
            systems,
            {
                "wait, ms": shown("exposed_wait_ms"),
                "hidden, %": shown("hidden_of_barrier", 0, 100),
                "early, %": shown("early_share", 0, 100),
                "sent, MB": shown("bytes", 2, 1e-6),
                "GiB": shown("memory_gib"),
                "splats": shown("visible", 0),
            },
        )
        Console().print("[dim]wait: exposed. hidden: 1 − wait ÷ that of barrier. early: of the primitives in scope.")
        hidden = systems.get("quality", {}).get("hidden_of_barrier")
        return {**self.settings, "systems": systems, "hidden_of_barrier": hidden}

    def check(self) -> None:
        super().check()
        if len(set(self.systems)) < len(self.systems):
            raise UserError(f"--systems {' '.join(self.systems)}: each can be named once.")
        if self.device == "cpu" and (refused := [name for name in self.systems if name in PEERS]):
            raise UserError(f"--systems {' '.join(refused)}: gsplat's kernels need a GPU; leave these out on CPUs.")
