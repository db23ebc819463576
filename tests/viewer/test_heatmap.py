"""The colours of primitives' histories."""

from __future__ import annotations

import torch

from odin_nerfstudio.viewer.colors import heat, rank_color
from odin_nerfstudio.viewer.heatmap import HEATMAPS, STALE, History

HISTORY = History(
    ids=torch.tensor([2, 5, 9]),
    owner=torch.tensor([0, 1, 0]),
    conflict=torch.tensor([0.0, 0.5, 1.0]),
    version=torch.tensor([-1, 100, 75], dtype=torch.int32),
    step=100,
)


def test_colours_say_what_the_history_says() -> None:
    found = {name: paint(HISTORY) for name, paint in HEATMAPS.items()}
    assert torch.equal(found["owner"], torch.tensor([rank_color(0), rank_color(1), rank_color(0)]))
    assert torch.equal(found["conflict"], heat(torch.tensor([0.0, 0.5, 1.0])))
    assert torch.equal(found["staleness"], heat(torch.tensor([1.0, 0.0, 25 / STALE])))
    assert torch.equal(found["version"], heat(torch.tensor([0.0, 1.0, 76 / 101])))


def test_of_newer_primitives_nothing_is_known() -> None:
    chosen = HISTORY.select(torch.tensor([9, 3, 5, 12]))
    assert chosen.owner.tolist() == [0, 0, 1, 0]
    assert chosen.conflict.tolist() == [1, 0, 0.5, 0]
    assert chosen.version.tolist() == [75, -1, 100, -1]
    nothing = History.unknown(torch.empty(0, dtype=torch.int64))
    assert nothing.select(torch.tensor([1])).version.tolist() == [-1]
    assert all(paint(nothing).shape == (0, 3) for paint in HEATMAPS.values())


def test_rows_of_a_history_come_back() -> None:
    again = History.from_rows(HISTORY.to_rows(), HISTORY.ids, HISTORY.step)
    assert all(torch.equal(getattr(again, name), getattr(HISTORY, name)) for name in ("owner", "conflict", "version"))
