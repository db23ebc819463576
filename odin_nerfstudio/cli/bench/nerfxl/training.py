"""Training runs of ``nerfxl`` and of nerfacto that say how long their steps and exchanges took."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torchmetrics.image.lpip
from nerfstudio.engine.trainer import Trainer
from nerfstudio.utils.rich_utils import CONSOLE
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from odin_nerfstudio.cli.bench.ranks import write_report
from odin_nerfstudio.comm.world import World
from odin_nerfstudio.nerfxl.exchange import EXCHANGES, Radiance, Shared
from odin_nerfstudio.nerfxl.trainer import NerfXLTrainer


@dataclass(frozen=True)
class TrainingReport:
    """What one rank measured. The lists hold an entry for every step but the last."""

    seconds: list[float]
    """From the start of the step to that of the next."""
    wait: list[float]
    """From the moment that this rank has its samples' radiance to that when all have: no part of the exchange."""
    exchange: list[float]
    """From there until this rank has the segments of all tiles, integration included; of the forward pass."""
    sent: list[int]
    """Bytes from this rank to all others in the exchange."""
    parameters: int
    """Numbers that this rank trains."""
    psnr: float | None
    """Mean over the evaluation images after the last step; None where ``steps_per_eval_all_images`` is later."""


class _Measuring(Trainer):
    """Trains in silence, saves nothing, and leaves a :class:`TrainingReport`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        CONSOLE.quiet = True
        self._starts: list[float] = []
        self._meter = ExchangeMeter()
        super().__init__(*args, **kwargs)

    def train_iteration(self, step: int) -> Any:
        self._starts.append(_now(self.pipeline.device))
        self._progress.advance(self._task)
        return super().train_iteration(step)

    def train(self) -> None:
        rank, steps = World.current().rank, self.config.max_num_iterations
        console = Console(file=sys.stderr)
        with Progress(console=console, transient=True, disable=rank > 0 or not console.is_terminal) as self._progress:
            self._task = self._progress.add_task("Training", total=steps)
            with self._meter.reading():
                super().train()
        psnr = None
        if self.config.steps_per_eval_all_images <= steps:
            self.pipeline.model.lpips = _no_lpips
            psnr = float(self.pipeline.get_average_eval_image_metrics()["psnr"])
        report = TrainingReport(
            seconds=np.diff(self._starts).tolist(),
            wait=self._meter.wait[: steps - 1],
            exchange=self._meter.exchange[: steps - 1],
            sent=self._meter.sent[: steps - 1],
            parameters=sum(param.numel() for param in self.pipeline.model.parameters()),
            psnr=psnr,
        )
        write_report(self.config, rank, report)

    def save_checkpoint(self, step: int) -> None:
        """Nothing: what was learned is of no use to anybody."""


class MeasuringTrainer(_Measuring, NerfXLTrainer):
    """Of ``nerfxl``."""


class PeerTrainer(_Measuring):
    """Of nerfacto, which builds LPIPS, and so downloads weights, even where nobody asks for it."""

    def setup(self, *args: Any, **kwargs: Any) -> None:
        original = torchmetrics.image.lpip.LearnedPerceptualImagePatchSimilarity
        torchmetrics.image.lpip.LearnedPerceptualImagePatchSimilarity = lambda **_: _no_lpips
        try:
            super().setup(*args, **kwargs)
        finally:
            torchmetrics.image.lpip.LearnedPerceptualImagePatchSimilarity = original


class ExchangeMeter:
    """Times and bytes of this rank's exchanges, one entry for each.

    Ranks meet before each exchange, so that it is not charged for waiting; that adds a small all-reduce to the step.
    """

    def __init__(self) -> None:
        self.wait: list[float] = []
        """Seconds until all ranks had come to the exchange."""
        self.exchange: list[float] = []
        """Seconds of the exchange."""
        self.sent: list[int] = []
        """Bytes from this rank."""

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Within this, every exchange of this process is measured."""
        originals = dict(EXCHANGES)
        EXCHANGES.update({name: self._measured(share) for name, share in originals.items()})
        try:
            yield
        finally:
            EXCHANGES.update(originals)

    def _measured(self, share: Callable[..., Shared]) -> Callable[..., Shared]:
        def measured(world: World, held: Sequence[Radiance], enter: Tensor, *args: Any) -> Shared:
            begin = _now(world.device)
            world.any(False)  # returns when all ranks are here
            met = _now(world.device)
            shared = share(world, held, enter, *args)
            self.wait.append(met - begin)
            self.exchange.append(_now(world.device) - met)
            self.sent.append(shared.sent)
            return shared

        return measured


def _now(device: torch.device | str) -> float:
    """Seconds, once the device has done what it was asked for."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _no_lpips(truth: Tensor, prediction: Tensor) -> Tensor:
    """The measure that no figure here needs."""
    return truth.new_full((), math.nan)
