"""What the Shadow Graph hands out, refuses and publishes, one situation a test."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from odin_nerfstudio.shadow.bitmap import Bitmap
from odin_nerfstudio.shadow.graph import UNITS_BETWEEN_LOOKS, ShadowGraph
from odin_nerfstudio.shadow.hazards import HazardError
from odin_nerfstudio.shadow.policy import Barrier, Quality, Throughput
from odin_nerfstudio.shadow.rules import Rules
from odin_nerfstudio.shadow.unit import TaskUnit

ROWS = 200


def ids(*rows: int) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64)


def some(*rows: int) -> Bitmap:
    return Bitmap.from_rows(ids(*rows), ROWS)


def span(begin: int, end: int) -> Bitmap:
    return some(*range(begin, end))


def listed(rows: Bitmap) -> list[int]:
    return rows.rows().tolist()


class Table:
    """Values whose optimizer adds the gradient, and a graph over them."""

    def __init__(self, policy: Quality | None = None) -> None:
        self.values = torch.zeros(ROWS)
        self.commits: list[tuple[int, list[int]]] = []
        self.graph = ShadowGraph(ROWS, self.commit, policy)

    def commit(self, step: int, rows: Tensor, gradients: Mapping[str, Tensor], chosen: Tensor | None) -> None:
        meant = slice(None) if chosen is None else chosen
        self.commits.append((step, rows[meant].tolist()))
        self.values[rows[meant]] += gradients["x"][meant]

    def backward(self, step: int, scope: Bitmap, active: Bitmap, magnitudes: Tensor | None = None) -> TaskUnit:
        """A unit that met nobody, up to its backward."""
        unit = self.graph.admit(step, scope)
        assert listed(self.graph.early(unit)) == listed(scope)
        self.graph.backward(unit, active, self.negligible(active, magnitudes))
        return unit

    def negligible(self, active: Bitmap, magnitudes: Tensor | None) -> Bitmap | None:
        """From the magnitudes of active rows in ascending order."""
        if magnitudes is None:
            return None
        small = self.graph.policy.negligible(magnitudes, torch.ones_like(magnitudes, dtype=torch.bool))
        return Bitmap.from_rows(active.rows(), ROWS, small)

    def publish(self, unit: TaskUnit, *rows: int, last: bool = True) -> None:
        """Of some rows, or of the whole active set."""
        assert unit.active is not None
        part = ids(*rows) if rows else unit.active.rows()
        self.graph.stage(unit, part, {"x": torch.ones(len(part))})
        self.graph.publish(unit, last)

    @contextmanager
    def refused(self, error: type[Exception], match: str) -> Iterator[None]:
        """The block is refused and changes nothing."""
        before = self.state()
        with pytest.raises(error, match=match):
            yield
        assert self.state() == before

    def state(self) -> list[Any]:
        """All that a call could change."""
        graph = self.graph
        tables = (self.values, graph.versions, *graph._read, graph._stale_run)
        sets = ("scope", "early", "late", "stale", "settled", "staged", "published", "negligible")
        return [
            *(table.tolist() for table in tables),
            list(self.commits),
            [unit.step for unit in graph.in_flight],
            [[listed(getattr(unit, name)) for name in sets] for unit in graph.in_flight],
            [unit.active and listed(unit.active) for unit in graph.in_flight],
            [(unit.settled_all, unit.finished, unit.producer) for unit in graph.in_flight],
            [(slot.step, list(slot.parts)) for slot in graph._ring._slots],
        ]


# ---------------------------------------------------------------------------------------------------- reading


def test_backward_frees_what_is_not_active_and_publication_the_rest() -> None:
    table = Table()
    graph = table.graph
    first = graph.admit(0, some(1, 2, 3, 4))
    second = graph.admit(1, some(3, 4, 5, 130))
    assert listed(graph.early(second)) == [5, 130]
    assert listed(graph.early(second)) == []
    assert listed(graph.late(second)) == []
    graph.early(first)
    graph.backward(first, some(1, 4))
    assert listed(graph.early(second)) == [3]
    assert listed(graph.late(second)) == []
    table.publish(first)
    assert listed(graph.early(second)) == []
    assert listed(graph.late(second)) == [4]
    assert listed(graph.late(second)) == []
    expected = {"scope": 4, "early": 3, "late": 1, "delayed": 0, "fallback": 0}
    assert vars(graph.counts(second)) == vars(graph.counts(second, second.sizes().tolist())) == expected


def test_rows_are_freed_as_they_are_settled() -> None:
    """In parts, of which the last one may have nothing left to settle."""
    table = Table()
    graph = table.graph
    first = graph.admit(0, some(1, 2, 3, 4))
    graph.early(first)
    second = graph.admit(1, some(1, 2, 3, 9))
    assert listed(graph.early(second)) == [9]
    graph.backward(first, some(1), among=some(1, 2))
    assert listed(graph.early(second)) == [2]
    assert not first.settled_all
    graph.backward(first, some(4), among=some(3, 4))
    assert listed(graph.early(second)) == [3]
    with table.refused(HazardError, "cannot be done a second time"):
        graph.backward(first, some(), among=some(2))
    graph.backward(first, some())
    assert first.settled_all
    with table.refused(HazardError, "cannot be done a second time"):
        graph.backward(first, some())
    table.publish(first)
    assert table.commits == [(0, [1, 4])]


def test_barrier_reads_nothing_while_another_unit_is_unpublished() -> None:
    table = Table(policy=Barrier())
    graph = table.graph
    first = table.backward(0, some(1, 2), some(1))
    second = graph.admit(1, some(7, 8))
    assert listed(graph.early(second)) == listed(graph.late(second)) == []
    assert str(graph.stall(second)) == "unit 1 waits for 2 primitives held by unit 0, first is row 7"
    table.publish(first)
    assert listed(graph.early(second)) == []
    assert listed(graph.late(second)) == [7, 8]
    assert graph.stall(second) is None


def test_parts_are_published_as_they_are_staged() -> None:
    """The rows that the next unit waits for can go first; the unit finishes when the caller says so."""
    table = Table()
    graph = table.graph
    first = table.backward(0, some(1, 2, 3, 4), some(1, 2, 3))
    second = graph.admit(1, some(3, 4, 9))
    assert listed(graph.early(second)) == [4, 9]
    table.publish(first, 3, last=False)
    assert listed(graph.late(second)) == [3]
    assert not first.finished
    assert graph.versions[ids(1, 2, 3, 4)].tolist() == [-1, -1, 0, -1]
    with table.refused(HazardError, "unit 0 cannot publish for the last time: row 1 was not staged"):
        graph.publish(first)
    table.publish(first, 2, 1)
    assert first.finished
    assert table.commits == [(0, [3]), (0, [2, 1])]
    assert table.values[ids(1, 2, 3, 4)].tolist() == [1, 1, 1, 0]
    assert graph.versions[ids(1, 2, 3, 4)].tolist() == [0, 0, 0, -1]
    assert graph.in_flight == (second,)


def test_the_last_publication_may_have_nothing_left() -> None:
    table = Table()
    unit = table.backward(0, some(1, 2), some(1))
    table.publish(unit, 1, last=False)
    assert table.graph.in_flight == (unit,)
    table.graph.publish(unit, last=False)
    table.graph.publish(unit)
    assert unit.finished
    assert table.commits == [(0, [1])]


def test_a_unit_without_gradients_finishes() -> None:
    table = Table()
    unit = table.backward(0, some(1), some())
    assert not unit.finished
    table.graph.publish(unit)
    assert unit.finished
    assert table.commits == []
    empty = table.graph.admit(1, some())
    table.graph.backward(empty, some())
    table.graph.stage(empty, ids(), {"x": torch.ones(0)})
    table.graph.publish(empty)
    assert empty.finished
    assert table.commits == [(1, [])]


def test_what_is_staged_is_committed_as_it_is_part_by_part() -> None:
    """Rows come in any order and with others among them that are not meant; nothing is copied."""
    committed: list[tuple[Any, ...]] = []
    graph = ShadowGraph(ROWS, lambda *arguments: committed.append(arguments))
    unit = graph.admit(4, some(1, 2, 3, 70, 9))
    graph.early(unit)
    graph.backward(unit, some(2, 3, 70))
    first, second = ids(70, 1, 2), ids(3)
    gradients, chosen = {"x": torch.rand(3), "y": torch.rand(3, 4)}, torch.tensor([True, False, True])
    graph.stage(unit, first, gradients, chosen)
    graph.stage(unit, second, {"x": torch.rand(1)})
    assert listed(unit.staged) == [2, 3, 70]
    assert committed == []
    graph.publish(unit)
    (step, rows, values, meant), (_, others, _, none) = committed
    assert step == 4
    assert (rows is first, others is second, meant is chosen, none) == (True, True, True, None)
    assert values["x"] is gradients["x"] and values["y"] is gradients["y"]
    assert (graph.versions == 4).nonzero()[:, 0].tolist() == [2, 3, 70]


def test_rows_are_staged_as_the_set_that_the_caller_has() -> None:
    table = Table()
    graph = table.graph
    unit = table.backward(0, some(1, 2, 3), some(1, 2, 3))
    rows, gradients = ids(1, 2, 3), {"x": torch.ones(3)}
    graph.stage(unit, rows, gradients, torch.tensor([True, False, True]), some(1, 3))
    assert listed(unit.staged) == [1, 3]
    with table.refused(HazardError, "cannot stage row 3"):
        graph.stage(unit, rows, gradients, torch.tensor([False, True, True]), some(2, 3))
    graph.stage(unit, rows, gradients, torch.tensor([False, True, False]), some(2))
    graph.publish(unit)
    assert table.commits == [(0, [1, 3]), (0, [2])]


def test_a_stall_names_holder_waiter_and_rows() -> None:
    table = Table()
    graph = table.graph
    first = table.backward(6, span(100, 150), span(120, 150))
    second = graph.admit(7, span(110, 170))
    graph.early(second)
    stall = graph.stall(second)
    assert stall is not None
    assert (stall.waiter, stall.holder, stall.rows.tolist()) == (7, 6, list(range(120, 150)))
    assert str(stall) == "unit 7 waits for 30 primitives held by unit 6, first is row 120"
    table.publish(first, *range(120, 149), last=False)
    assert str(graph.stall(second)) == "unit 7 waits for 1 primitive held by unit 6, first is row 149"
    assert graph.stall(first) is None


# ------------------------------------------------------------------------------------------------- throughput


def delayed(
    policy: Throughput, magnitudes: Tensor | None, scope: Bitmap | None = None
) -> tuple[list[int], TaskUnit, ShadowGraph]:
    """What a unit over ``scope`` reads of active rows 0..9 before their publication."""
    table = Table(policy=policy)
    table.backward(0, span(0, 20), span(0, 10), magnitudes)
    unit = table.graph.admit(1, span(8, 28) if scope is None else scope)
    table.graph.early(unit)
    rows = listed(table.graph.late(unit))
    assert rows == listed(unit.stale)
    return rows, unit, table.graph


def test_only_small_gradients_are_delayed() -> None:
    magnitudes = torch.ones(10)
    magnitudes[8], magnitudes[9] = 0.16, 0.17  # the mean is 0.833, a fifth of it 0.1666
    rows, unit, graph = delayed(Throughput(), magnitudes)
    assert rows == [8]
    assert vars(graph.counts(unit)) == {"scope": 20, "early": 18, "late": 1, "delayed": 1, "fallback": 0}
    stall = graph.stall(unit)
    assert stall is not None
    assert stall.rows.tolist() == [9]


def test_only_active_gradients_count() -> None:
    magnitudes, active = torch.tensor([50.0, 1.0, 0.16, 0.0, 0.0, 0.0]), torch.tensor([0, 1, 1, 0, 1, 0]).bool()
    assert Throughput(0.5).negligible(magnitudes, active).tolist() == [False, False, True, False, True, False]
    assert Throughput(0.2).negligible(magnitudes, active).tolist() == [False, False, False, False, True, False]
    for policy in (Quality(), Barrier()):
        assert policy.negligible(magnitudes, active).tolist() == [False] * 6
    assert Throughput().negligible(magnitudes, torch.zeros_like(active)).tolist() == [False] * 6


def test_only_a_small_late_share_is_delayed() -> None:
    magnitudes = torch.ones(10)
    magnitudes[7:] = 0.01
    assert delayed(Throughput(), magnitudes, span(8, 18))[0] == [8, 9]  # 2 late of 10
    assert delayed(Throughput(), magnitudes, span(8, 17))[0] == []  # 2 late of 9
    assert delayed(Throughput(delay_ratio=0.3), magnitudes, span(7, 17))[0] == [7, 8, 9]
    assert delayed(Throughput(delay_ratio=0.2 - 1e-12), magnitudes, span(8, 18))[0] == []
    assert delayed(Throughput(), None)[0] == []


def test_what_is_not_delayed_is_counted_as_fallback() -> None:
    table = Table(policy=Throughput())
    first = table.backward(0, span(0, 10), span(0, 10), torch.ones(10))
    unit = table.graph.admit(1, span(8, 28))
    table.graph.early(unit)
    assert listed(table.graph.late(unit)) == []
    table.publish(first)
    assert listed(table.graph.late(unit)) == [8, 9]
    counts = table.graph.counts(unit)
    assert (counts.late, counts.delayed, counts.fallback) == (2, 0, 2)


def test_a_row_is_delayed_max_delay_units_in_a_row_and_then_read_fresh() -> None:
    """Row 0 is written by every unit with a small gradient, and every unit meets the one before it."""
    table = Table(policy=Throughput(max_delay=2))
    graph, was_delayed, magnitudes = table.graph, [], torch.tensor([0.1, 9.0])
    previous = table.backward(0, some(0, 1), some(0, 1), magnitudes)
    for step in range(1, 9):
        unit = graph.admit(step, some(0) | span(10 * step, 10 * step + 10))
        graph.early(unit)
        was_delayed.append(listed(graph.late(unit)) == [0])
        table.publish(previous)
        assert listed(graph.late(unit)) == ([] if was_delayed[-1] else [0])
        active = some(0, 10 * step)
        graph.backward(unit, active, table.negligible(active, magnitudes))
        previous = unit
    assert was_delayed == [True, True, False, True, True, False, True, True]


# ------------------------------------------------------------------------------------------------- refusals


def test_a_third_unit_is_refused_until_a_slot_is_free() -> None:
    table = Table()
    first = table.backward(0, some(1), some(1))
    table.graph.admit(1, some(2))
    with table.refused(HazardError, "unit 2 needs the staging slot that unit 0 has not finished with"):
        table.graph.admit(2, some(3))
    assert len(table.graph.in_flight) == 2
    table.publish(first)
    assert table.graph.admit(2, some(3)).step == 2


def test_units_are_admitted_in_order() -> None:
    table = Table()
    table.graph.admit(5, some(1))
    for step in (4, 5, 7):
        with table.refused(HazardError, f"unit {step} cannot be admitted after unit 5"):
            table.graph.admit(step, some(1))
    table.graph.admit(6, some(1))


def test_publication_out_of_order_is_refused_and_stays_staged() -> None:
    table = Table()
    graph = table.graph
    first = table.backward(0, some(1), some(1))
    second = graph.admit(1, some(2))
    graph.early(second)
    graph.backward(second, some(2))
    graph.stage(second, ids(2), {"x": torch.tensor([5.0])})
    for last in (True, False):
        with table.refused(HazardError, "unit 1 may not publish before unit 0 has finished"):
            graph.publish(second, last)
    table.publish(first)
    graph.publish(second)
    assert table.commits == [(0, [1]), (1, [2])]
    assert table.values[2] == 5


def test_hooks_in_the_wrong_order_are_refused() -> None:
    table = Table()
    graph = table.graph
    unit = graph.admit(0, some(1, 2, 3))
    one, two = {"x": torch.ones(1)}, {"x": torch.ones(2)}
    with table.refused(HazardError, "cannot be done before it has read its scope"):
        graph.backward(unit, some(1))
    with table.refused(HazardError, "cannot stage gradients before its backward"):
        graph.stage(unit, ids(1), one)
    with table.refused(HazardError, "cannot publish before its backward"):
        graph.publish(unit)
    graph.early(unit)
    with table.refused(ValueError, "row 4 is not in what unit 0 has to settle"):
        graph.backward(unit, some(1, 4))
    with table.refused(ValueError, "row 4 is not in what unit 0 has to settle"):
        graph.backward(unit, some(1), among=some(1, 4))
    with table.refused(ValueError, "row 2 is not in what unit 0 has to settle"):
        graph.backward(unit, some(1, 2), some(2), among=some(1))
    graph.backward(unit, some(1, 2))
    with table.refused(HazardError, "a second time"):
        graph.backward(unit, some(1, 2))
    with table.refused(HazardError, "cannot stage row 3"):
        graph.stage(unit, ids(3, 1), two)
    with table.refused(ValueError, "gradients of x have 3 rows instead of 2"):
        graph.stage(unit, ids(1, 2), {"x": torch.ones(3)})
    with table.refused(ValueError, "cannot choose 1 rows of 2"):
        graph.stage(unit, ids(1, 2), two, torch.tensor([True]))
    graph.stage(unit, ids(1), one)
    with table.refused(HazardError, "cannot stage row 1"):
        graph.stage(unit, ids(1, 2), two)
    with table.refused(HazardError, "cannot stage row 1"):
        graph.stage(unit, ids(1, 2), two, torch.tensor([True, False]))
    graph.publish(unit, last=False)
    with table.refused(HazardError, "cannot stage row 1"):
        graph.stage(unit, ids(1), one)
    graph.stage(unit, ids(1, 2), two, torch.tensor([False, True]))
    graph.publish(unit)
    for last in (True, False):
        with table.refused(HazardError, "cannot publish after it has finished"):
            graph.publish(unit, last)
    assert table.commits == [(0, [1]), (0, [2])]


def test_rows_that_are_not_settled_count_as_written() -> None:
    table = Table()
    unit = table.graph.admit(0, some(1, 2))
    table.graph.early(unit)
    table.graph.backward(unit, some(1), among=some(1))
    table.graph.stage(unit, ids(1), {"x": torch.ones(1)})
    with table.refused(HazardError, "cannot publish for the last time: row 2 was not staged"):
        table.graph.publish(unit)
    table.graph.backward(unit, some())
    table.graph.publish(unit)
    assert table.commits == [(0, [1])]


@pytest.mark.parametrize("size", [0, 199, 201, 1000])
def test_a_scope_is_of_the_rows_that_there_are(size: int) -> None:
    table = Table()
    with table.refused(ValueError, f"the scope of unit 0 is out of {size} rows instead of 200"):
        table.graph.admit(0, Bitmap.empty(size))
    assert table.graph.admit(0, some(199)).step == 0


def test_a_publication_by_others_since_the_reading_is_noticed() -> None:
    """A foreign writer that passes the graph by, as a structural change without a fence would."""
    table = Table()
    unit = table.backward(3, some(1, 2), some(1, 2))
    table.graph.versions[2] = 2
    table.graph.stage(unit, ids(1, 2), {"x": torch.ones(2)})
    with table.refused(HazardError, "row 2 was published by others since unit 3 read it"):
        table.graph.publish(unit)
    assert table.commits == []


def test_a_failed_commit_publishes_nothing() -> None:
    def fail(step: int, rows: Tensor, gradients: Mapping[str, Tensor], chosen: Tensor | None) -> None:
        raise OSError("no")

    graph = ShadowGraph(10, fail)
    unit = graph.admit(0, Bitmap.from_rows(ids(1), 10))
    graph.early(unit)
    graph.backward(unit, unit.scope)
    graph.stage(unit, ids(1), {"x": torch.ones(1)})
    with pytest.raises(OSError, match="no"):
        graph.publish(unit)
    assert graph.versions[1] == -1
    assert graph.in_flight == (unit,)


def test_structural_changes_wait_for_the_pipeline_to_drain() -> None:
    table = Table()
    graph = table.graph
    first = table.backward(0, some(199), some(199))
    graph.admit(1, some(2))
    with table.refused(HazardError, "publication of unit 0 and 1"):
        graph.resize(300)
    table.publish(first)
    with table.refused(HazardError, "publication of unit 1"):
        graph.fence()
    second = graph.in_flight[0]
    graph.early(second)
    graph.backward(second, some())
    graph.publish(second)
    assert graph.versions[199] == 0
    graph.resize(300)
    assert graph.versions.tolist() == [-1] * 300
    last = Bitmap.from_rows(ids(299), 300)
    assert listed(graph.early(graph.admit(2, last))) == [299]


def test_versions_survive_a_resize_that_knows_them() -> None:
    table = Table()
    table.publish(table.backward(0, some(1), some(1)))
    known = table.graph.versions[ids(1, 0, 1)]
    table.graph.resize(3, known)
    assert table.graph.versions.tolist() == [0, -1, 0]
    assert table.graph.versions.dtype == torch.int32
    unit = table.graph.admit(1, Bitmap.from_rows(ids(0, 2), 3))
    table.graph.early(unit)
    table.graph.backward(unit, unit.scope)
    table.graph.stage(unit, ids(0, 2), {"x": torch.ones(2)})
    table.graph.publish(unit)
    assert table.graph.versions.tolist() == [1, -1, 1]
    assert known.tolist() == [0, -1, 0]  # the graph has tables of its own


# ---------------------------------------------------------------------------------- where nobody waits for a GPU


@pytest.fixture
def patient() -> Table:
    """A table whose graph learns later what broke the rules, as it does on a GPU."""
    table = Table()
    table.graph._rules = Rules(torch.device("meta"))
    return table


@pytest.mark.parametrize("then", ["fence", "units"])
def test_a_breach_is_raised_by_a_later_call(patient: Table, then: str) -> None:
    graph = patient.graph
    unit = patient.backward(0, some(1, 2, 3), some(1))
    graph.stage(unit, ids(1, 3), {"x": torch.ones(2)})
    graph.publish(unit)
    with pytest.raises(HazardError, match="unit 0 cannot stage row 3: it is not active or is staged already"):
        if then == "fence":
            graph.fence()
        for step in range(1, UNITS_BETWEEN_LOOKS + 1):
            patient.publish(patient.backward(step, some(5), some(5)))
    graph.fence()


def test_every_breach_says_what_it_was(patient: Table) -> None:
    """Although it is put into words later."""
    graph = patient.graph
    unit = patient.backward(0, some(1, 2), some(1, 2))
    graph.stage(unit, ids(1), {"x": torch.ones(1)})
    graph.publish(unit)
    with pytest.raises(HazardError, match="unit 0 cannot publish for the last time: row 2 was not staged"):
        graph.fence()
    unit = graph.admit(1, some(1, 2))
    graph.backward(unit, some(1))
    patient.publish(unit)
    with pytest.raises(HazardError, match="the backward of unit 1 cannot be done before it has read its scope"):
        graph.fence()
    unit = patient.backward(2, some(1), some(1, 4))
    patient.publish(unit)
    with pytest.raises(ValueError, match="row 4 is not in what unit 2 has to settle"):
        graph.fence()
    unit = graph.admit(3, some(1, 2))
    graph.early(unit)
    graph.backward(unit, some(), among=some(2))
    graph.backward(unit, some(), among=some(1, 2))
    graph.publish(unit)
    with pytest.raises(HazardError, match="the backward of unit 3 cannot be done a second time"):
        graph.fence()
    unit = patient.backward(4, some(7), some(7))
    graph.versions[7] = 2
    patient.publish(unit)
    with pytest.raises(HazardError, match="row 7 was published by others since unit 4 read it"):
        graph.fence()
    graph.fence()


def test_without_a_breach_nothing_is_raised_later(patient: Table) -> None:
    for step in range(5):
        patient.publish(patient.backward(step, some(step, step + 1), some(step)))
        patient.graph.fence()
    assert patient.graph.versions[:6].tolist() == [0, 1, 2, 3, 4, -1]


# --------------------------------------------------------------------------------------------------- memory


def test_memory_does_not_grow_with_the_number_of_units() -> None:
    table = Table()
    graph = table.graph
    generator = torch.Generator().manual_seed(0)

    def run(step: int, unit: TaskUnit, size: int) -> TaskUnit:
        """Unit ``step``, with the next one in flight beside it."""
        following = graph.admit(step + 1, some(*torch.randperm(ROWS, generator=generator)[:size].tolist()))
        graph.early(unit), graph.late(unit)
        active = unit.scope.rows()
        graph.backward(unit, unit.scope)
        graph.stage(unit, active, {"x": torch.ones(len(active)), "y": torch.ones(len(active), 3)})
        staged = graph.nbytes
        graph.publish(unit)
        assert staged - graph.nbytes == len(active) * (8 + 4 + 12)
        return following

    unit = graph.admit(0, span(0, ROWS))
    for step in range(4):
        unit = run(step, unit, ROWS)
    before, first = graph.nbytes, weakref.ref(unit)
    for step in range(4, 60):
        unit = run(step, unit, 1 + step * 3)
    assert graph.nbytes == before
    gc.collect()
    assert first() is None  # units do not keep the ones before them
