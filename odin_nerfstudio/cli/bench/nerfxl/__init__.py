"""``odin-bench nerfxl``: how exact a field in tiles is, what its exchanges cost, and what more tiles bring."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from nerfstudio.configs.method_configs import method_configs
from nerfstudio.engine.trainer import TrainerConfig
from rich.console import Console
from rich.table import Table

from odin_nerfstudio.cli.bench.nerfxl.exactness import largest_errors
from odin_nerfstudio.cli.bench.nerfxl.training import MeasuringTrainer, PeerTrainer, TrainingReport
from odin_nerfstudio.cli.bench.ranks import run_ranks, set_up
from odin_nerfstudio.errors import UserError
from odin_nerfstudio.methods import nerfxl
from odin_nerfstudio.nerfxl.model import NerfXLModelConfig

Part = Literal["exactness", "exchange", "tiles", "peers"]
PEER = "nerfacto torch"


def _default_model() -> NerfXLModelConfig:
    return copy.deepcopy(nerfxl.config.pipeline.model)


@dataclass
class NerfXLBench:
    """Measures the method nerfxl in up to four parts.

    exactness: an analytic field in 1 … 8 tiles against naive double sums over the field in one piece.
    exchange: --world-size ranks train with exchange tile and with exchange sample; and one process a field in one piece
    from the same rays.
    tiles: one process trains 1, 2, 4 and 8 tiles (--tiles), each with a table of the same size, from the same samples.
    peers: nerfacto with its torch implementation against one tile, from as many rays.
    """

    parts: tuple[Part, ...] = ("exactness", "exchange", "tiles")
    """Which of them, in any order."""
    capture: Path | None = None
    """Folder of a capture in COLMAP's or nerfstudio's format; left out, a small one of the demo scene is made."""
    scale: float = 0.25
    """Of the images' width and height."""
    device: Literal["cpu", "cuda"] = "cpu"
    """``cpu`` (gloo) or ``cuda`` (NCCL, a GPU for every rank); exactness is always a matter of the CPU."""
    world_size: int = 2
    """Ranks of the part exchange."""
    tiles: tuple[int, ...] = (1, 2, 4, 8)
    """Numbers of tiles of the part tiles."""
    steps: int = 400
    """Steps of a run."""
    warmup: int = 300
    """Steps at the beginning that are not timed; occupancy grids know nothing in the first
    --model.occupancy-warmup-steps."""
    rays: int = 1024
    """Rays of a step."""
    trials: int = 25
    """Random scenes for each number of tiles in the part exactness."""
    timeout_s: float = 3600.0
    """Seconds that one run may take."""
    model: NerfXLModelConfig = field(default_factory=_default_model)
    """Of all runs; the bench chooses tiles and exchange itself."""

    def run(self) -> dict[str, Any]:
        """Prints a table for each part and returns the figures.

        exactness: ``max_rel_err_forward`` and ``max_rel_err_grad`` in float64, ``max_rel_err_float32`` at coordinates
        of 10⁴. exchange: ``exchange_cost_ratio``, the median time of an exchange of tiles ÷ that of samples,
        ``exchange_bytes_ratio`` likewise, ``step_ratio_independent``, the median step ÷ that of a single process with
        one tile. tiles and peers: under that name, ``psnr``, ``parameters`` and ``step_s`` of each.

        Raises:
            UserError: for a flag that does not fit, or when a run failed.
        """
        self._check()
        figures: dict[str, Any] = {"parts": list(self.parts), "device": self.device}
        if "exactness" in self.parts:
            figures |= self._exactness()
        if set(self.parts) - {"exactness"}:
            figures |= {"steps": self.steps, "rays": self.rays, "steps_timed": self.steps - 1 - self.warmup}
            with TemporaryDirectory(prefix="odin-bench-") as folder:
                config = self._make_config(nerfxl.config, Path(folder))
                if "exchange" in self.parts:
                    figures |= self._exchange(config)
                by_tiles: dict[int, dict[str, Any]] = {}
                if "tiles" in self.parts:
                    by_tiles = {count: self._judge(config, f"tiles {count}", count) for count in self.tiles}
                    figures["tiles"] = {str(count): row for count, row in by_tiles.items()}
                    _print_rows(f"{self.steps} steps of {self.rays:,} rays, one process", "tiles", figures["tiles"])
                if "peers" in self.parts:
                    figures |= self._peers(config, by_tiles.get(1), Path(folder))
        return figures

    def _check(self) -> None:
        if not self.parts:
            raise UserError("--parts: name at least one.")
        least = {"world-size": 2, "warmup": 1, "rays": 1, "trials": 1}
        for name, value in least.items():
            if (given := getattr(self, name.replace("-", "_"))) < value:
                raise UserError(f"--{name} {given}: at least {value} is needed.")
        if self.steps < self.warmup + 2:
            raise UserError(f"--steps {self.steps}: must be at least {self.warmup + 2}, --warmup and two more.")
        if not self.tiles or min(self.tiles) < 1 or len(set(self.tiles)) < len(self.tiles):
            raise UserError(f"--tiles {' '.join(map(str, self.tiles))}: different numbers from 1 on are needed.")
        if not (0 < self.scale <= 1 and self.timeout_s > 0):
            raise UserError("--scale must be above 0 and at most 1, and --timeout-s above 0.")
        if self.model.tiles is not None:
            raise UserError(f"--model.tiles {self.model.tiles}: the bench chooses them; --tiles says which.")
        if self.model.exchange != "tile":
            raise UserError(f"--model.exchange {self.model.exchange}: the bench tries both; leave the flag out.")
        gpus = torch.cuda.device_count()
        if self.device == "cuda" and gpus < (needed := self.world_size if "exchange" in self.parts else 1):
            raise UserError(f"--device cuda: {needed} GPUs are needed, torch sees {gpus} here.")

    def _make_config(self, method: TrainerConfig, folder: Path) -> TrainerConfig:
        config = copy.deepcopy(method)
        set_up(config, folder, self.capture, self.scale, self.steps)
        config._target = MeasuringTrainer
        config.pipeline.model = copy.deepcopy(self.model)
        config.pipeline.datamanager.train_num_rays_per_batch = self.rays
        return config

    # -------------------------------------------------------------------------------------------------- exactness

    def _exactness(self) -> dict[str, Any]:
        errors = largest_errors(self.trials)
        table = Table(title=f"Largest relative error against double sums, {self.trials} scenes and both exchanges")
        for column in ("tiles", "forward", "gradients", "float32 at 10⁴"):
            table.add_column(column, justify="right")
        for count, row in errors.items():
            table.add_row(str(count), *(f"{error:.1e}" for error in row.values()))
        Console().print(table)
        largest = {name: max(row[name] for row in errors.values()) for name in ("forward", "grad", "float32")}
        return {**{f"max_rel_err_{name}": error for name, error in largest.items()}, "trials": self.trials}

    # --------------------------------------------------------------------------------------------------- exchange

    def _exchange(self, config: TrainerConfig) -> dict[str, Any]:
        rows = {}
        for exchange in ("tile", "sample"):
            config = copy.deepcopy(config)
            config.pipeline.model.exchange = exchange
            rows[exchange] = self._figures(self._train(config, f"exchange {exchange}", self.world_size))
        config = copy.deepcopy(config)
        config.pipeline.model.exchange, config.pipeline.model.tiles = "tile", 1
        with _threads_of_a_rank():
            rows["independent"] = self._figures(self._train(config, "independent"))
        tile, sample, independent = rows.values()
        table = Table(title=f"{self.world_size} ranks, {self.rays:,} rays a step, {self.device}")
        for column in ("", *rows):
            table.add_column(column, justify="right" if column else "left")
        for name in tile:
            table.add_row(name.replace("_", " "), *(f"{row[name]:,.4g}" for row in rows.values()))
        Console().print(table)
        return {
            "exchange_cost_ratio": tile["exchange_s"] / sample["exchange_s"],
            "exchange_bytes_ratio": tile["bytes"] / sample["bytes"] if sample["bytes"] else None,
            "step_ratio_independent": tile["step_s"] / independent["step_s"],
            "world_size": self.world_size,
            "exchanges": rows,
        }

    def _figures(self, reports: list[TrainingReport]) -> dict[str, float]:
        """Over ranks and steps after the warm-up: medians of times, mean of bytes."""
        steps = range(self.warmup, self.steps - 1)
        return {
            "step_s": median(report.seconds[step] for report in reports for step in steps),
            "exchange_s": median(report.exchange[step] for report in reports for step in steps),
            "wait_s": median(report.wait[step] for report in reports for step in steps),
            "bytes": mean(report.sent[step] for report in reports for step in steps),
        }

    # -------------------------------------------------------------------------------------------- tiles and peers

    def _judge(self, config: TrainerConfig, name: str, tiles: int | None = None) -> dict[str, Any]:
        """A run of one process: PSNR over the evaluation images, parameters, and the median step after the warm-up."""
        config = copy.deepcopy(config)
        config.steps_per_eval_all_images = self.steps
        if tiles is not None:
            config.pipeline.model.tiles = tiles
        (report,) = self._train(config, name)
        return {
            "psnr": report.psnr,
            "parameters": report.parameters,
            "step_s": median(report.seconds[self.warmup :]),
        }

    def _peers(self, config: TrainerConfig, alone: dict[str, Any] | None, folder: Path) -> dict[str, Any]:
        peer = copy.deepcopy(method_configs["nerfacto"])
        set_up(peer, folder, config.pipeline.datamanager.data, self.scale, self.steps)
        peer._target = PeerTrainer
        peer.pipeline.datamanager.train_num_rays_per_batch = self.rays
        peer.pipeline.model.implementation = "torch"
        rows = {"nerfxl": alone or self._judge(config, "tiles 1", 1), PEER: self._judge(peer, PEER)}
        _print_rows(f"{self.steps} steps of {self.rays:,} rays, one process", "", rows)
        return {"peers": rows, "step_ratio_nerfacto": rows["nerfxl"]["step_s"] / rows[PEER]["step_s"]}

    def _train(self, config: TrainerConfig, name: str, size: int = 1) -> list[TrainingReport]:
        begin = time.monotonic()
        reports = run_ranks(config, size, self.device, self.timeout_s, name)
        Console().print(f"[dim]{name}: {time.monotonic() - begin:.0f} s")
        return [TrainingReport(**report) for report in reports]


def _print_rows(title: str, what: str, rows: dict[str, dict[str, Any]]) -> None:
    table = Table(title=title)
    for column in (what, "PSNR", "parameters", "step, ms"):
        table.add_column(column, justify="right" if column else "left")
    for name, row in rows.items():
        table.add_row(name, f"{row['psnr']:.2f}", f"{row['parameters']:,}", f"{1e3 * row['step_s']:.1f}")
    Console().print(table)


@contextmanager
def _threads_of_a_rank() -> Iterator[None]:
    """Within this, torch and kernels have as many threads as each of the ranks that were launched before."""
    before = torch.get_num_threads()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    try:
        yield
    finally:
        torch.set_num_threads(before)
