"""Random task units in random interleavings of several ranks, against a model that does one unit after another.

Every rank renders its own views from primitives of all owners; every owner has a Shadow Graph of its own and hears
from the others only what the three hooks say. A seeded scheduler picks who makes the next move.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from odin_nerfstudio.shadow.bitmap import Bitmap
from odin_nerfstudio.shadow.graph import ShadowGraph
from odin_nerfstudio.shadow.hazards import HazardError
from odin_nerfstudio.shadow.policy import Barrier, Quality, Throughput
from odin_nerfstudio.shadow.rules import Rules
from odin_nerfstudio.shadow.unit import TaskUnit, UnitCounts

PRIME = 2**31 - 1
Primitive = tuple[int, int]
"""(owner, row)."""


@dataclass
class View:
    """What one rank renders in one step."""

    scope: list[Primitive]
    active: list[Primitive]

    def gradients(self, step: int, values: Mapping[Primitive, int]) -> dict[Primitive, int]:
        """A toy renderer in which every gradient depends on every value that was read."""
        digest = 17
        for primitive in self.scope:
            digest = (digest * 31 + values[primitive]) % PRIME
        return {p: (digest * (7 * p[1] + p[0] + 1) + step) % PRIME for p in self.active}


def update(value: int, gradient: int) -> int:
    """An optimizer whose steps do not commute."""
    return (value * 5 + gradient) % PRIME


@dataclass(eq=False)
class Scene:
    """Random views for some steps; neighbouring steps share primitives as often as ``coupling`` says."""

    seed: int
    ranks: int
    steps: int
    rows: int
    coupling: float
    views: list[list[View]] = field(init=False)

    def __post_init__(self) -> None:
        draw = random.Random(self.seed)
        primitives = [(owner, row) for owner in range(self.ranks) for row in range(self.rows)]
        self.initial = {p: draw.randrange(PRIME) for p in primitives}
        self.views, hot = [], primitives[:: max(1, round(1 / max(self.coupling, 0.05)))]
        for _ in range(self.steps):
            step = []
            for _ in range(self.ranks):
                chosen = {p for p in hot if draw.random() < 0.7} | {p for p in primitives if draw.random() < 0.15}
                scope = sorted(chosen)
                step.append(View(scope, [p for p in scope if draw.random() < 0.6]))
            self.views.append(step)
        self.scope = self._of_owners("scope")
        """[step][owner] → rows in the scope of any view."""
        self.active = self._of_owners("active")
        """[step][owner] → active rows of any view."""
        self.magnitudes = [
            [torch.tensor([draw.choice((1 / 128, 1 / 128, 1 / 128, 9.0)) for _ in range(self.rows)]) for _ in owners]
            for owners in self.active
        ]
        """[step][owner] → for every row, active or not: most gradients are small, a few large."""

    def _of_owners(self, kind: str) -> list[list[list[int]]]:
        rows: list[list[set[int]]] = [[set() for _ in range(self.ranks)] for _ in self.views]
        for step, views in enumerate(self.views):
            for owner, row in (primitive for view in views for primitive in getattr(view, kind)):
                rows[step][owner].add(row)
        return [[sorted(chosen) for chosen in owners] for owners in rows]


@dataclass
class Sequential:
    """One unit after another: the values and versions that each unit reads, and the last ones."""

    scene: Scene

    def __post_init__(self) -> None:
        values, versions = dict(self.scene.initial), dict.fromkeys(self.scene.initial, -1)
        self.values, self.versions, self.gradients = [dict(values)], [dict(versions)], []
        for step, views in enumerate(self.scene.views):
            total: Counter[Primitive] = Counter()
            for view in views:
                total.update(view.gradients(step, values))
            for primitive, gradient in total.items():
                values[primitive], versions[primitive] = update(values[primitive], gradient), step
            self.values.append(dict(values))
            self.versions.append(dict(versions))
            self.gradients.append(dict(total))


class Owner:
    """Values of some primitives and the loop around their graph, one move at a time."""

    def __init__(self, run: Run, index: int) -> None:
        self.run, self.index = run, index
        self.values = torch.tensor([run.scene.initial[index, row] for row in range(run.scene.rows)])
        self.graph = ShadowGraph(run.scene.rows, self.commit, run.policy)
        if run.draw.random() < 0.5:  # learns later what broke the rules, as on a GPU
            self.graph._rules = Rules(torch.device("meta"))
        self.units: list[TaskUnit] = []
        self.handed: list[Counter[int]] = []
        self.early: list[set[int]] = []
        self.unsettled: dict[int, list[Tensor]] = {}
        self.parts: dict[int, list[Tensor]] = {}
        self.mean_of: dict[int, dict[int, Tensor]] = {}
        self.published: dict[int, list[int]] = {row: [] for row in range(run.scene.rows)}

    def commit(self, step: int, rows: Tensor, gradients: Mapping[str, Tensor], chosen: Tensor | None) -> None:
        for i, row in enumerate(rows.tolist()):
            if chosen is None or chosen[i]:
                self.values[row] = update(int(self.values[row]), int(gradients["x"][i]))
                self.published[row].append(step)

    def set_of(self, rows: Tensor | list[int]) -> Bitmap:
        return Bitmap.from_rows(torch.as_tensor(rows, dtype=torch.int64), self.run.scene.rows)

    def is_complete(self, step: int) -> bool:
        """Whether all that the unit writes is settled and staged."""
        return not self.unsettled[step] and not self.parts[step]

    def moves(self) -> list[str]:
        """Moves that the hooks allow now; each makes progress or is a look that may find nothing."""
        moves = ["admit"] if len(self.units) < self.run.scene.steps and len(self.graph.in_flight) < 2 else []
        for name, unit in zip(("old", "new"), self.graph.in_flight, strict=False):
            complete = sum(self.handed[unit.step].values()) == len(self.run.scene.scope[unit.step][self.index])
            assert complete == unit.complete
            if not complete:
                moves += [f"early {name}", f"late {name}"]
            elif self.unsettled[unit.step] and all(done > unit.step for done in self.run.rendered):
                moves.append(f"backward {name}")
            if self.parts[unit.step]:
                moves.append(f"stage {name}")
            if unit.active is not None and name == "old":
                if unit.staged - unit.published:
                    moves.append("publish some")
                if self.is_complete(unit.step):
                    moves.append("publish last")
        return moves

    def move(self, name: str) -> bool:
        """Makes a move; returns whether anything changed."""
        kind, _, which = name.partition(" ")
        if kind == "admit":
            step = len(self.units)
            scope = self.run.scene.scope[step][self.index]
            self.units.append(self.graph.admit(step, self.set_of(scope)))
            self.handed.append(Counter())
            self.early.append(set())
            self.unsettled[step] = self.shares(scope) or [torch.empty(0, dtype=torch.long)]
            self.parts[step], self.mean_of[step] = [], {}
            return True
        if kind == "publish":
            self.graph.publish(self.graph.in_flight[0], last=which == "last")
            return True
        unit = self.graph.in_flight[which == "new"]
        if kind in ("early", "late"):
            rows = (self.graph.early(unit) if kind == "early" else self.graph.late(unit)).rows().tolist()
            if kind == "early":
                self.early[unit.step].update(rows)
            self.read(unit, rows)
            return len(rows) > 0
        if kind == "backward":
            self.backward(unit)
        else:
            self.stage(unit)
        return True

    def backward(self, unit: TaskUnit) -> None:
        """Settles the next part; the last call may have nothing left."""
        settled, rest = self.unsettled[unit.step].pop(), self.unsettled[unit.step]
        among = None
        if rest or self.run.draw.random() < 0.5:
            among = self.set_of(settled)
            if not rest:
                rest.append(settled[:0])
        active = torch.isin(settled, torch.tensor(self.run.scene.active[unit.step][self.index]).long())
        magnitudes = self.run.scene.magnitudes[unit.step][self.index][settled]
        small = self.run.policy.negligible(magnitudes, active)
        negligible = Bitmap.from_rows(settled, self.run.scene.rows, small)
        self.graph.backward(unit, self.set_of(settled[active]), negligible, among)
        self.mean_of[unit.step].update(dict.fromkeys(settled[active].tolist(), magnitudes[active].mean()))
        self.parts[unit.step] += self.shares(settled[active].tolist())

    def stage(self, unit: TaskUnit) -> None:
        """Stages the next part: its rows in any order, among others that are not meant."""
        part = self.parts[unit.step].pop()
        rows = torch.cat([part, self.others(part)])
        rows = rows[torch.randperm(len(rows), generator=self.run.generator)]
        chosen = torch.isin(rows, part)
        posted = (posts[unit.step] for posts in self.run.posted)
        gradients = [[post.get((self.index, row), 0) for row in rows.tolist()] for post in posted]
        everything = len(rows) == len(part) and self.run.draw.random() < 0.5
        total = torch.tensor(gradients, dtype=torch.int64).sum(0)
        self.graph.stage(unit, rows, {"x": total}, None if everything else chosen)

    def others(self, part: Tensor) -> Tensor:
        """Some rows that are not in a part."""
        others = torch.arange(self.run.scene.rows)
        others = others[~torch.isin(others, part)]
        return others[torch.rand(len(others), generator=self.run.generator) < self.run.draw.choice((0, 0, 0.5))]

    def shares(self, rows: list[int]) -> list[Tensor]:
        """The rows in up to three parts and an order at random; none of the parts is empty."""
        shuffled = torch.tensor(rows, dtype=torch.long)[torch.randperm(len(rows), generator=self.run.generator)]
        return [part for part in shuffled.chunk(self.run.draw.choice((1, 2, 3))) if len(part)]

    def counts(self, unit: TaskUnit) -> UnitCounts:
        return self.graph.counts(unit)

    def read(self, unit: TaskUnit, rows: list[int]) -> None:
        self.handed[unit.step].update(rows)
        for row in rows:
            self.run.check_read(self, unit, row)
            self.run.inbox[unit.step][self.index, row] = int(self.values[row])


class Run:
    """All owners and ranks of one schedule."""

    def __init__(self, scene: Scene, policy: Quality, seed: int) -> None:
        self.scene, self.policy, self.model = scene, policy, Sequential(scene)
        self.draw = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.inbox: list[dict[Primitive, int]] = [{} for _ in range(scene.steps)]
        self.rendered = [0] * scene.ranks
        self.posted: list[dict[int, dict[Primitive, int]]] = [{} for _ in range(scene.ranks)]
        self.stale_run: Counter[Primitive] = Counter()
        self.stale_reads = 0
        self.owners = [Owner(self, index) for index in range(scene.ranks)]

    def render(self, rank: int) -> bool:
        """Renders the rank's next view once everything in its scope has arrived; ranks do not wait for each other."""
        step = self.rendered[rank]
        if step == self.scene.steps or any(p not in self.inbox[step] for p in self.scene.views[step][rank].scope):
            return False
        self.posted[rank][step] = self.scene.views[step][rank].gradients(step, self.inbox[step])
        self.rendered[rank] += 1
        return True

    def moves(self) -> Iterator[tuple[int, str]]:
        for index, owner in enumerate(self.owners):
            yield from ((index, name) for name in owner.moves())
        for rank in range(self.scene.ranks):
            yield rank, "render"

    def finish(self) -> None:
        """Runs to the end, one random move after another."""
        # Ranks are slow or fast for a whole schedule, so that they drift apart as far as the graph lets them.
        pace = [self.draw.choice((1, 5, 25)) for _ in range(self.scene.ranks)]
        while any(len(o.units) < self.scene.steps or o.graph.in_flight for o in self.owners):
            options = list(self.moves())
            while options:
                chosen = self.draw.choices(range(len(options)), [pace[index] for index, _ in options])[0]
                index, name = options.pop(chosen)
                if self.render(index) if name == "render" else self.owners[index].move(name):
                    break
            else:
                stalls = [str(o.graph.stall(unit)) for o in self.owners for unit in o.graph.in_flight]
                pytest.fail(f"nobody can move: {stalls}")

    def check_read(self, owner: Owner, unit: TaskUnit, row: int) -> None:
        """Called before the value is copied."""
        primitive = owner.index, row
        expected = self.model.versions[unit.step][primitive]
        fresh = int(owner.graph.versions[row]) == expected
        if not self.policy.delays:
            assert fresh
            assert int(owner.values[row]) == self.model.values[unit.step][primitive]
            return
        self.stale_run[primitive] = 0 if fresh else self.stale_run[primitive] + 1
        if not fresh:
            self.check_delay(owner, unit, row)

    def check_delay(self, owner: Owner, unit: TaskUnit, row: int) -> None:
        assert isinstance(self.policy, Throughput)
        self.stale_reads += 1
        assert expected_writer(self.scene, unit.step, owner.index, row) == unit.step - 1
        assert self.stale_run[owner.index, row] <= self.policy.max_delay
        producer = owner.units[unit.step - 1]
        active = self.scene.active[producer.step][owner.index]
        late = [
            r
            for r in self.scene.scope[unit.step][owner.index]
            if r in active and producer.step not in owner.published[r]
        ]
        assert len(late) <= self.policy.delay_ratio * len(self.scene.scope[unit.step][owner.index])
        magnitudes = self.scene.magnitudes[producer.step][owner.index]
        assert magnitudes[row] < self.policy.delay_ratio * owner.mean_of[producer.step][row]

    def check_end(self) -> None:
        for owner in self.owners:
            owner.graph.fence()  # raises what was found late
            for unit in owner.units:
                scope = self.scene.scope[unit.step][owner.index]
                assert owner.handed[unit.step] == Counter(scope)  # each row once
                assert unit.settled_all and not unit.pending
                counts = owner.counts(unit)
                assert (counts.scope, counts.early) == (len(scope), len(owner.early[unit.step]))
                assert counts.early + counts.late == counts.scope
                assert counts.fallback == (counts.late - counts.delayed if self.policy.delays else 0)
                assert self.policy.delays or counts.delayed == 0
            for row, steps in owner.published.items():
                # No publication is lost, repeated or out of order.
                assert steps == [s for s in range(self.scene.steps) if row in self.scene.active[s][owner.index]]
                assert int(owner.graph.versions[row]) == (steps[-1] if steps else -1)
            assert all(owner.counts(unit).delayed <= owner.counts(unit).late for unit in owner.units)
            self.check_values(owner)

    def check_values(self, owner: Owner) -> None:
        """The values are those of the gradients that were posted, in task order; without delays, of the model."""
        for row in range(self.scene.rows):
            value = self.scene.initial[owner.index, row]
            for step in owner.published[row]:
                value = update(value, sum(posted[step].get((owner.index, row), 0) for posted in self.posted))
            assert int(owner.values[row]) == value
            if not self.policy.delays:
                assert value == self.model.values[-1][owner.index, row]


