"""``odin-bench train``: how long to which PSNR, on how many ranks, with which method and policy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table
from torchvision.models import AlexNet_Weights, alexnet

from odin_nerfstudio.cli.bench.cases import possible_sizes, run_cases
from odin_nerfstudio.cli.bench.ranks import NEVER
from odin_nerfstudio.cli.bench.timed_train import read_step_seconds
from odin_nerfstudio.comm.checkpoint import checkpoint_path
from odin_nerfstudio.errors import UserError
from odin_nerfstudio.methods import odin_splatfacto
from odin_nerfstudio.plan.capture import find_colmap_model
from odin_nerfstudio.viewer.controls import PolicyName

Method = Literal["odin-splatfacto", "nerfxl", "splatfacto"]
SCHEDULE = (
    "resolution_schedule",
    "sh_degree_interval",
    "warmup_length",
    "refine_every",
    "pause_after_reset",
    "stop_split_at",
    "stop_screen_size_at",
)
"""What splatfacto's model counts in steps."""
TABLES = {
    "Time": [
        ("wall, s", "wall_s", ".1f"),
        ("÷ one", "ratio_one_wall", ".2f"),
        ("loop, s", "loop_s", ".1f"),
        ("÷ one", "ratio_one_loop", ".2f"),
        ("step, ms", "step_ms", ".2f"),
    ],
    "Result": [
        ("PSNR", "psnr", ".2f"),
        ("SSIM", "ssim", ".3f"),
        ("primitives", "primitives", ",d"),
        ("÷ splatfacto", "ratio_splatfacto", ".2f"),
    ],
}
"""Title → heading, figure and format of each column."""
SECONDS_TO_END = 30
"""Which ranks get once time is up."""
Figures = dict[str, float | None]
"""Of one run, by name; None where they are not known."""


@dataclass(frozen=True)
class Case:
    """One run."""

    capture: Path
    method: Method
    world_size: int
    policy: PolicyName | None
    """None where there is none to choose."""

    def __str__(self) -> str:
        method = f"{self.method} {self.policy}" if self.policy else self.method
        return f"{self.capture.name}, {method} × {self.world_size}"


