"""``odin-bench equivalence``: whether policies and numbers of ranks end with the same scene."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from odin_nerfstudio.cli.bench.ranks import RanksBench, Run, train
from odin_nerfstudio.errors import UserError

LEAST_STEPS = 20
REPEATS = 4
"""Of the runs with quality and with barrier on GPUs, where no two runs are alike."""
Difference = tuple[float, int]
"""The largest absolute difference, and how many primitives only one of the two has."""
Scene = tuple[Tensor, dict[str, Tensor]]
"""Ids ((N,), ascending) and, by name, parameters and moments ((N, ...))."""


@dataclass
class EquivalenceBench(RanksBench):
    """Trains 1, 2 and 4 ranks (no more than --world-size) on the same batches, each with the policies quality and
    barrier and with replicated primitives, over densifications and an opacity reset, and compares the parameters and
    moments that they end with.

    On CPUs every difference must be 0. On GPUs sums are taken in any order, so each of the two policies has four runs,
    and what is given are medians over pairs of them: quality must be no further from barrier than runs with barrier
    are from each other.
    """

    device: Literal["cpu", "cuda"] = "cpu"
    """``cpu`` (gloo) or ``cuda`` (NCCL, a GPU for every rank)."""
    world_size: int = 4
    """The most ranks."""

    def run(self) -> dict[str, Any]:
        """Prints a table and returns the figures: largest differences, and bytes of parameters and moments.

        Raises:
            UserError: for a flag that does not fit, or when a run failed.
        """
        self.check(LEAST_STEPS)
        sizes = [size for size in (1, 2, 4) if size <= self.world_size]
        if self.batch % sizes[-1]:
            raise UserError(f"--batch {self.batch}: must be a multiple of {sizes[-1]}, the most ranks.")
        if self.device == "cuda" and torch.cuda.device_count() < sizes[-1]:
            raise UserError(f"--world-size {self.world_size}: torch sees {torch.cuda.device_count()} GPUs here.")
        runs = self._train(sizes)
        scenes = {key: [_rows(run.checkpoint) for run in alike] for key, alike in runs.items()}
        differences = {
            "quality_barrier": _largest(
                _typical(product(scenes[size, "quality"], scenes[size, "barrier"])) for size in sizes
            ),
            "world": _largest(_compare(scenes[size, "quality"][0], scenes[1, "quality"][0]) for size in sizes),
        }
        if len(sizes) > 1:
            differences["placement"] = _largest(
                _compare(scenes[size, "replicated"][0], scenes[size, "quality"][0]) for size in sizes[1:]
            )
        if self.device == "cuda":
            differences["barrier_barrier"] = _largest(
                _typical(combinations(scenes[size, "barrier"], 2)) for size in sizes
            )
        last = runs[sizes[-1], "quality"][0].reports
        shares = [report.state_bytes for report in last]
        figures: dict[str, Any] = {
            **{f"max_abs_diff_{name}": difference for name, (difference, _) in differences.items()},
            **{f"unmatched_{name}": unmatched for name, (_, unmatched) in differences.items()},
            "bytes_per_rank": max(shares),
            "bytes_per_rank_ratio": max(shares) * len(shares) / sum(shares),
            "primitives_at_start": sum(report.primitives_at_start for report in last),
            "primitives": len(scenes[sizes[-1], "quality"][0][0]),
            "world_sizes": sizes,
            "steps": self.steps,
            "batch": self.batch,
            "device": self.device,
        }
        table = Table(title=f"{self.steps} steps of {self.batch} views on {', '.join(map(str, sizes))} ranks")
        for column in ("", "largest difference", "primitives in one only"):
            table.add_column(column, justify="right" if column else "left")
        for name, (difference, unmatched) in differences.items():
            table.add_row(name.replace("_", " – "), f"{difference:.3g}", f"{unmatched:,}")
        Console().print(table)
        Console().print(
            f"{figures['primitives_at_start']:,} primitives became {figures['primitives']:,}; the largest shard of "
            f"{len(shares)} takes {max(shares) / 2**20:.1f} MiB, {figures['bytes_per_rank_ratio']:.3f} × their mean."
        )
        return figures

    def _train(self, sizes: list[int]) -> dict[tuple[int, str], list[Run]]:
        """The runs by number of ranks and kind."""
        runs: dict[tuple[int, str], list[Run]] = {}
        with TemporaryDirectory(prefix="odin-bench-") as folder:
            config = self.make_config(Path(folder))
            model, fifth = config.pipeline.model, self.steps // 5
            # A densification at 2/5 of the steps, an opacity reset at 3/5 and another densification at 4/5.
            model.refine_every, model.warmup_length, model.reset_alpha_every = fifth, fifth, 3
            model.pause_after_reset, model.sh_degree_interval = fifth // 2, fifth
            repeats = REPEATS if self.device == "cuda" else 1
            for size in reversed(sizes):
                for kind in ["quality", "barrier"] * repeats + ["replicated"] * (size > 1):
                    config.pipeline.policy = "barrier" if kind == "barrier" else "quality"
                    config.pipeline.placement = "replicated" if kind == "replicated" else "sharded"
                    alike, begin = runs.setdefault((size, kind), []), time.monotonic()
                    name = f"{size} ranks {kind}" + f" {len(alike) + 1}" * (repeats > 1)
                    alike.append(train(config, size, self.batch, self.device, self.timeout_s, name))
                    Console().print(f"[dim]{name}: {time.monotonic() - begin:.0f} s")
        return runs


def _rows(checkpoint: dict[str, Any]) -> Scene:
    prefix = "_model.gauss_params."
    values: dict[str, Tensor] = {}
    for key, value in checkpoint["pipeline"].items():
        if key.startswith(prefix):
            name = key.removeprefix(prefix)
            (state,) = checkpoint["optimizers"][name]["state"].values()
            values |= {name: value, f"{name} exp_avg": state["exp_avg"], f"{name} exp_avg_sq": state["exp_avg_sq"]}
    return checkpoint["ids"]["ids"], values


def _compare(a: Scene, b: Scene) -> Difference:
    """Over the primitives that both scenes have, matched by id."""
    in_a, in_b = torch.isin(a[0], b[0]), torch.isin(b[0], a[0])
    pairs = [(a[1][name][in_a], b[1][name][in_b]) for name in a[1]]
    largest = torch.stack([(x - y).abs().max() for x, y in pairs if x.numel()]).max()
    return float(largest), int((~in_a).sum() + (~in_b).sum())


def _typical(pairs: Iterable[tuple[Scene, Scene]]) -> Difference:
    values, unmatched = zip(*(_compare(a, b) for a, b in pairs), strict=True)
    return median(values), int(median(unmatched))


def _largest(differences: Iterable[Difference]) -> Difference:
    values, unmatched = zip(*differences, strict=True)
    return max(values), max(unmatched)
