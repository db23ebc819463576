"""``odin-plan``: what a capture looks like to the scheduler, before any training."""

from __future__ import annotations

import io
import json
import os
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table

from odin_nerfstudio.errors import UserError, exit_with_sentence
from odin_nerfstudio.plan.capture import read_capture
from odin_nerfstudio.plan.plan import Plan
from odin_nerfstudio.plan.schedule import OrderName, ScheduleConfig


@dataclass(frozen=True)
class PlanCommand:
    """Plans the training of a capture: who sees what, which views conflict, in which order they are visited.

    Prints a table, writes plan.json and plan.png, and prints the figures as one line of JSON at the end. All views are
    planned; training holds its evaluation views out first.
    """

    data: Path
    """Folder of a COLMAP or nerfstudio capture."""
    world_size: int = 2
    """Number of ranks, which is also the number of cells that space is split into."""
    batch_per_rank: int = 1
    """Views per rank and step."""
    window: int = 1
    """How many groups before a group it should not conflict with."""
    order: OrderName = "odin"
    """Order of the views: odin, or one of the controls it is compared with."""
    seed: int = 0
    """Seed of the order's random choices."""
    output_dir: Path | None = None
    """Where plan.json and plan.png go; outputs/plan/NAME-OF-THE-CAPTURE if not given."""

    def run(self) -> None:
        capture = read_capture(self.data)
        config = ScheduleConfig(order=self.order, window=self.window, seed=self.seed)
        plan = Plan.build(capture, self.world_size, self.batch_per_rank, config)
        output_dir = self.output_dir or Path("outputs/plan") / capture.name
        console = Console()
        console.print(_table(plan.figures))
        files = {"plan.json": plan.to_json().encode(), "plan.png": _picture(plan)}
        _write(output_dir, files)
        for name in files:
            console.print(f"wrote {output_dir / name}", highlight=False, soft_wrap=True)
        print(json.dumps(plan.figures))


def _table(figures: dict[str, Any]) -> Table:
    table = Table(title=f"Plan of {figures['capture']}", title_justify="left", show_header=False, min_width=60)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    table.add_row("views", f"{figures['views']:,}")
    table.add_row("visibility", f"{figures['visibility']}: {figures['visibility_reason']}")
    if figures["views_observing_nothing"]:
        table.add_row("views that observe nothing", f"{figures['views_observing_nothing']:,}")
    table.add_row("points", f"{figures['points']:,}")
    table.add_row("edges", f"{figures['edges']:,} ({figures['edge_density']:.1%} of all pairs)")
    percentiles = figures["weight_percentiles"]
    table.add_row(
        "edge weights", "  ".join(f"p{percentile} {weight:.4f}" for percentile, weight in percentiles.items())
    )
    table.add_row(
        "steps per epoch",
        f"{figures['steps_per_epoch']:g} of {figures['world_size']} ranks x {figures['batch_per_rank']} views",
    )
    window = figures["window"]
    before = "the group before" if window == 1 else f"the {window} groups before"
    table.add_section()
    table.add_row("predicted conflict", f"share of a group's points that {before} sees too")
    table.add_row(f"  {figures['order']} order", f"{figures['predicted_conflict']:.4f}", style="bold")
    table.add_row("  random order", f"{figures['predicted_conflict_random']:.4f}")
    return table


def _picture(plan: Plan) -> bytes:
    from odin_nerfstudio.plan.picture import draw_plan  # matplotlib takes a second to import

    buffer = io.BytesIO()
    draw_plan(plan).savefig(buffer, format="png")
    return buffer.getvalue()


def _write(folder: Path, files: dict[str, bytes]) -> None:
    """Writes all files into a temporary folder inside, then moves them: a reader never sees half of one.

    Raises:
        UserError: the folder cannot be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".plan-", dir=folder) as beside:
            for name, content in files.items():
                (Path(beside) / name).write_bytes(content)
            for name in files:
                os.replace(Path(beside) / name, folder / name)
    except OSError as error:
        raise UserError(f"--output-dir {folder}: cannot be written to ({error.strerror}).") from error


def entrypoint() -> None:
    """The console script."""
    with exit_with_sentence():
        tyro.cli(PlanCommand, prog="odin-plan", description=PlanCommand.__doc__).run()


if __name__ == "__main__":
    entrypoint()
