"""A run on one page of HTML that needs no network and no server: totals, figures, and how to read them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

import numpy as np
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs
from rich.filesize import decimal

from odin_nerfstudio.errors import UserError
from odin_nerfstudio.shadow.contention import KINDS
from odin_nerfstudio.viewer import report_text as text
from odin_nerfstudio.viewer import style
from odin_nerfstudio.viewer.conflict_plot import TITLES, group_conflict_figure, rank_conflict_figure
from odin_nerfstudio.viewer.files import write_file
from odin_nerfstudio.viewer.recording import Recording
from odin_nerfstudio.viewer.shares_plot import load_figure, shares_figure
from odin_nerfstudio.viewer.tile_plot import tile_figure
from odin_nerfstudio.viewer.timeline_plot import timeline_figure

FILE_NAME = "odin_report.html"
"""Of a run's report, in the folder with its config.yml."""
TIMELINE_UNITS = 8
GROUPS = 16
"""Units in a matrix of groups."""


@dataclass(frozen=True)
class _Number:
    """A number of the run or of a rank."""

    name: str
    value: float
    shown: str
    label: str
    meaning: str = ""


def write_report(recording: Recording, path: Path, title: str) -> None:
    """Writes the report of a run: one file, about 5 MB.

    Args:
        recording: of the run.
        path: of the file; its folder is made.
        title: what the run is called.

    Raises:
        UserError: nothing was recorded, or the file cannot be written.
    """
    steps = recording.steps()
    if not steps:
        raise UserError(f"{path}: not written, as no unit was recorded to its end; record some and write it again.")
    ranks = "1 rank" if recording.world_size == 1 else f"{recording.world_size} ranks"
    page = Template((files(__package__) / "report_template.html").read_text(encoding="utf-8")).substitute(
        sections=_sections(recording, steps),
        title=escape(title),
        subtitle=f"{ranks}, {len(steps):,} recorded units: {steps[0]:,} to {steps[-1]:,}",
        background=style.BACKGROUND,
        ink=style.INK,
        muted=style.MUTED,
        grid=style.GRID,
        plotly=get_plotlyjs(),
        run_table=_run_table(_run_numbers(recording, steps)),
        ranks_table=_ranks_table([_rank_numbers(recording, rank, steps) for rank in range(recording.world_size)]),
    )
    write_file(path, page)


def _sections(recording: Recording, steps: Sequence[int]) -> str:
    """HTML of all figures: those of primitives and their owners, or of tiles."""
    sections = [_section(text.TIMELINE, [timeline_figure(recording, steps[-TIMELINE_UNITS:])])]
    if not any(recording.conflicts(step) for step in steps):
        return "\n".join([*sections, _section(text.TILES, [tile_figure(recording, steps)])])
    groups = [group_conflict_figure(recording, kind, steps[-GROUPS:]) for kind in KINDS]
    sections += [
        _section(text.SHARES, [shares_figure(recording, steps)]),
        _section(text.RANKS, [rank_conflict_figure(recording, kind, steps) for kind in KINDS]),
        _section(text.GROUPS, groups, [TITLES[kind].capitalize() for kind in KINDS]),
        _section(text.LOAD, [load_figure(recording, steps)]),
    ]
    return "\n".join(sections)


def _section(said: tuple[str, str], figures: Sequence[go.Figure], headings: Sequence[str] = ()) -> str:
    """A heading, how to read the figures, and these side by side, each under a heading of its own if there are any."""
    drawn = [_figure(figure) for figure in figures]
    if headings:
        drawn = [f"<div><h3>{heading}</h3>\n{each}</div>" for heading, each in zip(headings, drawn, strict=True)]
    columns = f' style="--columns: {len(drawn)}"' if len(drawn) > 1 else ""
    title, explanation = said
    return f'<h2>{title}</h2>\n<p>{explanation}</p>\n<div class="figures"{columns}>' + "\n".join(drawn) + "</div>"


