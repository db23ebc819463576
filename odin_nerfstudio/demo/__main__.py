"""``python -m odin_nerfstudio.demo``: everything a user does with a capture, once, on a small scene of our own.

Makes the capture, draws its plan, trains, evaluates, renders a turntable and exports a PLY with the same commands that
a user types. What they print goes to OUTPUT_DIR/logs.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import torch
import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from odin_nerfstudio.cli.recipe import recipe_arguments
from odin_nerfstudio.demo.turntable import write_turntable
from odin_nerfstudio.errors import UserError, exit_with_sentence

_CONFIGS = Path(__file__).parents[2] / "configs"
_GPU_STEPS = 3000
_DONE = re.compile(rb"\((\d+\.\d+)%\)")
"""Training's own progress, as nerfstudio prints it."""
_console = Console()


def demo(output_dir: Path = Path("demo")) -> None:
    """Runs the tour.

    Args:
        output_dir: Folder for everything it makes; a capture that is there already is used again.

    Raises:
        UserError: a command failed; names it and the log that says why.
    """
    begin = time.monotonic()
    capture, logs = output_dir / "capture", output_dir / "logs"
    run = output_dir / "outputs" / "temple" / "odin-splatfacto" / "demo"
    gpu = torch.cuda.is_available()
    recipe = _CONFIGS / ("one-gpu.yaml" if gpu else "first-look.yaml")
    train = [
        *("ns-train", "odin-splatfacto", *recipe_arguments(recipe), "--data", str(capture)),
        *(["--max-num-iterations", str(_GPU_STEPS)] if gpu else []),
        *("--vis", "tensorboard"),
        *("--output-dir", str(output_dir / "outputs"), "--experiment-name", "temple", "--timestamp", "demo"),
    ]
    config = ["--load-config", str(run / "config.yml")]
    metrics, path, video = output_dir / "eval.json", output_dir / "turntable.json", output_dir / "turntable.mp4"

    logs.mkdir(parents=True, exist_ok=True)
    if subprocess.run([sys.executable, "-m", "odin_nerfstudio.demo.capture", str(capture)]).returncode != 0:
        raise UserError(f"the capture could not be made in {capture}")
    _step("Plan", ["odin-plan", "--data", str(capture), "--output-dir", str(output_dir / "plan")], logs / "plan.log")
    _step("Training", train, logs / "train.log")
    _step("Evaluation", ["ns-eval", *config, "--output-path", str(metrics)], logs / "eval.log")
    write_turntable(path, run)
    render = ["ns-render", "camera-path", *config, "--camera-path-filename", str(path), "--output-path", str(video)]
    _step("Turntable", render, logs / "render.log")
    export = ["ns-export", "gaussian-splat", *config, "--output-dir", str(output_dir / "export")]
    _step("Export", export, logs / "export.log")

    table = Table(title=f"Done in {time.monotonic() - begin:.0f} s", show_header=False, title_justify="left")
    table.add_row("capture", str(capture))
    table.add_row("plan", str(output_dir / "plan"))
    table.add_row("run", str(run))
    table.add_row("turntable", str(video))
    table.add_row("Gaussians", str(output_dir / "export" / "splat.ply"))
    results = json.loads(metrics.read_text())["results"]
    for name in ("psnr", "ssim", "lpips"):
        if name in results:
            table.add_row(f"{name.upper()} on held-out views", f"{results[name]:.3f}")
    _console.print(table)
    _console.print("Look around in it:", "  " + shlex.join([_tool("ns-viewer"), *config]), sep="\n", soft_wrap=True)


def _tool(name: str) -> str:
    """The command ``name`` of this Python's environment, relative to the working directory if it is below it."""
    path = Path(sys.executable).parent / name
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def _step(title: str, command: list[str], log: Path) -> None:
    """Runs one command with a progress bar; its output goes to ``log``.

    Raises:
        UserError: it failed.
    """
    _console.print(f"[dim]$ {shlex.join(command)}", soft_wrap=True, highlight=False)
    columns = (TextColumn("{task.description:<11}"), BarColumn(), TimeElapsedColumn())
    # unbuffered, so that the bar moves; the libraries' deprecation warnings are not the log's business
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": "ignore"}
    with (
        log.open("wb") as file,
        Progress(*columns, console=_console) as progress,
        subprocess.Popen(
            [_tool(command[0]), *command[1:]], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
        ) as process,
    ):
        bar = progress.add_task(title, total=None)
        assert process.stdout is not None
        for line in process.stdout:
            file.write(line)
            if done := _DONE.search(line):
                progress.update(bar, total=100, completed=float(done[1]))
        if process.wait() == 0:
            progress.update(bar, total=100, completed=100)
    if process.returncode != 0:
        tail = log.read_text(errors="replace").splitlines()[-15:]
        _console.print(*tail, sep="\n", style="dim", markup=False, highlight=False)
        raise UserError(f"{command[0]} stopped with status {process.returncode}; see {log}")


if __name__ == "__main__":
    with exit_with_sentence():
        tyro.cli(demo, prog="python -m odin_nerfstudio.demo", description=__doc__)
