"""``odin-bench ablation``: what each part of Odin is good for, by leaving out one at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Console

from odin_nerfstudio.cli.bench.step.bench import CityBench, Figures, hidden_of_barrier, shown, spread
from odin_nerfstudio.errors import UserError

Part = Literal["full", "no-overlap", "no-locality", "no-validation", "no-shards"]
SYSTEMS: dict[Part, str] = {
    "full": "quality",
    "no-overlap": "barrier",
    "no-locality": "no-locality",
    "no-validation": "no-validation",
    "no-shards": "replicated-quality",
}
"""What the systems of ``odin-bench step`` call it."""


@dataclass
class AblationBench(CityBench):
    """Trains with policy quality and with one part of it left out at a time, as the ablations of the Odin paper do.

    no-overlap: nothing is read while the step before is under way (policy barrier). no-locality: views come in random
    order, and go to ranks as they come. no-validation: everything is read while the step before is under way, also what
    it is going to change; wrong by design, and shown for its time. no-shards: every rank has all primitives. Hogwild,
    where every rank publishes without any order, is not among them: an order of publication is what the runner is.
    """

    parts: tuple[Part, ...] = tuple(SYSTEMS)
    """Which of them, in the order of their turns; full is what the others are compared with."""

    def run(self) -> dict[str, Any]:
        """Prints a table and returns the figures.

        ``parts`` holds those of :meth:`CityBench.measure` by part, with ``ratio_full``, the median step ÷ that of full,
        and ``hidden_of_barrier``, 1 − exposed wait ÷ that of no-overlap. Unknown figures are null.

        Raises:
            UserError: for a flag that does not fit, or when a rank failed or time was up.
        """
        self.check()
        systems = self.measure([SYSTEMS[part] for part in self.parts])
        parts: dict[str, Figures] = {part: systems[SYSTEMS[part]] for part in self.parts}
        for figures in parts.values():
            full = parts.get("full", {}).get("step_ms")
            figures["ratio_full"] = figures["step_ms"] / full if full else None  # type: ignore[operator]
            figures["hidden_of_barrier"] = hidden_of_barrier(figures, parts.get("no-overlap"))
        rows = {f"{part} *" if part == "no-validation" else part: figures for part, figures in parts.items()}
        self.print_table(
            "a step, ms", rows, {"median": shown("step_ms"), "p10 … p90": spread, "÷ full": shown("ratio_full")}
        )
        self.print_table(
            "a rank's step",
            rows,
            {
                "wait, ms": shown("exposed_wait_ms"),
                "hidden, %": shown("hidden_of_barrier", 0, 100),
                "early, %": shown("early_share", 0, 100),
                "sent, MB": shown("bytes", 2, 1e-6),
                "error": shown("error", 4),
            },
        )
        Console().print(
            "[dim]wait: exposed. hidden: 1 − wait ÷ that of no-overlap. early: of the primitives in scope. error: mean "
            "absolute error of held-out views at the end. * reads what is about to change: wrong by design."
        )
        return {**self.settings, "parts": parts}

    def check(self) -> None:
        super().check()
        if not self.parts or len(set(self.parts)) < len(self.parts):
            raise UserError(f"--parts {' '.join(self.parts)}: different ones are needed.")