@dataclass
class TrainBench:
    """Trains whole runs as ``odin-train`` does, evaluates them with ``ns-eval``, and keeps nothing but the figures.

    Runs of odin-splatfacto see as many views whatever the number of ranks: where a step has n of them, splatfacto's
    schedule runs in 1/n of the steps. nerfxl has as many tiles as ranks, and the same rays in a step on
    any number of them. splatfacto is nerfstudio's own, on one rank. A run that fails is told, and the others go on;
    what there was no time for is named. On GPUs the first run of a method may have kernels to compile.
    """

    captures: tuple[Path, ...]
    """Folders of captures with a COLMAP model, or in nerfstudio's format; images are taken as they are."""
    world_sizes: tuple[int, ...] = (1, 2, 4, 8)
    """Numbers of ranks, in the order of their runs; on GPUs those for which there are enough."""
    methods: tuple[Method, ...] = ("odin-splatfacto",)
    """Which of them, in the order of their runs."""
    policies: tuple[PolicyName, ...] = ("quality",)
    """Of odin-splatfacto on several ranks."""
    views_per_rank: int = 1
    """That each rank renders in a step; of odin-splatfacto on several ranks. With more of them a step waits less, and
    there are fewer steps."""
    images: int = 7000
    """Training views of a run, over all ranks; of nerfxl, steps."""
    scale: float = 1.0
    """Of the images' width and height."""
    device: Literal["cpu", "cuda"] = "cuda"
    """``cpu`` (gloo) or ``cuda`` (NCCL, a GPU for every rank)."""
    budget_s: float = 540.0
    """Seconds that everything may take; a run that is under way then is ended."""

    def run(self) -> dict[str, Any]:
        """Prints a table and returns the figures.

        ``cases`` holds ``capture``, ``method``, ``world_size``, ``policy`` and, of each run: ``wall_s``, of the whole
        command; ``loop_s``, from the end of its first step to that of its last; ``step_ms``, the median step;
        ``views_per_s`` in the loop; ``psnr`` and ``ssim`` of the held-out views; ``primitives`` in the end;
        ``ratio_one_wall`` and ``ratio_one_loop``, ÷ those of the same method and capture on one rank;
        ``ratio_splatfacto``, views a second ÷ those of splatfacto. Unknown figures are null. ``failed`` names runs
        and says why; ``left_out`` names those without time.

        Raises:
            UserError: for a flag that does not fit, or when no run ended well.
        """
        self._check()
        with TemporaryDirectory(prefix="odin-bench-") as home:
            _write_stand_in_weights(Path(home))
            cases = run_cases(self._cases(), lambda case, left: self._measure(case, left, Path(home)), self.budget_s)
        for case, figures in cases.done.items():
            figures |= _ratios(case, cases.done)
        self._print(cases.done)
        return {
            "images": self.images,
            "scale": self.scale,
            "device": self.device,
            "cases": [{**vars(case), "capture": str(case.capture), **run} for case, run in cases.done.items()],
            "failed": cases.failed,
            "left_out": cases.left_out,
        }

    def _check(self) -> None:
        for capture in self.captures:
            if not capture.is_dir():
                raise UserError(f"--captures {capture}: there is no such folder.")
        for flag, chosen in {"captures": self.captures, "methods": self.methods, "policies": self.policies}.items():
            if not chosen or len(set(chosen)) < len(chosen):
                raise UserError(f"--{flag} {' '.join(map(str, chosen))}: different ones are needed.")
        if not self.world_sizes or min(self.world_sizes) < 1 or len(set(self.world_sizes)) < len(self.world_sizes):
            raise UserError(
                f"--world-sizes {' '.join(map(str, self.world_sizes))}: different numbers from 1 on are needed."
            )
        if self.views_per_rank < 1:
            raise UserError(f"--views-per-rank {self.views_per_rank}: at least 1 is needed.")
        if self.images < (least := 3 * max(self.world_sizes) * self.views_per_rank):
            raise UserError(f"--images {self.images}: at least {least}, three steps, are needed.")
        if not (0 < self.scale <= 1 and self.budget_s > 0):
            raise UserError("--scale must be above 0 and at most 1, and --budget-s above 0.")
        if self.device == "cpu" and "splatfacto" in self.methods:
            raise UserError("--methods splatfacto: gsplat's kernels need a GPU; leave it out on CPUs.")
        possible_sizes(self.world_sizes, self.device)

    def _cases(self) -> Iterator[Case]:
        for capture, method in product(self.captures, self.methods):
            for size in possible_sizes(self.world_sizes, self.device) if method != "splatfacto" else [1]:
                choice = method == "odin-splatfacto" and size > 1
                for policy in self.policies if choice else (None,):
                    yield Case(capture, method, size, policy)

    def _measure(self, case: Case, left: float, home: Path) -> Figures:
        """Trains and evaluates; the files of the run are gone afterwards.

        Raises:
            UserError: with the last line of a command that failed, or when the time was over.
        """
        environment = os.environ | {"TORCH_HOME": str(home)}
        environment.setdefault("PYTHONWARNINGS", "ignore")
        if self.device == "cpu":  # ns-eval takes a GPU where it sees one
            environment["CUDA_VISIBLE_DEVICES"] = ""
        if case.method == "splatfacto":  # whose checkpoints torch ≥ 2.6 refuses otherwise
            environment["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
        with TemporaryDirectory(prefix="odin-bench-") as name:
            folder, begin = Path(name), time.monotonic()
            run, results = folder / "bench" / case.method / "run", folder / "eval.json"
            _finish([*self._training(case), "--output-dir", name, *_parser(case.capture)], environment, folder, left)
            wall = time.monotonic() - begin
            evaluation = ["nerfstudio.scripts.eval", "--load-config", str(run / "config.yml"), "--output-path"]
            _finish([*evaluation, str(results)], environment, folder, left - wall)
            quality, seconds = json.loads(results.read_text())["results"], read_step_seconds(run)
            return {
                "wall_s": wall,
                "loop_s": sum(seconds),
                "step_ms": 1e3 * median(seconds),
                "views_per_s": None if case.method == "nerfxl" else self._views(case) * len(seconds) / sum(seconds),
                "psnr": quality["psnr"],
                "ssim": quality["ssim"],
                "primitives": _count_primitives(run),
            }

    def _views(self, case: Case) -> int:
        """Of a step; 1 where steps are of rays."""
        if case.method == "nerfxl" or case.policy is None:
            return 1
        return case.world_size * self.views_per_rank

    def _training(self, case: Case) -> list[str]:
        """Module and arguments, without the capture."""
        views = self._views(case)
        flags: dict[str, Any] = {
            "nproc-per-node": case.world_size,
            "machine.device-type": self.device,
            "experiment-name": "bench",
            "timestamp": "run",
            "max-num-iterations": self.images // views,
            "steps-per-save": NEVER,
            "vis": "viewer",
            "viewer.websocket-host": "127.0.0.1",
            "viewer.quit-on-train-completion": True,
            "pipeline.datamanager.camera-res-scale-factor": self.scale,
        }
        if case.method == "odin-splatfacto":
            flags |= scaled_schedule(views)
        if case.policy is not None:
            flags |= {"pipeline.policy": case.policy, "pipeline.datamanager.batch-per-rank": self.views_per_rank}
        line = ["odin_nerfstudio.cli.bench.timed_train", case.method]
        return line + [part for name, value in flags.items() for part in (f"--{name}", str(value))]

    def _print(self, done: dict[Case, dict[str, Any]]) -> None:
        for title, columns in TABLES.items():
            table = Table("", title=f"{title}, {self.images:,} images", title_justify="left")
            for heading, _, _ in columns:
                table.add_column(heading, justify="right")
            for case, figures in done.items():
                shown = ("–" if figures[name] is None else format(figures[name], how) for _, name, how in columns)
                table.add_row(str(case), *shown)
            Console().print(table)
        Console().print("[dim]÷ one: of the same method on one rank. ÷ splatfacto: views a second.")


def scaled_schedule(views: int) -> dict[str, int]:
    """Flags of odin-splatfacto with which splatfacto's schedule, made for one view a step, keeps its events in views.

    Args:
        views: in a step, over all ranks.
    """
    config: Any = odin_splatfacto.config
    steps = {f"pipeline.model.{name}": getattr(config.pipeline.model, name) for name in SCHEDULE}
    steps["optimizers.means.scheduler.max_steps"] = config.optimizers["means"]["scheduler"].max_steps
    return {name.replace("_", "-"): max(1, count // views) for name, count in steps.items()}


def _parser(capture: Path) -> list[str]:
    """The part of a command line that names the capture and how it is read."""
    model = find_colmap_model(capture)
    if model is None:
        return ["nerfstudio-data", "--data", str(capture), "--load-3D-points", "True", "--downscale-factor", "1"]
    relative = str(model.relative_to(capture))
    return ["colmap", "--data", str(capture), "--colmap-path", relative, "--downscale-factor", "1"]


def _finish(module: list[str], environment: dict[str, str], folder: Path, seconds: float) -> None:
    """Runs a module with its arguments to the end.

    Raises:
        UserError: with the last line of one that failed, or when it was ended after so many seconds.
    """
    log = folder / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *module], env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
        try:
            status = process.wait(max(seconds, 0))
        except subprocess.TimeoutExpired:
            raise UserError(f"{module[0]} was ended after {seconds:.0f} s, when --budget-s was over.") from None
        finally:
            _end(process)
    if status != 0:
        lines = log.read_text(errors="replace").strip().splitlines()
        raise UserError(lines[-1] if lines else f"{module[0]} ended with status {status}.")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process that still runs; a launcher is asked, since only it ends its ranks."""
    process.terminate()
    try:
        process.wait(SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        process.kill()


def _count_primitives(run: Path) -> int | None:
    """Over all ranks; None where a scene has none."""
    path = checkpoint_path(run / "nerfstudio_models")
    # Our own run wrote it, nerfstudio's trainer with NumPy's numbers in it.
    state = torch.load(path, map_location="cpu", weights_only=False, mmap=True)["pipeline"]
    means = state.get("_model.gauss_params.means")
    return None if means is None else len(means)


def _write_stand_in_weights(home: Path) -> None:
    """AlexNet as torchvision would find it in ``TORCH_HOME``, so that nothing is downloaded for LPIPS.

    nerfstudio's own methods build LPIPS even where nobody asks for it; here it is no figure.
    """
    path = home / "hub" / "checkpoints" / Path(AlexNet_Weights.DEFAULT.url).name
    path.parent.mkdir(parents=True)
    torch.save(alexnet(weights=None).state_dict(), path)


def _ratios(case: Case, done: dict[Case, dict[str, Any]]) -> Figures:
    """A run's times ÷ those on one rank, its views a second ÷ those of splatfacto; None where either is unknown."""
    one = done.get(Case(case.capture, case.method, 1, None), {})
    peer = done.get(Case(case.capture, "splatfacto", 1, None), {})
    pairs = {
        "ratio_one_wall": ("wall_s", one),
        "ratio_one_loop": ("loop_s", one),
        "ratio_splatfacto": ("views_per_s", peer),
    }
    figures = done[case]
    return {
        ratio: figures[name] / other[name] if figures[name] is not None and name in other else None
        for ratio, (name, other) in pairs.items()
    }
