"""``odin-bench rlg``: time and memory of the relative locality graph at the size of a city."""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass
from math import ceil, isqrt, pi, sqrt
from typing import Any, Literal

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from odin_nerfstudio.errors import UserError
from odin_nerfstudio.plan.locality_graph import relative_locality_graph

POINTS_PER_PIECE = 1_000_000


@dataclass(frozen=True)
class RlgBench:
    """Builds the RLG of a synthetic capture and measures that step alone; making the capture is not timed."""

    views: int = 50_000
    """Number of views."""
    tracks: int = 1_000
    """Tracks that a view observes, on average."""
    track_length: float = 6.0
    """Views that observe a point, on average."""
    structure: Literal["survey", "random"] = "survey"
    """survey: views on a square grid, as flown over a city; a point is seen by the views around it. random: by any
    views, which no real capture looks like: hundreds of times more edges."""
    seed: int = 0
    """Seed of the points."""

    def run(self) -> dict[str, Any]:
        """Prints a table and returns the figures; ``peak_gib`` is the whole process's, the capture included."""
        if min(self.views, self.tracks) < 1 or not 1 <= self.track_length <= self.views:
            raise UserError("--views and --tracks must be at least 1, and --track-length between 1 and --views.")
        incidence = synthetic_capture(self.views, self.tracks, self.track_length, self.structure, self.seed)
        start = time.perf_counter()
        rlg = relative_locality_graph(incidence)
        seconds = time.perf_counter() - start
        figures: dict[str, Any] = {
            "seconds": seconds,
            "peak_gib": _peak_gib(),
            "structure": self.structure,
            "views": self.views,
            "points": incidence.shape[1],
            "observations": incidence.nnz,
            "tracks_per_view": incidence.nnz / self.views,
            "mean_track_length": incidence.nnz / incidence.shape[1],
            "edges": rlg.nnz // 2,
        }
        table = Table(title="Relative locality graph", title_justify="left", show_header=False)
        for key, value in figures.items():
            shown = value if isinstance(value, str) else f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"
            table.add_row(key.replace("_", " "), shown)
        Console().print(table)
        return figures


def synthetic_capture(
    views: int, tracks: int, track_length: float, structure: Literal["survey", "random"], seed: int
) -> sp.csr_array:
    """A view × point incidence, its points in random order.

    In a survey the views are the nodes of a grid of unit pitch, closed to a torus so that no view has fewer neighbours
    than another, and a view sees the points within the radius that gives the wanted track length.

    Args:
        views: V.
        tracks: points seen by a view, on average.
        track_length: views that see a point, on average.
        structure: of the capture.
        seed: of the points.

    Returns:
        (V, V · tracks / track_length) bool.
    """
    random = np.random.default_rng(seed)
    points = max(round(views * tracks / track_length), 1)
    rows: list[NDArray[np.int32]] = []
    columns: list[NDArray[np.int32]] = []
    for start in range(0, points, POINTS_PER_PIECE):
        count = min(POINTS_PER_PIECE, points - start)
        if structure == "survey":
            point, view = _survey(random, count, views, track_length)
        else:
            point = np.repeat(np.arange(count), round(track_length))
            view = random.integers(views, size=len(point))
        rows.append(view.astype(np.int32))
        columns.append((point + start).astype(np.int32))
    row, column = np.concatenate(rows), np.concatenate(columns)
    incidence = sp.csr_array((np.ones(len(row), dtype=bool), (row, column)), shape=(views, points))
    incidence.sum_duplicates()
    return incidence


def _survey(
    random: np.random.Generator, count: int, views: int, track_length: float
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Point and view of every observation of ``count`` points."""
    height = next(side for side in range(isqrt(views), 0, -1) if views % side == 0)
    width = views // height
    radius = sqrt(track_length / pi)
    x, y = random.uniform(0, width, count), random.uniform(0, height, count)
    reach = range(-ceil(radius), ceil(radius) + 2)
    points, seen_by = [], []
    for dx in reach:
        for dy in reach:
            column, row = np.floor(x) + dx, np.floor(y) + dy
            near = np.flatnonzero((column - x) ** 2 + (row - y) ** 2 < radius**2)
            points.append(near)
            seen_by.append((row[near] % height * width + column[near] % width).astype(np.int64))
    return np.concatenate(points), np.concatenate(seen_by)


def _peak_gib() -> float:
    """Largest resident size of the process so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
