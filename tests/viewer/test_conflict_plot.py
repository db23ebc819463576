"""The matrices' cells against the conflicts that were recorded."""

from __future__ import annotations

import pytest
from handmade import LOOK_BACK, handmade_recording

from odin_nerfstudio.viewer.conflict_plot import group_conflict_figure, rank_conflict_figure


@pytest.mark.parametrize("kind", ["raw", "waw", "delayed"])
def test_cells_of_ranks_add_up_owners_and_units(kind: str) -> None:
    recording = handmade_recording(ranks=3, units=5)
    (cells,) = rank_conflict_figure(recording, kind, [1, 2, 4]).data
    rows = range(3) if kind != "waw" else reversed(range(3))
    # The sum over owners 0, 1, 2 of 10 a + b + owner, in three units.
    assert [list(row) for row in cells.z] == [[3 * (3 * (10 * a + b) + 3) for b in range(3)] for a in rows]
    assert list(cells.x) == list(cells.y) == ["0", "1", "2"]


def test_cells_of_groups_are_shares_of_the_later_units_scope() -> None:
    ranks, steps = 2, [0, 1, 2, 3, 4, 5]
    measured, predicted = group_conflict_figure(handmade_recording(ranks, 6), "raw", steps).data
    for row in steps:
        for column in steps:
            lag = row - column
            if 0 < lag <= LOOK_BACK:
                assert measured.customdata[row][column] == ranks * (8 - lag)
                assert measured.z[row][column] == pytest.approx(ranks * (8 - lag) / (ranks * 100))
            else:
                assert measured.z[row][column] is None
            assert predicted.z[row][column] == (pytest.approx(1 / lag) if lag > 0 else None)
    assert "customdata" in measured.hovertemplate and "scope" in measured.hovertemplate


def test_both_matrices_of_groups_have_one_scale() -> None:
    figure = group_conflict_figure(handmade_recording(units=6), "waw", [3, 4, 5])
    assert {trace.coloraxis for trace in figure.data} == {"coloraxis"}
    assert (figure.layout.coloraxis.cmin, figure.layout.coloraxis.cmax) == (
        0,
        1,
    )  # neighbours were predicted to be equal


def test_rows_run_downward() -> None:
    layout = group_conflict_figure(handmade_recording(units=6), "raw", range(5)).layout
    assert layout.yaxis.range == layout.yaxis2.range == (4.5, -0.5) and layout.xaxis.range == (-0.5, 4.5)


def test_numbers_stand_in_few_cells_only() -> None:
    recording = handmade_recording(units=9)
    assert group_conflict_figure(recording, "raw", range(8)).data[0].texttemplate
    assert group_conflict_figure(recording, "raw", range(9)).data[0].texttemplate is None


def test_an_unknown_kind_is_named() -> None:
    with pytest.raises(ValueError, match="'war'"):
        rank_conflict_figure(handmade_recording(), "war", [1])
