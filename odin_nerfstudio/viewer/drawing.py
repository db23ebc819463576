"""The parts of a run in the scene: cells, shards' boxes, the cameras in the order of their turns, edges of the RLG."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
import viser
from nerfstudio.viewer.viewer import VISER_NERFSTUDIO_SCALE_RATIO
from numpy.typing import NDArray

from odin_nerfstudio.viewer.colors import heat, rank_color
from odin_nerfstudio.viewer.lines import lines_glb
from odin_nerfstudio.viewer.monitor import Sketch

MAX_EDGES = 5_000
MARGIN = 0.05
"""Of the scene's extent, around it."""
NO_TURN = (0.45, 0.45, 0.45)
"""Of cameras whose turn is not within sight."""
ROOT = "/odin"
Array = NDArray[np.float64]
Wanted = dict[str, tuple[str, dict[str, Any]]]
"""By name in the scene, the method of viser's scene that adds an object, and its arguments."""

# The corners of a box (bit k of the number: the upper side along axis k) in one stroke that draws all twelve edges.
_STROKE = (0, 1, 3, 2, 0, 4, 5, 1, 5, 7, 3, 7, 6, 2, 6, 4)


def clip_boxes(boxes: Array, inside: Array) -> Array:
    """Cuts boxes off where the scene ends, so that infinite sides can be drawn.

    Args:
        boxes: (G, 2, 3) lower and upper corners; NaN for none.
        inside: (P, 3) what belongs to the scene; rows with NaN do not count.

    Returns:
        (G, 2, 3) boxes. All that is finite stays as it is.
    """
    known = inside[np.isfinite(inside).all(axis=1)]
    if not len(known):
        known = np.zeros((1, 3))
    # A finite face of a cell belongs to the scene too: the cells beyond it must not vanish.
    faces = np.where(np.isfinite(boxes), boxes, np.nan).reshape(-1, 3)
    points = np.concatenate([known, faces])
    low, high = np.nanmin(points, axis=0), np.nanmax(points, axis=0)
    margin = MARGIN * float((high - low).max()) or 1.0
    return np.stack(
        [
            np.where(np.isneginf(boxes[:, 0]), low - margin, boxes[:, 0]),
            np.where(np.isposinf(boxes[:, 1]), high + margin, boxes[:, 1]),
        ],
        axis=1,
    )


def stroke(box: Array) -> Array:
    """All edges of a box as one line.

    Args:
        box: (2, 3) corners.

    Returns:
        (16, 3) points; a few edges are passed twice.
    """
    upper = np.array([[number >> axis & 1 for axis in range(3)] for number in _STROKE])
    return np.take_along_axis(box, upper, axis=0)


def turns(views: int, group_of: Callable[[int], NDArray[np.int64]], step: int, sight: int) -> Array:
    """When each view has its turn, seen from unit ``step``.

    Args:
        views: V.
        group_of: views of a step.
        step: the unit that is now.
        sight: units to look back and ahead.

    Returns:
        (V,) units until the turn, negative after it; the nearest one where there are several, NaN where there is none.
    """
    until = np.full(views, np.nan)
    for distance in sorted(range(-min(sight, step), sight + 1), key=abs, reverse=True):
        until[group_of(step + distance)] = distance
    return until


def strongest_edges(rlg: sp.csr_array, threshold: float) -> tuple[NDArray[np.int64], Array]:
    """The edges of a graph from a weight on, at most :data:`MAX_EDGES` of them.

    Args:
        rlg: (V, V) symmetric weights.
        threshold: smallest weight.

    Returns:
        (E, 2) views and (E,) weights, ascending by weight.
    """
    upper = sp.triu(rlg, k=1).tocoo()
    chosen = np.flatnonzero(upper.data >= threshold)
    chosen = chosen[np.argsort(upper.data[chosen], kind="stable")][-MAX_EDGES:]
    return np.stack([upper.row[chosen], upper.col[chosen]], axis=1).astype(np.int64), upper.data[chosen]


def boxes(name: str, corners: Array, width: float) -> Wanted:
    """The edges of boxes, in the colours of ranks.

    Args:
        name: of the objects together.
        corners: (K, 2, 3) in the model's coordinates; boxes that are not finite are left out.
        width: of the lines, pixels.
    """
    # Without tension the curve's parts are straight.
    shape = {"curve_type": "catmullrom", "tension": 0.0, "line_width": width, "segments": len(_STROKE) - 1}
    return {
        f"{ROOT}/{name}/{number}": (
            "add_spline_catmull_rom",
            {"positions": _scaled(stroke(box)), "color": rank_color(number), **shape},
        )
        for number, box in enumerate(corners)
        if np.isfinite(box).all()
    }


