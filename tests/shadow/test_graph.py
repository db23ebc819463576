"""What the Shadow Graph hands out, refuses and publishes, one situation a test."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from odin_nerfstudio.shadow.graph import ShadowGraph
from odin_nerfstudio.shadow.hazards import HazardError
from odin_nerfstudio.shadow.policy import Barrier, Quality, Throughput
from odin_nerfstudio.shadow.unit import TaskUnit


def ids(*rows: int) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64)


class Table:
    """Values whose optimizer adds the gradient, and a graph over them."""

    def __init__(self, num_rows: int = 200, policy: Quality | None = None) -> None:
        self.values = torch.zeros(num_rows)
        self.commits: list[tuple[int, list[int]]] = []
        self.graph = ShadowGraph(num_rows, self.commit, policy)

    def commit(self, step: int, rows: Tensor, gradients: Mapping[str, Tensor]) -> None:
        self.commits.append((step, rows.tolist()))
        if len(rows):
            self.values[rows] += gradients["x"]

    def backward(self, step: int, scope: Tensor, active: Tensor, magnitudes: Tensor | None = None) -> TaskUnit:
        """A unit that met nobody, up to its backward."""
        unit = self.graph.admit(step, scope)
        assert torch.equal(self.graph.early(unit), scope)
        self.graph.backward(unit, active, magnitudes)
        return unit

    def publish(self, unit: TaskUnit, *rows: int) -> None:
        part = ids(*rows) if rows else None
        assert unit.active is not None
        count = len(rows) if rows else unit.active.count()
        self.graph.stage(unit, {"x": torch.ones(count)}, part)
        self.graph.publish(unit)


# ---------------------------------------------------------------------------------------------------- reading


def test_backward_frees_what_is_not_active_and_publication_the_rest() -> None:
    table = Table()
    graph = table.graph
    first = graph.admit(0, ids(1, 2, 3, 4))
    second = graph.admit(1, ids(3, 4, 5, 130))
    assert graph.early(second).tolist() == [5, 130]
    assert graph.early(second).tolist() == []
    assert graph.late(second).tolist() == []
    graph.early(first)
    graph.backward(first, ids(1, 4))
    assert graph.early(second).tolist() == [3]
    assert graph.late(second).tolist() == []
    table.publish(first)
    assert graph.early(second).tolist() == []
    assert graph.late(second).tolist() == [4]
    assert graph.late(second).tolist() == []
    assert vars(second.counts) == {"scope": 4, "early": 3, "late": 1, "delayed": 0, "fallback": 0}


def test_barrier_reads_nothing_while_another_unit_is_unpublished() -> None:
    table = Table(policy=Barrier())
    graph = table.graph
    first = table.backward(0, ids(1, 2), ids(1))
    second = graph.admit(1, ids(7, 8))
    assert len(graph.early(second)) == len(graph.late(second)) == 0
    assert str(graph.stall(second)) == "unit 1 waits for 2 primitives held by unit 0, first is row 7"
    table.publish(first)
    assert graph.early(second).tolist() == []
    assert graph.late(second).tolist() == [7, 8]
    assert graph.stall(second) is None


def test_parts_are_published_as_they_are_staged() -> None:
    """The rows that the next unit waits for can go first; the unit finishes with its last row."""
    table = Table()
    graph = table.graph
    first = table.backward(0, ids(1, 2, 3, 4), ids(1, 2, 3))
    second = graph.admit(1, ids(3, 4, 9))
    assert graph.early(second).tolist() == [4, 9]
    table.publish(first, 3)
    assert graph.late(second).tolist() == [3]
    assert not first.finished
    assert graph.versions[ids(1, 2, 3, 4)].tolist() == [-1, -1, 0, -1]
    table.publish(first, 1, 2)
    assert first.finished
    assert table.commits == [(0, [3]), (0, [1, 2])]
    assert table.values[ids(1, 2, 3, 4)].tolist() == [1, 1, 1, 0]
    assert graph.in_flight == (second,)


def test_a_unit_without_gradients_takes_its_step_and_finishes() -> None:
    table = Table()
    unit = table.backward(0, ids(1), ids())
    assert not unit.finished
    table.graph.publish(unit)
    assert unit.finished
    assert table.commits == [(0, [])]
    empty = table.graph.admit(1, ids())
    table.graph.backward(empty, ids())
    table.graph.publish(empty)
    assert empty.finished


def test_a_stall_names_holder_waiter_and_rows() -> None:
    table = Table()
    graph = table.graph
    first = table.backward(6, torch.arange(100, 150), torch.arange(120, 150))
    second = graph.admit(7, torch.arange(110, 170))
    graph.early(second)
    stall = graph.stall(second)
    assert stall is not None
    assert (stall.waiter, stall.holder, stall.rows.tolist()) == (7, 6, list(range(120, 150)))
    assert str(stall) == "unit 7 waits for 30 primitives held by unit 6, first is row 120"
    table.publish(first, *range(120, 149))
    assert str(graph.stall(second)) == "unit 7 waits for 1 primitive held by unit 6, first is row 149"
    assert graph.stall(first) is None


# ------------------------------------------------------------------------------------------------- throughput


def delayed(
    policy: Throughput, magnitudes: Tensor | None, scope: Tensor | None = None
) -> tuple[list[int], TaskUnit, ShadowGraph]:
    """What a unit over ``scope`` reads of active rows 0..9 before their publication."""
    table = Table(policy=policy)
    table.backward(0, torch.arange(20), torch.arange(10), magnitudes)
    unit = table.graph.admit(1, torch.arange(8, 28) if scope is None else scope)
    table.graph.early(unit)
    return table.graph.late(unit).tolist(), unit, table.graph


def test_only_small_gradients_are_delayed() -> None:
    magnitudes = torch.ones(10)
    magnitudes[8], magnitudes[9] = 0.16, 0.17  # the mean is 0.833, a fifth of it 0.1666
    rows, unit, graph = delayed(Throughput(), magnitudes)
    assert rows == [8]
    assert vars(unit.counts) == {"scope": 20, "early": 18, "late": 1, "delayed": 1, "fallback": 0}
    stall = graph.stall(unit)
    assert stall is not None
    assert stall.rows.tolist() == [9]


def test_only_a_small_late_share_is_delayed() -> None:
    magnitudes = torch.ones(10)
    magnitudes[7:] = 0.01
    assert delayed(Throughput(), magnitudes, torch.arange(8, 18))[0] == [8, 9]  # 2 late of 10
    assert delayed(Throughput(), magnitudes, torch.arange(8, 17))[0] == []  # 2 late of 9
    assert delayed(Throughput(delay_ratio=0.3), magnitudes, torch.arange(7, 17))[0] == [7, 8, 9]
    assert delayed(Throughput(), None)[0] == []


def test_what_is_not_delayed_is_counted_as_fallback() -> None:
    table = Table(policy=Throughput())
    first = table.backward(0, torch.arange(10), torch.arange(10), torch.ones(10))
    unit = table.graph.admit(1, torch.arange(8, 28))
    table.graph.early(unit)
    assert len(table.graph.late(unit)) == 0
    table.publish(first)
    assert table.graph.late(unit).tolist() == [8, 9]
    assert (unit.counts.late, unit.counts.delayed, unit.counts.fallback) == (2, 0, 2)


def test_a_row_is_delayed_max_delay_units_in_a_row_and_then_read_fresh() -> None:
    """Row 0 is written by every unit with a small gradient, and every unit meets the one before it."""
    table = Table(policy=Throughput(max_delay=2))
    graph, was_delayed = table.graph, []
    previous = table.backward(0, ids(0, 1), ids(0, 1), torch.tensor([0.1, 9.0]))
    for step in range(1, 9):
        unit = graph.admit(step, torch.cat([ids(0), torch.arange(10 * step, 10 * step + 10)]))
        graph.early(unit)
        was_delayed.append(graph.late(unit).tolist() == [0])
        table.publish(previous)
        assert graph.late(unit).tolist() == ([] if was_delayed[-1] else [0])
        graph.backward(unit, ids(0, 10 * step), torch.tensor([0.1, 9.0]))
        previous = unit
    assert was_delayed == [True, True, False, True, True, False, True, True]


# ------------------------------------------------------------------------------------------------- refusals


def test_a_third_unit_is_refused_until_a_slot_is_free() -> None:
    table = Table()
    first = table.backward(0, ids(1), ids(1))
    table.graph.admit(1, ids(2))
    with pytest.raises(HazardError, match="unit 2 needs the staging slot that unit 0 has not finished with"):
        table.graph.admit(2, ids(3))
    assert len(table.graph.in_flight) == 2
    table.publish(first)
    assert table.graph.admit(2, ids(3)).step == 2


def test_what_publish_returns_outlives_the_slot() -> None:
    table, returned = Table(), []
    for step in range(4):
        unit = table.backward(step, ids(step, 9), ids(step, 9))
        table.graph.stage(unit, {"x": torch.ones(2)})
        returned.append(table.graph.publish(unit))
    assert [rows.tolist() for rows in returned] == [[step, 9] for step in range(4)]


def test_units_are_admitted_in_order() -> None:
    graph = Table().graph
    graph.admit(5, ids(1))
    for step in (4, 5, 7):
        with pytest.raises(HazardError, match=f"unit {step} cannot be admitted after unit 5"):
            graph.admit(step, ids(1))
    graph.admit(6, ids(1))


def test_publication_out_of_order_is_refused_and_stays_staged() -> None:
    table = Table()
    graph = table.graph
    first = table.backward(0, ids(1), ids(1))
    second = graph.admit(1, ids(2))
    graph.early(second)
    graph.backward(second, ids(2))
    graph.stage(second, {"x": torch.tensor([5.0])})
    with pytest.raises(HazardError, match="unit 1 may not publish before unit 0 has finished"):
        graph.publish(second)
    assert table.values[2] == 0
    table.publish(first)
    assert graph.publish(second).tolist() == [2]
    assert table.values[2] == 5


def test_hooks_in_the_wrong_order_are_refused() -> None:
    table = Table()
    graph = table.graph
    unit = graph.admit(0, ids(1, 2, 3))
    with pytest.raises(HazardError, match="cannot be done before it has read its scope"):
        graph.backward(unit, ids(1))
    with pytest.raises(HazardError, match="cannot stage gradients before its backward"):
        graph.stage(unit, {"x": torch.ones(1)})
    with pytest.raises(HazardError, match="cannot publish before its backward"):
        graph.publish(unit)
    graph.early(unit)
    with pytest.raises(ValueError, match="row 4 is not in what unit 0 has to settle"):
        graph.backward(unit, ids(1, 4))
    with pytest.raises(ValueError, match="2 active rows, magnitudes of shape"):
        graph.backward(unit, ids(1, 2), torch.ones(3))
    graph.backward(unit, ids(1, 2))
    with pytest.raises(HazardError, match="a second time"):
        graph.backward(unit, ids(1, 2))
    with pytest.raises(HazardError, match="cannot stage row 3"):
        graph.stage(unit, {"x": torch.ones(2)}, ids(1, 3))
    with pytest.raises(ValueError, match="gradients of x have 3 rows instead of 2"):
        graph.stage(unit, {"x": torch.ones(3)})
    graph.stage(unit, {"x": torch.ones(1)}, ids(1))
    with pytest.raises(HazardError, match="cannot stage row 1"):
        graph.stage(unit, {"x": torch.ones(2)})
    graph.publish(unit)
    table.publish(unit, 2)
    with pytest.raises(HazardError, match="cannot publish after it has finished"):
        graph.publish(unit)
    assert table.commits == [(0, [1]), (0, [2])]


@pytest.mark.parametrize("rows", [(2, 1), (1, 1), (-1, 3), (3, 200)])
def test_rows_must_be_ascending_and_exist(rows: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"ascending and in \[0, 200\)"):
        Table().graph.admit(0, ids(*rows))


def test_a_publication_by_others_since_the_reading_is_noticed() -> None:
    """A foreign writer that passes the graph by, as a structural change without a fence would."""
    table = Table()
    unit = table.backward(3, ids(1, 2), ids(1, 2))
    table.graph.versions[2] = 2
    table.graph.stage(unit, {"x": torch.ones(2)})
    with pytest.raises(HazardError, match="row 2 was published by others since unit 3 read it"):
        table.graph.publish(unit)
    assert table.commits == []


def test_a_failed_commit_publishes_nothing() -> None:
    def fail(step: int, rows: Tensor, gradients: Mapping[str, Tensor]) -> None:
        raise OSError("no")

    graph = ShadowGraph(10, fail)
    unit = graph.admit(0, ids(1))
    graph.early(unit)
    graph.backward(unit, ids(1))
    graph.stage(unit, {"x": torch.ones(1)})
    with pytest.raises(OSError, match="no"):
        graph.publish(unit)
    assert graph.versions[1] == -1
    assert graph.in_flight == (unit,)


def test_structural_changes_wait_for_the_pipeline_to_drain() -> None:
    table = Table()
    graph = table.graph
    first = table.backward(0, ids(199), ids(199))
    graph.admit(1, ids(2))
    with pytest.raises(HazardError, match="publication of unit 0 and 1"):
        graph.resize(300)
    table.publish(first)
    with pytest.raises(HazardError, match="publication of unit 1"):
        graph.fence()
    second = graph.in_flight[0]
    graph.early(second)
    graph.backward(second, ids())
    graph.publish(second)
    assert graph.versions[199] == 0
    graph.resize(300)
    assert graph.versions.tolist() == [-1] * 300
    assert graph.early(graph.admit(2, ids(299))).tolist() == [299]


# --------------------------------------------------------------------------------------------------- memory


def test_memory_does_not_grow_with_the_number_of_units() -> None:
    table = Table()
    graph = table.graph
    generator = torch.Generator().manual_seed(0)

    def run(step: int, unit: TaskUnit, size: int) -> TaskUnit:
        """Unit ``step``, with the next one in flight beside it."""
        following = graph.admit(step + 1, torch.randperm(200, generator=generator)[:size].sort().values)
        graph.early(unit), graph.late(unit)
        active = unit.scope.rows()
        graph.backward(unit, active)
        graph.stage(unit, {"x": torch.ones(len(active)), "y": torch.ones(len(active), 3)})
        graph.publish(unit)
        return following

    unit = graph.admit(0, torch.arange(200))
    for step in range(4):
        unit = run(step, unit, 200)
    before, first = graph.nbytes, weakref.ref(unit)
    for step in range(4, 60):
        unit = run(step, unit, 1 + step * 3)
    assert graph.nbytes == before
    gc.collect()
    assert first() is None  # units do not keep the ones before them