def expected_writer(scene: Scene, step: int, owner: int, row: int) -> int:
    """The last unit before ``step`` that writes the row."""
    return max((s for s in range(step) if row in scene.active[s][owner]), default=-1)


scenes = st.builds(
    Scene,
    seed=st.integers(0, 2**32),
    ranks=st.integers(1, 3),
    steps=st.integers(1, 5),
    rows=st.integers(1, 14),
    coupling=st.floats(0, 1),
)


def check(scene: Scene, policy: Quality, seed: int) -> Run:
    run = Run(scene, policy, seed)
    run.finish()
    run.check_end()
    return run


@settings(max_examples=800, deadline=None)
@given(scene=scenes, seed=st.integers(0, 2**32))
def test_quality_is_sequential(scene: Scene, seed: int) -> None:
    check(scene, Quality(), seed)


@settings(max_examples=400, deadline=None)
@given(scene=scenes, seed=st.integers(0, 2**32))
def test_barrier_is_sequential(scene: Scene, seed: int) -> None:
    run = check(scene, Barrier(), seed)
    for owner in run.owners:
        for unit in owner.units:
            assert owner.counts(unit).early in (0, owner.counts(unit).scope)


@settings(max_examples=800, deadline=None)
@given(scene=scenes, seed=st.integers(0, 2**32), ratio=st.floats(0, 1), max_delay=st.integers(0, 5))
def test_throughput_keeps_its_bounds(scene: Scene, seed: int, ratio: float, max_delay: int) -> None:
    check(scene, Throughput(ratio, max_delay), seed)


def test_the_schedules_reach_what_they_are_meant_to_test() -> None:
    """Early, late and delayed rows all occur, as do reads at every age up to the limit."""
    early = late = stale = 0
    longest: Counter[int] = Counter()
    for seed in range(12):
        scene = Scene(seed, ranks=2, steps=10, rows=12, coupling=0.3)
        for counts in (owner.counts(unit) for owner in check(scene, Quality(), seed).owners for unit in owner.units):
            early, late = early + counts.early, late + counts.late
        run = check(scene, Throughput(1.0, 2), seed)
        stale += run.stale_reads
        longest.update(run.stale_run.values())
    assert early > 200
    assert late > 200
    assert stale > 100
    assert longest[1] and longest[2]


class Impatient(Quality):
    """Reads everything at once."""

    def early(self, unit: TaskUnit) -> Bitmap:
        return unit.scope


def test_the_model_notices_a_reader_that_does_not_wait() -> None:
    with pytest.raises((AssertionError, HazardError)):
        for seed in range(20):
            check(Scene(seed, ranks=2, steps=5, rows=12, coupling=0.5), Impatient(), seed)
