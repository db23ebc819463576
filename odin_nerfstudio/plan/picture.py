"""The plan as one picture: the capture from above, the view × view couplings, and what the order does to them."""

from __future__ import annotations

from typing import Any

import matplotlib
import numpy as np
import scipy.sparse as sp
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection
from matplotlib.colorbar import Colorbar
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from odin_nerfstudio.plan.cameras import ViewCameras
from odin_nerfstudio.plan.conflict import mean_coupling
from odin_nerfstudio.plan.plan import Plan

INK, MUTED, GRID = "#1f2933", "#66727f", "#e4e8ec"
OURS, RANDOM = "#0072b2", "#8a94a0"
CELLS = ("#56b4e9", "#e69f00", "#009e73", "#cc79a7", "#f0e442", "#d55e00", "#0072b2", "#999999")  # Okabe and Ito
ORDER = "viridis"
WEIGHTS = "magma_r"
MAX_EDGES = 20_000
MAX_POINTS = 30_000
MAX_BINS = 600
LAGS = 12
STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 11,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": GRID,
    "axes.titlesize": 12,
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
}


def draw_plan(plan: Plan) -> Figure:
    """Draws the plan, 1760 × 1100 pixels when saved at 110 dots per inch."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(16, 10), dpi=110, facecolor="white")
        grid = figure.add_gridspec(
            2, 3, width_ratios=(1.85, 1, 1), height_ratios=(1, 0.8),
            left=0.05, right=0.965, top=0.85, bottom=0.075, wspace=0.24, hspace=0.2,
        )  # fmt: skip
        figures, order = plan.figures, np.concatenate([g.views for g in plan.schedule.epoch(0)])
        order = order[np.sort(np.unique(order, return_index=True)[1])]
        order = np.concatenate([order, np.setdiff1d(np.arange(plan.schedule.views), order)])
        figure.text(0.05, 0.945, figures["capture"], fontsize=22, fontweight="bold", va="bottom")
        figure.text(0.05, 0.935, _summary(figures), fontsize=11.5, color=MUTED, va="top")

        _draw_map(figure, figure.add_subplot(grid[:, 0]), plan, order)
        before, after = figure.add_subplot(grid[0, 1]), figure.add_subplot(grid[0, 2])
        identity = np.arange(plan.schedule.views)
        _draw_matrix(figure, before, plan.rlg, identity, "Coupling in capture order", "view, as captured")
        _draw_matrix(figure, after, plan.rlg, order, f"… and in {figures['order']} order", "view, as scheduled")
        _draw_lags(figure.add_subplot(grid[1, 1:]), plan)
    return figure


def _summary(figures: dict[str, Any]) -> str:
    ranks, batch = figures["world_size"], figures["batch_per_rank"]
    return (
        f"{figures['views']:,} views, {figures['edges']:,} edges  ·  {ranks} rank{'s' * (ranks > 1)} × "
        f"{batch} view{'s' * (batch > 1)} per step, window {figures['window']}, order {figures['order']}  ·  "
        f"predicted conflict {figures['predicted_conflict']:.2%}, in random order "
        f"{figures['predicted_conflict_random']:.2%}\n{figures['visibility_reason']}"
    )


def _draw_map(figure: Figure, axes: Axes, plan: Plan, order: NDArray[np.int64]) -> None:
    centres, directions = plan.capture.cameras.centres, plan.capture.cameras.directions
    plane, seen_from = _plane(plan.capture.cameras)
    cameras, facing = centres @ plane.T, directions @ plane.T
    points = plan.capture.points if plan.capture.points is not None else plan.visibility.positions
    points = np.empty((0, 3)) if points is None else points[:: max(len(points) // MAX_POINTS, 1)]
    flat = points @ plane.T
    low, high = _frame(cameras, flat)
    ranks = len(plan.partition)

    cells = plan.partition.owner(points)
    for cell in range(ranks):
        own, colour = flat[cells == cell], CELLS[cell % len(CELLS)]
        axes.scatter(own[:, 0], own[:, 1], s=3 if len(points) > 5_000 else 8, color=colour, alpha=0.28, linewidths=0)
        axes.scatter([], [], s=60, color=colour, label=f"rank {cell}")
    if 1 < ranks <= len(CELLS):
        axes.legend(loc="upper right", ncols=4, fontsize=10, columnspacing=1, handletextpad=0.1, edgecolor="none")

    edges = sp.triu(plan.rlg).tocoo()
    strongest = np.argsort(edges.data)[-MAX_EDGES:]
    lines = np.stack([cameras[edges.row[strongest]], cameras[edges.col[strongest]]], axis=1)
    shade = np.zeros((len(lines), 4))
    shade[:, 3] = 0.45 * edges.data[strongest] / (edges.data.max() if edges.nnz else 1)
    axes.add_collection(LineCollection(list(lines), colors=shade, linewidths=0.9, zorder=2))

    place = np.empty(len(order))
    place[order] = np.arange(len(order))
    tick = 0.025 * float((high - low).max())
    sight = np.stack([cameras, cameras + tick * facing], axis=1)
    axes.add_collection(LineCollection(list(sight), colors=INK, linewidths=0.8, alpha=0.6, zorder=3))
    mark = float(np.clip(9_000 / len(order), 8, 70))
    dots = axes.scatter(
        cameras[:, 0], cameras[:, 1], c=place, cmap=ORDER, s=mark, edgecolors="white", linewidths=0.6, zorder=4
    )
    _colour_bar(figure, axes, dots, orientation="horizontal", fraction=0.035, pad=0.075, aspect=45).set_label(
        "place in the first epoch"
    )

    axes.set_title("Cameras, points of each rank, and edges of the locality graph")
    axes.set_xlabel(f"world units, {seen_from}")
    _fill_frame(figure, axes, low, high)
    axes.grid(color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)


def _plane(cameras: ViewCameras) -> tuple[NDArray[np.float64], str]:
    """Axes (2, 3) of the picture's plane, and from where it is seen.

    From above, against the cameras' mean up, if they agree on it. Cameras that all look the same way (a survey from
    the air) say nothing of up by how they are turned; there it is the plane in which they spread.
    """
    ups, directions = cameras.camera_to_worlds[:, :, 1].mean(axis=0), cameras.directions.mean(axis=0)
    spread = np.linalg.svd(cameras.centres - cameras.centres.mean(axis=0), full_matrices=True)[2]
    if np.linalg.norm(ups) > 0.7 and np.linalg.norm(directions) < 0.95:
        normal, seen_from = ups / np.linalg.norm(ups), "seen from above (the cameras' mean up axis)"
    else:
        normal, seen_from = spread[2], "seen along the axis in which the cameras spread least"
        normal = -normal if normal @ directions > 0 else normal
    across = next(axis for axis in spread if np.linalg.norm(np.cross(normal, axis)) > 0.5)
    across = across - (across @ normal) * normal
    across /= np.linalg.norm(across)
    return np.stack([across, np.cross(normal, across)]), seen_from


def _frame(cameras: NDArray[np.float64], points: NDArray[np.float64]) -> tuple[NDArray, NDArray]:
    """Lower and upper corner of what is shown: all cameras and most of the points, but no far outliers."""
    low, high = cameras.min(axis=0), cameras.max(axis=0)
    span = max(float((high - low).max()), 1e-9)
    if len(points) > 1:
        inner_low, inner_high = np.percentile(points, [3, 97], axis=0)
        low = np.minimum(low, np.maximum(inner_low, low - 0.75 * span))
        high = np.maximum(high, np.minimum(inner_high, high + 0.75 * span))
    margin = 0.05 * float((high - low).max()) or 1.0
    return low - margin, high + margin


def _fill_frame(figure: Figure, axes: Axes, low: NDArray[np.float64], high: NDArray[np.float64]) -> None:
    """Shows at least ``low`` to ``high``, at equal scales, and uses all the room that the axes have."""
    room = np.array(axes.get_position().size) * figure.get_size_inches()
    half = room * float(((high - low) / room).max()) / 2
    middle = (low + high) / 2
    axes.set_aspect("equal", adjustable="box")
    axes.set_xlim(middle[0] - half[0], middle[0] + half[0])
    axes.set_ylim(middle[1] - half[1], middle[1] + half[1])


def _colour_bar(figure: Figure, axes: Axes, mappable: ScalarMappable, **layout: Any) -> Colorbar:
    bar = figure.colorbar(mappable, ax=axes, **layout)
    bar.outline.set_visible(False)
    return bar


def _draw_matrix(
    figure: Figure, axes: Axes, rlg: sp.csr_array, order: NDArray[np.int64], title: str, label: str
) -> None:
    """Weights between views, laid in the given order; large captures are averaged into bins."""
    views = len(order)
    bins = min(views, MAX_BINS)
    place = np.empty(views, dtype=np.int64)
    place[order] = np.arange(views) * bins // views
    entries = rlg.tocoo()
    image = sp.coo_array((entries.data, (place[entries.row], place[entries.col])), shape=(bins, bins)).toarray()
    count = np.bincount(place, minlength=bins)
    image = image / np.outer(count, count)
    shown = axes.imshow(
        image,
        cmap=WEIGHTS,
        norm=PowerNorm(0.5, vmin=0, vmax=max(float(image.max()), 1e-9)),
        extent=(0, views, views, 0),
    )
    _colour_bar(figure, axes, shown, fraction=0.046, pad=0.03).ax.tick_params(labelsize=9, length=2)
    axes.set_title(title)
    axes.set_xlabel(label)
    axes.tick_params(length=2, labelsize=9)
    axes.spines[:].set_visible(False)


def _draw_lags(axes: Axes, plan: Plan) -> None:
    window, size = plan.schedule.config.window, plan.schedule.group_size
    for schedule, colour, name in ((plan.control, RANDOM, "random"), (plan.schedule, OURS, plan.schedule.config.order)):
        groups = plan.groups(schedule)
        groups = groups[: max(3 * LAGS, 400_000 // size**2)]
        lags = np.arange(1, min(LAGS, len(groups) - 1) + 1)
        coupling = [mean_coupling(groups, plan.rlg, int(lag)) for lag in lags]
        axes.plot(lags, coupling, color=colour, linewidth=2, marker="o", markersize=4.5, label=f"{name} order")
    axes.axvspan(0.5, window + 0.5, color=OURS, alpha=0.10, linewidth=0)
    axes.set_xlim(0.5, max(len(lags), window) + 0.5)
    axes.set_ylim(bottom=0, top=axes.get_ylim()[1] * 1.12)
    axes.text(0.5, 1.0, "  window", transform=axes.get_xaxis_transform(), color=OURS, fontsize=10, va="top")
    axes.set_title("Mean coupling of a group to an earlier one")
    axes.set_xlabel("groups back")
    axes.set_ylabel("mean RLG weight")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    axes.legend(frameon=False, loc="upper right", ncols=2)