def _figure(figure: go.Figure) -> str:
    """A figure of the panel, as wide as there is room."""
    figure = go.Figure(figure).update_layout(width=None, autosize=True, template="none")
    config = {"responsive": True, "displaylogo": False}
    return figure.to_html(
        config=config, include_plotlyjs=False, full_html=False, default_height=f"{figure.layout.height}px"
    )


# --------------------------------------------------------------------------------------------------------- numbers


def _run_numbers(recording: Recording, steps: Sequence[int]) -> list[_Number]:
    units = [recording.unit(step) for step in steps]
    scope = sum(unit.scope for unit in units)
    sent = [unit.bytes for unit in units]

    def share(name: str, amount: int, meaning: str) -> _Number:
        value = amount / scope if scope else float(name == "early")
        return _Number(f"{name}_share", value, f"{value:.1%}", f"{name} share", meaning)

    hidden = float(np.mean([unit.hidden for unit in units]))
    wait = 1e3 * float(np.median([np.mean(unit.wait) for unit in units]))
    reads = [
        share("early", sum(u.early for u in units), "of the primitives in scope: read without waiting"),
        share("late", sum(u.late for u in units), "of the primitives in scope: pending in the unit before"),
        share("delayed", sum(u.delayed for u in units), "of the primitives in scope: late, read before publication"),
        share("fallback", sum(u.fallback for u in units), "of the primitives in scope: late, too much to delay"),
    ]
    return [
        *(reads if any(recording.conflicts(step) for step in steps) else []),
        _Number("hidden_fraction", hidden, f"{hidden:.1%}", "hidden fraction", "of the communication, mean over units"),
        _Number(
            "exposed_wait_ms",
            wait,
            f"{wait:,.2f} ms",
            "exposed wait",
            "of a rank in a step, median: somebody may have paused the run",
        ),
        _Number("bytes", float(np.mean(sent)), decimal(round(np.mean(sent))), "sent", "by all ranks in a step, mean"),
        _Number("bytes_total", sum(sent), decimal(sum(sent)), "sent in total", "in the recorded units"),
    ]


def _rank_numbers(recording: Recording, rank: int, steps: Sequence[int]) -> list[_Number]:
    timeline, last = recording.timelines[rank], recording.unit(steps[-1])
    wait = 1e3 * float(np.median([recording.unit(step).wait[rank] for step in steps]))
    sent = float(np.mean([timeline.counts(step).get("bytes", 0) for step in steps]))
    primitives, memory = last.primitives[rank], last.memory[rank]
    owned = [_Number("primitives", primitives, f"{primitives:,}", "primitives at the end")]
    return [
        _Number("rank", rank, str(rank), "rank"),
        _Number("exposed_wait_ms", wait, f"{wait:,.2f} ms", "exposed wait a step"),
        _Number("bytes", sent, decimal(round(sent)), "sent a step"),
        *(owned if any(last.primitives) else []),
        _Number("memory", memory, decimal(memory), "memory, at most"),
    ]


def _run_table(numbers: Sequence[_Number]) -> str:
    rows = (
        f'<tr><td>{number.label}</td>{_cell(number)}<td class="meaning">{number.meaning}</td></tr>'
        for number in numbers
    )
    return _table("run", rows)


def _ranks_table(ranks: Sequence[Sequence[_Number]]) -> str:
    head = "".join(f'<th class="number">{number.label}</th>' for number in ranks[0])
    rows = ("<tr>" + "".join(map(_cell, numbers)) + "</tr>" for numbers in ranks)
    return _table("ranks", [f"<tr>{head}</tr>", *rows])


def _table(name: str, rows: Iterable[str]) -> str:
    return "\n".join([f'<table id="{name}">', *rows, "</table>"])


def _cell(number: _Number) -> str:
    """Shows the rounded number and holds the exact one."""
    return f'<td class="number" data-name="{number.name}" data-value="{number.value!r}">{number.shown}</td>'
