"""The Shadow Graph: what may be read when, and what is published when, primitive by primitive (design §3.1, §3.6).

Each owner of rows has one, and no coordination travels: all it needs to know is which of its own rows are in the scope
of which unit. A renderer joins by three hooks. *Candidates*: :meth:`ShadowGraph.admit`, then
:meth:`~ShadowGraph.early` and :meth:`~ShadowGraph.late` say which of them to read. *Active primitives*:
:meth:`~ShadowGraph.backward`. *Publication*: :meth:`~ShadowGraph.stage` and :meth:`~ShadowGraph.publish`.
After Odin, arXiv 2607.19893.

Sets are bitmaps and stay on the device. On a CPU a call that breaks the rules is refused and changes nothing. A GPU is
not waited for: there the same rules are checked where the rows are, and a breach is raised by a later call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from odin_nerfstudio.shadow import hazards, versions
from odin_nerfstudio.shadow.bitmap import Bitmap
from odin_nerfstudio.shadow.hazards import HazardError
from odin_nerfstudio.shadow.policy import Quality
from odin_nerfstudio.shadow.rules import Rules
from odin_nerfstudio.shadow.staging import SLOTS, StagingRing
from odin_nerfstudio.shadow.unit import TaskUnit, UnitCounts

UNITS_BETWEEN_LOOKS = 4
"""On a GPU, how often somebody looks at whether a rule was broken."""
Commit = Callable[[int, Tensor, Mapping[str, Tensor], Tensor | None], None]
"""``commit(step, rows, gradients, chosen)`` takes optimizer step ``step`` on ``rows`` ((R,) int64, all different) with
``gradients`` ((R, ...) per parameter); rows that are not ``chosen`` ((R,) bool; None: all are) it passes over."""


@dataclass(frozen=True, eq=False)
class Stall:
    """Locks that a unit waits for. ``str()`` names them in a sentence."""

    waiter: int
    """The unit that waits."""
    holder: int
    """The unit that holds the locks."""
    rows: Tensor
    """(L,) int64 ascending, L > 0: the primitives it holds."""

    def __str__(self) -> str:
        count = len(self.rows)
        primitives = f"{count} primitive{'s' if count > 1 else ''}"
        return f"unit {self.waiter} waits for {primitives} held by unit {self.holder}, first is row {int(self.rows[0])}"


class ShadowGraph:
    """Hazards, hand-out and publication of ``num_rows`` primitives, for at most two units in flight.

    No call blocks: a call that comes too early hands out less, or is refused with :class:`HazardError` and changes
    nothing. Calls about different units may come from different threads; calls about one unit must not overlap.
    ``commit`` runs outside the graph's lock, so that another unit reads its early rows meanwhile.

    Args:
        num_rows: N, primitives of this owner.
        commit: the optimizer's step on some rows.
        policy: what may be read while another unit is in flight.
        device: where rows and gradients live.
    """

    def __init__(
        self, num_rows: int, commit: Commit, policy: Quality | None = None, device: torch.device | str = "cpu"
    ) -> None:
        self.policy = policy or Quality()
        self.device = torch.device(device)
        self._commit = commit
        self._ring = StagingRing()
        self._rules = Rules(self.device)
        self._lock = threading.Lock()
        self._in_flight: tuple[TaskUnit, ...] = ()
        self._last_step = -1
        self.versions: Tensor
        """(N,) int32: the step that published each row last, -1 if none has. Publications change it in place."""
        self.resize(num_rows)

    @property
    def in_flight(self) -> tuple[TaskUnit, ...]:
        """Units that have been admitted and have not finished, oldest first; at most two."""
        return self._in_flight

    @property
    def nbytes(self) -> int:
        """Memory of tables and staging ring, bytes."""
        tables = (self.versions, *self._read, self._stale_run)
        return sum(table.nbytes for table in tables) + self._ring.nbytes

    # ------------------------------------------------------------------------------------ hook 1: candidates

    def admit(self, step: int, scope: Bitmap) -> TaskUnit:
        """Begins a unit.

        Args:
            step: follows the last one if that is in flight, otherwise any later one.
            scope: rows that its views may read.

        Raises:
            HazardError: with two units in flight, or out of order.
            ValueError: when ``scope`` is a set of other rows than the graph has.
        """
        if scope.size != self.num_rows:
            raise ValueError(f"the scope of unit {step} is out of {scope.size} rows instead of {self.num_rows}")
        with self._lock:
            if step <= self._last_step or (self._in_flight and step != self._last_step + 1):
                raise HazardError(f"unit {step} cannot be admitted after unit {self._last_step}")
            self._ring.open(step)
            producer = self._in_flight[-1] if self._in_flight else None
            unit = TaskUnit(step, scope, producer)
            self._in_flight += (unit,)
            self._last_step = step
        return unit

    def early(self, unit: TaskUnit) -> Bitmap:
        """Rows to read without waiting that were not handed out yet. Asked again, it gives what became early since.

        The reader copies their values before the unit's next call.
        """
        with self._lock:
            chosen = self.policy.early(unit) - unit.handed
            unit.early = unit.early | chosen
            if not self.policy.validates:  # as if on purpose, or what the unit publishes would be refused
                unit.stale = unit.stale | (chosen & hazards.held(unit))
            self._hand_out(unit, chosen)
        return chosen

    def late(self, unit: TaskUnit) -> Bitmap:
        """Rows that had to be waited for, can be read now, and were not handed out yet.

        They have been published, or the policy reads them before that: those are in ``unit.stale`` afterwards.
        :meth:`stall` says what is still missing. The reader copies their values before the unit's next call; those of
        stale rows before their publication.
        """
        with self._lock:
            released = self.policy.late(unit) - unit.handed
            unit.late = unit.late | released
            self._hand_out(unit, released)
            if not self.policy.delays:
                return released
            delayed = self.policy.delayed(unit, self._stale_run)
            unit.stale = unit.stale | delayed
            self._hand_out(unit, delayed, stale=True)
        return released | delayed

    def stall(self, unit: TaskUnit) -> Stall | None:
        """What the unit waits for: the locks that keep rows of its scope from being handed out, None without any."""
        with self._lock:
            rows = (self.policy.held(unit) - unit.handed).rows()
            if len(rows) == 0 or unit.producer is None:
                return None
            return Stall(unit.step, unit.producer.step, rows)

    def counts(self, unit: TaskUnit, sizes: Sequence[int] | None = None) -> UnitCounts:
        """How a unit has read its scope so far.

        Args:
            unit: any.
            sizes: what ``unit.sizes()`` holds, if that is known already.
        """
        scope, early, released, stale = sizes or unit.sizes().tolist()
        fallback = released if self.policy.delays else 0
        return UnitCounts(scope, early, released + stale, stale, fallback)

    # ------------------------------------------------------------------------------------- hook 2: active set

    def backward(
        self,
        unit: TaskUnit,
        active: Bitmap,
        negligible: Bitmap | None = None,
        among: Bitmap | None = None,
    ) -> None:
        """The unit's backward is done and has reached some rows; those without a gradient are free for others now.

        Rows that the next unit waits for can be settled first, and the others in later calls.

        Args:
            unit: it has read its whole scope.
            active: which of these rows have a gradient.
            negligible: which of those have one that readers can do without for a while; see
                :meth:`Quality.negligible`. None: none of them.
            among: rows of the scope that this call settles; None: all that are left.

        Raises:
            HazardError: when part of the scope was not handed out, or rows were settled before.
            ValueError: when ``active`` or ``among`` goes beyond what is to be settled.
        """
        reached = unit.unsettled if among is None else among
        with self._lock:
            name = f"the backward of unit {unit.step} cannot be done"
            if unit.settled_all:
                raise HazardError(f"{name} a second time")
            self._rules.none(reached & unit.settled, lambda row: HazardError(f"{name} a second time"))
            self._rules.none(unit.unread, lambda row: HazardError(f"{name} before it has read its scope"))
            beyond = (reached - unit.scope) | (active - reached)
            wrong = f"is not in what unit {unit.step} has to settle"
            self._rules.none(beyond, lambda row: ValueError(f"row {row} {wrong}"))
            if negligible is not None:
                unit.negligible = unit.negligible | (negligible & active)
            unit.settled = unit.settled | reached
            unit.settled_all = among is None
            unit.active = active if unit.active is None else unit.active | active

    # ------------------------------------------------------------------------------------ hook 3: publication

    def stage(
        self,
        unit: TaskUnit,
        rows: Tensor,
        gradients: Mapping[str, Tensor],
        chosen: Tensor | None = None,
        meant: Bitmap | None = None,
    ) -> None:
        """Keeps gradients until they are published. Rows that the next unit waits for can be staged first.

        Args:
            unit: its backward is done.
            rows: (R,) int64, all different.
            gradients: (R, ...) per parameter, in the order of ``rows``; must not change before they are published.
            chosen: (R,) bool: which of the rows are meant; they are active and not staged yet. None: all.
            meant: the chosen rows as a set, where the caller has it; None: it is made of them.

        Raises:
            HazardError: before the backward, or for rows that are not active or are staged already.
            ValueError: when lengths differ.
        """
        if unit.active is None:
            raise HazardError(f"unit {unit.step} cannot stage gradients before its backward")
        count = rows.shape[0]
        for name, gradient in gradients.items():
            if gradient.shape[0] != count:
                raise ValueError(f"gradients of {name} have {len(gradient)} rows instead of {count}")
        if chosen is not None and chosen.shape[0] != count:
            raise ValueError(f"unit {unit.step} cannot choose {len(chosen)} rows of {count}")
        part = Bitmap.from_rows(rows, self.num_rows, chosen) if meant is None else meant
        wrong = f"unit {unit.step} cannot stage row"
        with self._lock:
            self._rules.none(
                part - (unit.active - unit.staged),
                lambda row: HazardError(f"{wrong} {row}: it is not active or is staged already"),
            )
        self._ring[unit.step].stage(rows, gradients, chosen)
        unit.staged = unit.staged | part

    def publish(self, unit: TaskUnit, last: bool = True) -> None:
        """Commits what is staged, raises the versions and releases the locks.

        Units publish in task order: one that comes before its turn is refused, and its gradients stay staged.

        Args:
            unit: its backward is done.
            last: whether nothing is left to publish, so that the unit finishes.

        Raises:
            HazardError: before the backward, out of order, after the unit has finished, as the last time with rows
                that were not staged, or when a row was published by others since the unit read it.
        """
        with self._lock:
            if unit.active is None or unit.finished:
                when = "after it has finished" if unit.finished else "before its backward"
                raise HazardError(f"unit {unit.step} cannot publish {when}")
            hazards.check_order(unit)
            slot = self._ring[unit.step]
            if last:
                missing = f"unit {unit.step} cannot publish for the last time"
                self._rules.none(
                    unit.writes - unit.staged, lambda row: HazardError(f"{missing}: row {row} was not staged")
                )
            staged, read = unit.staged - unit.published, self._read[unit.step % SLOTS]
            since = f"since unit {unit.step} read it"

            def lost(row: int) -> HazardError:
                return HazardError(f"row {row} was published by others {since}")

            if self.device.type == "cpu":  # refused before anything is changed
                self._rules.none(hazards.moved(unit, staged, read, self.versions), lost)
        for part in slot.parts:
            self._commit(unit.step, part.rows, part.gradients, part.chosen)
        with self._lock:
            self._rules.none(versions.publish(staged, unit.stale, read, self.versions, unit.step), lost)
            unit.published = unit.staged
            slot.committed()
            if last:
                unit.finished, unit.producer = True, None
                slot.clear()
                self._in_flight = self._in_flight[1:]
                if unit.step % UNITS_BETWEEN_LOOKS == 0:
                    self._rules.look()

    # -------------------------------------------------------------------------------------- structural changes

    def fence(self) -> None:
        """Makes sure that rows may be changed, added, removed or moved now.

        Raises:
            HazardError: while a unit is in flight, or for a rule that was broken before.
        """
        if self._in_flight:
            steps = " and ".join(str(unit.step) for unit in self._in_flight)
            raise HazardError(f"structural changes must wait for the publication of unit {steps}")
        self._rules.look(wait=True)

    def resize(self, num_rows: int, known: Tensor | None = None) -> None:
        """Begins anew with ``num_rows`` rows; see :meth:`fence`.

        Args:
            num_rows: N.
            known: (N,) int32 versions that are known of them; None: none was published yet.
        """
        self.fence()
        self.num_rows = num_rows
        if known is None:
            known = torch.full((num_rows,), -1, dtype=torch.int32, device=self.device)
        self.versions = known.clone()
        self._read: list[Tensor] = [known.clone() for _ in range(SLOTS)]
        self._stale_run = torch.zeros(num_rows, dtype=torch.uint8, device=self.device)

    # ------------------------------------------------------------------------------------------------- details

    def _hand_out(self, unit: TaskUnit, chosen: Bitmap, stale: bool = False) -> None:
        """Remembers which versions the reader gets, and for how many units in a row it got an old one."""
        versions.hand_out(chosen, self.versions, self._read[unit.step % SLOTS])
        if self.policy.delays:
            mask = chosen.mask().bool()
            if stale:
                self._stale_run += mask
            else:
                self._stale_run.masked_fill_(mask, 0)
