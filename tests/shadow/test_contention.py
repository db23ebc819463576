"""Conflicts of random units, against plain sets of rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from odin_nerfstudio.shadow.bitmap import Bitmap
from odin_nerfstudio.shadow.contention import Conflicts, Contention, Touched

ROWS, RANKS = 150, 3
some_rows = st.sets(st.integers(0, ROWS - 1), max_size=12)
unit = st.tuples(
    st.lists(some_rows, min_size=RANKS, max_size=RANKS),
    st.lists(some_rows, min_size=RANKS, max_size=RANKS),
    some_rows,
    some_rows,
)
"""Reads of each rank, writes of each rank, more that is in scope, and what is read stale."""


def as_rows(rows: set[int]) -> torch.Tensor:
    return torch.tensor(sorted(rows), dtype=torch.int64)


def bitmap(rows: set[int]) -> Bitmap:
    return Bitmap.from_rows(as_rows(rows), ROWS)


def watch(
    contention: Contention, step: int, reads: list[set[int]], writes: list[set[int]], more: set[int], stale: set[int]
) -> Callable[[], Conflicts]:
    scope = set().union(*reads, *writes, more)
    touched = [Touched(rank, as_rows(rows)) for rank, rows in enumerate(reads)]
    contention.read(step, bitmap(scope), bitmap(stale & scope), touched)
    for rank, rows in enumerate(writes):
        wanted = as_rows(rows | more)  # gradients that are wanted first, among them some that are zero, and the rest
        chosen = torch.tensor([row in rows and row % 2 == 1 for row in wanted.tolist()], dtype=torch.bool)
        contention.wrote(step, Touched(rank, wanted, chosen))
        contention.wrote(step, Touched(rank, as_rows({row for row in rows if row % 2 == 0})))
    conflicts = contention.finish(step)
    assert conflicts is not None
    return conflicts


@settings(deadline=None)  # the first example compiles
@given(units=st.lists(unit, min_size=1, max_size=6), window=st.integers(1, 4))
def test_conflicts_are_those_of_the_sets(units: list, window: int) -> None:
    contention = Contention(ROWS, RANKS)
    contention.window = window
    met: list[set[int]] = []
    coming = [watch(contention, step, *one) for step, one in enumerate(units)]
    for step, (reads, writes, more, stale) in enumerate(units):
        found = coming[step]()  # as it was when the unit finished
        scope = set().union(*reads, *writes, more)
        written = set().union(*writes)
        before = units[step - 1][1] if step else [set()] * RANKS
        assert found.ranks["raw"] == [[len(r & w) for w in before] for r in reads]
        assert found.ranks["delayed"] == [[len(r & w & stale) for w in before] for r in reads]
        assert found.ranks["waw"] == [
            [len(writes[a] & writes[b]) if a != b else 0 for b in range(RANKS)] for a in range(RANKS)
        ]
        expected = {}
        for earlier in range(max(0, step - window), step):
            others = set().union(*units[earlier][1])
            delayed = len(scope & stale & others) if earlier == step - 1 else 0
            expected[earlier] = {"raw": len(scope & others), "waw": len(written & others), "delayed": delayed}
        assert found.groups == expected
        shared = set().union(*(writes[a] & writes[b] for a in range(RANKS) for b in range(a)))
        met.append((scope & set().union(*before)) | shared)
    counted = met[-window:]
    share = [sum(row in rows for rows in counted) / len(counted) for row in range(ROWS)]
    assert contention.share.tolist() == torch.tensor(share).tolist()


def test_what_was_not_watched_from_its_beginning_is_not_known() -> None:
    contention = Contention(ROWS, RANKS)
    contention.wrote(3, Touched(0, as_rows({1})))
    assert contention.finish(3) is None
    assert watch(contention, 4, [{1}] * RANKS, [{1}] * RANKS, set(), set())().groups == {}
    contention.resize(torch.full((10,), -1))
    assert contention.finish(4) is None
    assert contention.share.tolist() == [0] * 10


def test_nobody_watches_unless_asked() -> None:
    contention = Contention(ROWS, 1)
    contention.watching = False
    contention.read(0, bitmap({1}), bitmap(set()), [Touched(0, as_rows({1}))])
    contention.wrote(0, Touched(0, as_rows({1})))
    assert contention.finish(0) is None


def test_shares_follow_rows_that_move() -> None:
    contention = Contention(ROWS, 1)
    for step, rows in enumerate([{1, 2}, {1, 3}, {3}]):
        watch(contention, step, [rows], [rows], set(), set())
    before = contention.share
    assert before[1] == before[3] > 0
    contention.resize(torch.tensor([3, -1, 2, 1, -1]))
    assert contention.share.tolist() == [before[3], 0, before[2], before[1], 0]
    assert watch(contention, 3, [{0}], [{0}], set(), set())().groups == {}, "what met before has other places now"
    assert contention.share[0] == 0.75 * before[3]


def test_a_unit_that_is_in_flight_counts_once_it_is_finished() -> None:
    contention = Contention(ROWS, 1)
    touched = [Touched(0, as_rows({1, 2}))]
    contention.read(0, bitmap({1, 2}), bitmap(set()), touched)
    contention.wrote(0, Touched(0, as_rows({1})))
    contention.finish(0)
    contention.read(1, bitmap({1, 2}), bitmap(set()), touched)
    assert contention.share[1] == 0
    contention.finish(1)
    assert contention.share[[0, 1, 2]].tolist() == [0, 0.5, 0]


@settings(deadline=None)  # the first example compiles
@given(unit)
def test_owners_add_up_and_replicas_do_too(one: tuple) -> None:
    """Halves of the rows on two owners; and three replicas, each of which knows what its own views read."""
    (reads, writes, more, stale), before = one, [{1, 2, 3, 77, 80}] * RANKS
    whole = Contention(ROWS, RANKS)
    watch(whole, 0, before, before, set(), set())
    expected = watch(whole, 1, reads, writes, more, stale)()

    parts = []
    for half in (set(range(70)), set(range(70, ROWS))):
        owner = Contention(ROWS, RANKS)
        watch(owner, 0, [b & half for b in before], [b & half for b in before], set(), set())
        parts.append(watch(owner, 1, [r & half for r in reads], [w & half for w in writes], more & half, stale)())
    assert parts[0] + parts[1] == expected
    assert Conflicts.from_json(expected.to_json()) == expected

    replicas = []
    for rank in range(RANKS):
        contention = Contention(ROWS, RANKS)
        watch(contention, 0, before, before, set(), set())
        own = [rows if reader == rank else set() for reader, rows in enumerate(reads)]
        scope = set().union(*reads, more)
        replicas.append(watch(contention, 1, own, writes, scope, stale)().as_replica(rank))
    assert replicas[0] + replicas[1] + replicas[2] == expected
