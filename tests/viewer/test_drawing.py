"""What is drawn into the scene against the geometry of the run."""

from __future__ import annotations

from collections.abc import Iterator
from io import BytesIO
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch
import trimesh
import viser
from nerfstudio.viewer.viewer import VISER_NERFSTUDIO_SCALE_RATIO
from viser import _messages as messages

from odin_nerfstudio.viewer.colors import heat, rank_color
from odin_nerfstudio.viewer.drawing import MAX_EDGES, NO_TURN, Drawing, clip_boxes, stroke, strongest_edges, turns
from odin_nerfstudio.viewer.monitor import Sketch

INF = np.inf
CAMERAS = np.array([[-2.0, 0, 0], [2, 0, 0], [0, -3, 0], [0, 3, 1]])


def group_of(step: int) -> np.ndarray:
    """One view a step, but never the last one."""
    return np.array([step % 3])


def sketch() -> Sketch:
    cells = np.array([[[-INF] * 3, [0.5, INF, INF]], [[0.5, -INF, -INF], [INF] * 3]])
    shards = np.array([[[-1.0, -1, -1], [0, 1, 1]], [[np.nan] * 3] * 2])
    weights = np.array([[0, 0.9, 0.3, 0], [0.9, 0, 0, 0.6], [0.3, 0, 0, 0], [0, 0.6, 0, 0]])
    return Sketch(cells, shards, CAMERAS, group_of, sp.csr_array(weights))


@pytest.fixture
def server() -> Iterator[viser.ViserServer]:
    server = viser.ViserServer(host="127.0.0.1", port=18_080, verbose=False)
    yield server
    server.stop()


def sent(server: viser.ViserServer, kind: type) -> dict[str, object]:
    """By name, the objects that a browser that joins now would get."""
    pending = server._websock_server._broadcast_buffer.message_from_id.values()
    return {message.name: message for message in pending if isinstance(message, kind)}


def edge_ends(message: Any) -> set[tuple[int, ...]]:
    """The pairs of cameras between which an object has lines, as trimesh reads it."""
    (path,) = trimesh.load(BytesIO(message.glb_data), file_type="glb").geometry.values()
    (lines,) = (path.vertices[entity.points].reshape(-1, 2, 3) for entity in path.entities)
    distances = np.linalg.norm(lines[:, :, None] / VISER_NERFSTUDIO_SCALE_RATIO - CAMERAS, axis=-1)
    assert distances.min(axis=-1).max() < 1e-6
    return set(map(tuple, np.sort(distances.argmin(axis=-1), axis=1).tolist()))


def test_infinite_sides_end_where_the_scene_does() -> None:
    cells = sketch().cells
    clipped = clip_boxes(cells, CAMERAS)
    margin = 0.05 * 6  # of the longest side
    np.testing.assert_allclose(clipped[0], [[-2 - margin, -3 - margin, -margin], [0.5, 3 + margin, 1 + margin]])
    np.testing.assert_allclose(clipped[1], [[0.5, -3 - margin, -margin], [2 + margin, 3 + margin, 1 + margin]])


def test_a_cell_beyond_all_cameras_can_be_seen() -> None:
    clipped = clip_boxes(np.array([[[9.0, -INF, -INF], [INF, INF, INF]]]), CAMERAS)
    assert (clipped[0, 1] > clipped[0, 0]).all() and clipped[0, 0, 0] == 9


def test_a_stroke_draws_the_twelve_edges() -> None:
    box = np.array([[0.0, 1, 2], [3, 5, 7]])
    edges = {frozenset((tuple(a), tuple(b))) for a, b in pairwise(stroke(box).tolist())}
    assert len(edges) == 12
    assert all(sum(x != y for x, y in zip(*edge, strict=True)) == 1 for edge in edges)


def test_turns_are_the_nearest_ones() -> None:
    np.testing.assert_array_equal(turns(4, group_of, step=4, sight=1), [-1, 0, 1, np.nan])
    np.testing.assert_array_equal(turns(4, group_of, step=0, sight=1), [0, 1, np.nan, np.nan])


def test_edges_from_a_weight_on_strongest_last() -> None:
    edges, weights = strongest_edges(sketch().rlg, 0.5)
    assert edges.tolist() == [[1, 3], [0, 1]] and weights.tolist() == [0.6, 0.9]
    many = sp.csr_array(np.triu(np.random.default_rng(0).random((150, 150)), 1))
    _, weights = strongest_edges(many, 0.0)
    assert len(weights) == MAX_EDGES and weights.min() == np.sort(many.data)[-MAX_EDGES]


def test_toggles_draw_and_remove(server: viser.ViserServer) -> None:
    drawing = Drawing(server, sketch, lambda: None)
    drawing.update(step=4, sight=1)
    assert not sent(server, messages.CatmullRomSplineMessage)
    for toggle in (drawing._cells, drawing._shards, drawing._cameras, drawing._edges):
        toggle.value = True
    drawing.update(step=4, sight=1)

    boxes = sent(server, messages.CatmullRomSplineMessage)
    assert set(boxes) == {"/odin/cells/0", "/odin/cells/1", "/odin/shards/0"}
    corners = np.array(boxes["/odin/shards/0"].positions)
    np.testing.assert_allclose([corners.min(0), corners.max(0)], sketch().shards[0] * VISER_NERFSTUDIO_SCALE_RATIO)
    red, green, blue = (int(255 * value) for value in rank_color(1))
    assert boxes["/odin/cells/1"].color == red << 16 | green << 8 | blue

    cameras = sent(server, messages.PointCloudMessage)["/odin/cameras"]
    np.testing.assert_allclose(cameras.points, CAMERAS * VISER_NERFSTUDIO_SCALE_RATIO)
    expected = [*heat(torch.tensor([0, 0.5, 1])).tolist(), list(NO_TURN)]
    np.testing.assert_allclose(cameras.colors, np.array(expected) * 255, atol=1)

    assert edge_ends(sent(server, messages.GlbMessage)["/odin/rlg"]) == {(0, 2), (0, 1), (1, 3)}

    drawing._shards.value = False
    drawing._threshold.value = 0.5
    drawing.update(step=4, sight=1)
    assert set(sent(server, messages.RemoveSceneNodeMessage)) == {"/odin/shards/0"}
    assert edge_ends(sent(server, messages.GlbMessage)["/odin/rlg"]) == {(0, 1), (1, 3)}


def test_what_has_not_changed_is_not_sent_again(server: viser.ViserServer) -> None:
    drawing = Drawing(server, sketch, lambda: None)
    drawing._cells.value = True
    drawing.update(step=4, sight=1)
    before = server._websock_server._broadcast_buffer.message_counter
    drawing.update(step=5, sight=1)
    assert server._websock_server._broadcast_buffer.message_counter == before
