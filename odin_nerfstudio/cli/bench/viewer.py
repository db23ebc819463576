"""``odin-bench viewer``: what recording costs, without anybody looking and with a browser on the viewer."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from odin_nerfstudio.cli.bench.ranks import RanksBench, ReportingTrainer, train
from odin_nerfstudio.errors import UserError
from odin_nerfstudio.shadow.timeline import SAMPLED

Phase = Literal["nobody looks", "somebody looks"]
BLOCKS = {"cpu": 20, "cuda": 3 * SAMPLED.period}
"""By device, steps between two turns of the switch. On GPUs, where units are sampled: some stretches of them, and
longer than the tab takes to draw the last."""
WARMUP = 40
"""Steps at the beginning of each half that are not counted."""
CONNECT_S = 60.0
"""Seconds that the client may take to come."""
PHASES: tuple[Phase, ...] = ("nobody looks", "somebody looks")


@dataclass
class ViewerBench(RanksBench):
    """Trains with the viewer on, and turns recording on and off in blocks of steps.

    In the second half a client is connected, which takes all that the viewer sends, as a browser does. Each block with
    recording is compared with the ones around it without, so that what changes in the course of a run cancels out. On
    GPUs, where units are sampled, a block has some stretches of them.
    """

    steps: int = 640
    """Optimizer steps of the run, at most 100,000; on GPUs at least 4,880, for blocks that have sampled stretches."""
    device: Literal["cpu", "cuda"] = "cpu"
    """``cpu`` (gloo) or ``cuda`` (NCCL, a GPU for every rank)."""

    def run(self) -> dict[str, Any]:
        """Prints a table and returns the figures.

        ``recording_ratio`` and ``recording_ratio_with_client`` are the medians, over blocks, of a mean step with
        recording ÷ one without; ``step_s`` is the median step without, by phase.

        Raises:
            UserError: for a flag that does not fit, or when the run failed.
        """
        block = BLOCKS[self.device]
        self.check(2 * (WARMUP + 4 * block), most_steps=100_000)
        with TemporaryDirectory(prefix="odin-bench-") as folder:
            config = self.make_config(Path(folder))
            config._target = _BlockTrainer
            config.vis = "viewer"
            config.viewer.websocket_port = _free_port()
            config.viewer.quit_on_train_completion = True
            report = train(config, self.world_size, self.batch, self.device, self.timeout_s, "viewer").reports[0]
        half = self.steps // 2
        phases = {
            phase: _pairs(report.seconds[first + WARMUP : first + half - 1], first + WARMUP, block)
            for phase, first in zip(PHASES, (0, half), strict=True)
        }
        ratios = {phase: median(on / off for off, on in pairs) for phase, pairs in phases.items()}
        table = Table(title=f"{self.world_size} ranks, {self.batch} views a step")
        for heading in ("", "off, ms", "on, ms", "ratio", "pairs", "spread"):
            table.add_column(heading, justify="right" if heading else "left")
        for phase, pairs in phases.items():
            each = sorted(on / off for off, on in pairs)
            off, on = (1e3 * median(pair[side] for pair in pairs) for side in (0, 1))
            spread = f"{each[0]:.3f} … {each[-1]:.3f}"
            table.add_row(phase, f"{off:.1f}", f"{on:.1f}", f"{ratios[phase]:.3f}", str(len(pairs)), spread)
        Console().print(table)
        return {
            "recording_ratio": ratios["nobody looks"],
            "recording_ratio_with_client": ratios["somebody looks"],
            "step_s": {phase: median(pair[0] for pair in pairs) for phase, pairs in phases.items()},
            "world_size": self.world_size,
            "batch": self.batch,
            "pairs": {phase: len(pairs) for phase, pairs in phases.items()},
        }


def _pairs(seconds: list[float], first: int, block: int) -> list[tuple[float, float]]:
    """Mean steps without and with recording, of the blocks from step ``first`` on.

    Those without are of the block before and the one after, since steps grow as the scene does.
    """
    by_block: dict[int, list[float]] = {}
    for step, each in enumerate(seconds, start=first):
        by_block.setdefault(step // block, []).append(each)
    whole = {number: mean(each) for number, each in by_block.items() if len(each) == block}
    recorded = [number for number in whole if number % 2 == 1 and {number - 1, number + 1} <= whole.keys()]
    return [((whole[number - 1] + whole[number + 1]) / 2, whole[number]) for number in recorded]


class _BlockTrainer(ReportingTrainer):
    """Records in every other block of steps; from the middle on, a client looks."""

    records_every_unit = False
    _client: subprocess.Popen[bytes] | None = None

    def train_iteration(self, step: int) -> Any:
        self.pipeline.runner.timeline.recording = step // BLOCKS[self.config.machine.device_type] % 2 == 1
        if self.viewer_state is not None and self._client is None and step >= self.config.max_num_iterations // 2:
            self._connect()
        return super().train_iteration(step)

    def _connect(self) -> None:
        command = (sys.executable, "-m", "odin_nerfstudio.cli.bench.viewer_client")
        self._client = subprocess.Popen([*command, str(self.config.viewer.websocket_port)])
        deadline = time.monotonic() + CONNECT_S
        while not self._is_looked_at:
            if time.monotonic() > deadline or self._client.poll() is not None:
                raise UserError("the client did not come to the viewer.")
            time.sleep(0.1)

    def train(self) -> None:
        try:
            super().train()
        finally:
            if self._client is not None:
                self._client.terminate()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
