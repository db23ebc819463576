"""``odin-bench overlap``: how much of the communication each policy hides behind computation."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from odin_nerfstudio.cli.bench.ranks import RanksBench, Run, train
from odin_nerfstudio.comm.exchange import Link
from odin_nerfstudio.errors import UserError
from odin_nerfstudio.shadow.timeline import Timeline
from odin_nerfstudio.splat.trainer import OdinTrainerConfig
from odin_nerfstudio.viewer.trace import write_trace

COMMUNICATION_SHARE = 0.3
"""Of a step with the policy barrier, when the link's speed is chosen by the bench."""
Policy = Literal["barrier", "quality", "throughput"]
POLICIES: tuple[Policy, ...] = ("barrier", "quality", "throughput")
COUNTERS = ("scope", "early", "late", "delayed", "fallback")
WAITS = ("splats", "wanted_gradients", "gradients")
"""What the runner's time line calls that for which a rank stands still."""


@dataclass
class OverlapBench(RanksBench):
    """Trains with each policy over an emulated link on CPUs, and compares how long the ranks stand still.

    Without --link-gbps a short run without the link measures bytes and computation of a step, and the link is made
    slow enough for communication to be 30 % of a step.
    """

    steps: int = 60
    """Optimizer steps of a run, at most 1000."""
    warmup: int = 10
    """Steps at the beginning that are not counted."""
    link_gbps: float | None = None
    """10⁹ bits per second into and out of every rank."""
    link_latency_us: float = 0.0
    """Microseconds that every transfer takes at least."""
    trace: Path | None = None
    """File for the ranks' time lines under quality, for chrome://tracing or Perfetto."""

    def run(self) -> dict[str, Any]:
        """Prints a table and returns the figures.

        ``hidden_fraction`` is 1 − exposed wait ÷ exposed wait of barrier, ``early_share`` the share of scope rows that
        were read before the step before was published, ``step_ratio`` the median step ÷ that of barrier: those of
        quality by themselves, those of every policy under ``policies``.

        Raises:
            UserError: for a flag that does not fit, when a run failed, or the trace cannot be written.
        """
        if self.warmup < 1 or self.link_latency_us < 0 or (self.link_gbps is not None and self.link_gbps <= 0):
            raise UserError("--warmup must be at least 1, --link-gbps above 0 and --link-latency-us at least 0.")
        self.check(self.warmup + 2)
        if self.world_size < 2:
            raise UserError(f"--world-size {self.world_size}: a single rank exchanges nothing; take 2 or more.")
        with TemporaryDirectory(prefix="odin-bench-") as folder:
            config = self.make_config(Path(folder))
            gbps = self.link_gbps or self._probe(config)
            config.pipeline.link = Link(gbps, self.link_latency_us)
            runs = {policy: self._train(config, policy, policy) for policy in POLICIES}
        if self.trace is not None:
            write_trace(runs["quality"].recording, self.trace)
        policies = {policy: self._figures(run) for policy, run in runs.items()}
        barrier = policies["barrier"]
        for each in policies.values():
            each["hidden_fraction"] = 1 - each["exposed_wait_s"] / barrier["exposed_wait_s"]
            each["step_ratio"] = each["step_s"] / barrier["step_s"]
        figures: dict[str, Any] = {
            **{name: policies["quality"][name] for name in ("hidden_fraction", "early_share", "step_ratio")},
            "link_gbps": gbps,
            "link_latency_us": self.link_latency_us,
            "world_size": self.world_size,
            "batch": self.batch,
            "steps_counted": self.steps - 1 - self.warmup,
            "primitives": sum(report.primitives_at_start for report in runs["barrier"].reports),
            "policies": policies,
        }
        table = Table(title=f"{self.world_size} ranks, {self.batch} views a step, {gbps:.4g} Gb/s")
        table.add_column("")
        for policy in POLICIES:
            table.add_column(policy, justify="right")
        for name in barrier:
            table.add_row(name.replace("_", " "), *(f"{policies[policy][name]:,.4g}" for policy in POLICIES))
        Console().print(table)
        return figures

    def _probe(self, config: OdinTrainerConfig) -> float:
        """The speed, Gb/s, at which communication takes its share of a step."""
        figures = self._figures(self._train(config, "barrier", "probe"))
        compute = figures["step_s"] - figures["exposed_wait_s"]
        communication = compute * COMMUNICATION_SHARE / (1 - COMMUNICATION_SHARE)
        return figures["busier"] * 8e-9 / communication

    def _train(self, config: OdinTrainerConfig, policy: Policy, name: str) -> Run:
        config.pipeline.policy = policy
        return train(config, self.world_size, self.batch, "cpu", self.timeout_s, name)

    def _figures(self, run: Run) -> dict[str, float]:
        """Means over ranks and steps after the warm-up; ``step_s`` is a median."""
        steps = range(self.warmup, self.steps - 1)
        counts = [timeline.counts(step) for timeline in run.recording.timelines for step in steps]
        waits = [_waits(timeline, step) for timeline in run.recording.timelines for step in steps]
        totals = {name: sum(count.get(name, 0) for count in counts) for name in (*COUNTERS, "bytes", "busier")}
        return {
            "step_s": median(report.seconds[step] for report in run.reports for step in steps),
            "exposed_wait_s": mean(sum(wait.values()) for wait in waits),
            **{f"wait_for_{name}_s": mean(wait.get(name.replace("_", " "), 0) for wait in waits) for name in WAITS},
            "early_share": totals["early"] / max(1, totals["scope"]),
            **{name: total / len(counts) for name, total in totals.items()},
        }


def _waits(timeline: Timeline, step: int) -> dict[str, float]:
    """Exposed wait of a step by what was waited for, seconds."""
    waits: defaultdict[str, float] = defaultdict(float)
    for span in timeline.spans(step):
        if span.kind == "wait":
            waits[span.name] += (span.end - span.begin) / 1e9
    return waits