class Drawn:
    """Objects in viser's scene, which are sent when they have changed."""

    def __init__(self, scene: viser.SceneApi) -> None:
        self._scene = scene
        self._handles: dict[str, Any] = {}
        self._contents: dict[str, bytes] = {}

    def show(self, wanted: Wanted) -> None:
        """Sends objects that are new or have changed, and removes those that are not wanted any more."""
        for name in set(self._handles) - set(wanted):
            self._handles.pop(name).remove()
            del self._contents[name]
        for name, (method, arguments) in wanted.items():
            content = b"".join(
                value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode()
                for value in arguments.values()
            )
            if self._contents.get(name) != content:
                self._handles[name] = getattr(self._scene, method)(name, **arguments)
                self._contents[name] = content


class Drawing:
    """Toggles, and what they draw; nothing is asked of the run while all are off.

    Args:
        server: in whose panel, at the present place, the toggles are put.
        sketch: gives the geometry as it is now.
        changed: called when a toggle has changed.
    """

    def __init__(self, server: viser.ViserServer, sketch: Callable[[], Sketch], changed: Callable[[], None]) -> None:
        self._sketch = sketch
        gui = server.gui
        self._cells = gui.add_checkbox("Cells", False, hint="The part of space that each rank owns.")
        self._shards = gui.add_checkbox("Shards", False, hint="The box around the primitives of each rank.")
        self._cameras = gui.add_checkbox(
            "Camera turns", False, hint="Dark: its turn is past; bright: still to come; grey: not within sight."
        )
        self._edges = gui.add_checkbox("RLG edges", False, hint="Between views that see the same; bright: strongly.")
        self._threshold = gui.add_slider("Weight from", 0.0, 1.0, 0.01, 0.2)
        for handle in (self._cells, self._shards, self._cameras, self._edges, self._threshold):
            handle.on_update(lambda _: changed())
        self._graph_of: tuple[sp.csr_array, float, NDArray[np.int64], Array] | None = None
        self._drawn = Drawn(server.scene)

    def update(self, step: int, sight: int) -> None:
        """Draws what is switched on, as at unit ``step``, turns ``sight`` units around it, and removes the rest."""
        wanted: Wanted = {}
        if any(toggle.value for toggle in (self._cells, self._shards, self._cameras, self._edges)):
            sketch = self._sketch()
            size = _extent(sketch.cameras)
            if self._cells.value:
                inside = np.concatenate([sketch.cameras, sketch.shards.reshape(-1, 3)])
                wanted |= boxes("cells", clip_boxes(sketch.cells, inside), 1.5)
            if self._shards.value:
                wanted |= boxes("shards", sketch.shards, 3.0)
            if self._cameras.value:
                wanted |= self._turns(sketch, step, sight, 0.015 * size)
            if self._edges.value:
                wanted |= self._graph(sketch)
        self._drawn.show(wanted)

    def _turns(self, sketch: Sketch, step: int, sight: int, size: float) -> Wanted:
        until = turns(len(sketch.cameras), sketch.group_of, step, sight)
        colors = heat(torch.from_numpy(until / (2 * sight) + 0.5)).numpy()
        colors[np.isnan(until)] = NO_TURN
        points = {"points": _scaled(sketch.cameras), "colors": colors, "point_size": size, "point_shape": "circle"}
        return {f"{ROOT}/cameras": ("add_point_cloud", points)}

    def _graph(self, sketch: Sketch) -> Wanted:
        if self._graph_of is None or self._graph_of[0] is not sketch.rlg or self._graph_of[1] != self._threshold.value:
            threshold = self._threshold.value
            self._graph_of = sketch.rlg, threshold, *strongest_edges(sketch.rlg, threshold)
        *_, edges, weights = self._graph_of
        if not len(edges):
            return {}
        glb = lines_glb(_scaled(sketch.cameras)[edges], heat(torch.from_numpy(weights)).numpy())
        return {f"{ROOT}/rlg": ("add_glb", {"glb_data": glb})}


def _scaled(points: Array) -> Array:
    """From the model's coordinates to those of nerfstudio's viewer."""
    return points * VISER_NERFSTUDIO_SCALE_RATIO


def _extent(points: Array) -> float:
    """Longest side of the box around points, in the viewer's coordinates; 1 for none."""
    return float(np.ptp(_scaled(points), axis=0).max()) or 1.0 if len(points) else 1.0
