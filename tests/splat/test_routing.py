"""Rows by part and by rank, and back."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from odin_nerfstudio.splat.fused.census import Census
from odin_nerfstudio.splat.fused.routing import chosen_first, to_parts, to_ranks


@given(st.integers(1, 3), st.integers(1, 4), st.data())
def test_to_parts_undoes_to_ranks(num_parts: int, ranks: int, data: st.DataObject) -> None:
    count = st.lists(st.integers(0, 5), min_size=ranks, max_size=ranks)
    counts = data.draw(st.lists(count, min_size=num_parts, max_size=num_parts))
    parts = [torch.arange(sum(of_part)) + 100 * number for number, of_part in enumerate(counts)]
    by_rank = to_ranks(parts, counts)
    # Rank after rank, and within a rank part after part.
    keys = [(r, p) for p, of_part in enumerate(counts) for r, n in enumerate(of_part) for _ in range(n)]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    assert torch.equal(by_rank, torch.cat(parts)[torch.tensor(order, dtype=torch.int64)])
    assert all(torch.equal(a, b) for a, b in zip(to_parts(by_rank, counts), parts, strict=True))


@given(st.lists(st.booleans(), max_size=30))
def test_marked_rows_come_first_and_both_ascend(marks: list[bool]) -> None:
    order = chosen_first(torch.tensor(marks, dtype=torch.uint8)).tolist()
    marked, others = ([i for i, mark in enumerate(marks) if mark is which] for which in (True, False))
    assert order == marked + others


def test_a_census_is_read_as_it_was_counted() -> None:
    numbers = list(range(Census.length(3)))
    census = Census.parse(numbers, 3)
    assert census.pairs == [[0, 1, 2], [3, 4, 5]] and census.wanted == [[6, 7, 8], [9, 10, 11]]
    assert (census.rows, census.wanted_rows, census.step, census.signal) == ([12, 13], 14, 15, 16)
