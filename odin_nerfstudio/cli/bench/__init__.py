"""``odin-bench``: measures the parts that must be fast, and prints their figures as one line of JSON."""

from __future__ import annotations

import json
import sys
from importlib import import_module

import tyro

from odin_nerfstudio.errors import UserError, exit_with_sentence

BENCHES = {
    "rlg": ("RlgBench", "the relative locality graph of a synthetic capture"),
    "raster": ("RasterBench", "the CPU rasterizer, speed and error against the reference"),
    "equivalence": ("EquivalenceBench", "whether policies and numbers of ranks end with the same scene"),
    "overlap": ("OverlapBench", "how much of the communication each policy hides"),
    "step": ("StepBench", "the time of a training step, ours beside gsplat's and data parallelism's"),
    "scaling": ("ScalingBench", "the same at several numbers of ranks, sizes of the scene and links between ranks"),
    "ablation": ("AblationBench", "the same with one part of Odin left out at a time"),
    "train": ("TrainBench", "whole runs: how long to which PSNR, on how many ranks"),
    "viewer": ("ViewerBench", "what recording costs, and a browser that looks"),
    "nerfxl": ("NerfXLBench", "how exact tiles are, what their exchanges cost, what more of them bring; nerfacto"),
}
"""Name → class in the module of that name (its ``run()`` prints a table and returns the figures), what it measures."""


def entrypoint() -> None:
    """The console script. Only the bench that is named is imported: the others may need what is not installed."""
    name, arguments = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("--help", [])
    if name in ("-h", "--help"):
        print("usage: odin-bench {" + ",".join(BENCHES) + "} [--help] [OPTIONS]\n")
        print("\n".join(f"  {bench:<12} {what}" for bench, (_, what) in BENCHES.items()))
        return
    with exit_with_sentence():
        if name not in BENCHES:
            raise UserError(f"odin-bench: there is no bench {name!r}; choose from {', '.join(BENCHES)}.")
        bench = getattr(import_module(f"odin_nerfstudio.cli.bench.{name}"), BENCHES[name][0])
        figures = tyro.cli(bench, prog=f"odin-bench {name}", args=arguments).run()
        print(json.dumps(figures))
