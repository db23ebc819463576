"""The Shadow Graph: what may be read when, and what is published when, primitive by primitive (design §3.1, §3.6).

Each owner of rows has one, and no coordination travels: all it needs to know is which of its own rows are in the scope
of which unit. A renderer joins by three hooks. *Candidates*: :meth:`ShadowGraph.admit`, then
:meth:`~ShadowGraph.early` and :meth:`~ShadowGraph.late` say which of them to read. *Active primitives*:
:meth:`~ShadowGraph.backward`. *Publication*: :meth:`~ShadowGraph.stage` and :meth:`~ShadowGraph.publish`.
After Odin, arXiv 2607.19893.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from odin_nerfstudio.shadow import hazards
from odin_nerfstudio.shadow.bitmap import Bitmap
from odin_nerfstudio.shadow.hazards import HazardError
from odin_nerfstudio.shadow.policy import Quality
from odin_nerfstudio.shadow.staging import SLOTS, StagingRing
from odin_nerfstudio.shadow.unit import TaskUnit

Commit = Callable[[int, Tensor, Mapping[str, Tensor]], None]
"""``commit(step, rows, gradients)`` takes optimizer step ``step`` on ``rows`` ((R,) int64, all different, ascending
within each staged part) with ``gradients`` ((R, ...) per parameter, valid during the call only)."""


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
        self._lock = threading.Lock()
        self._in_flight: tuple[TaskUnit, ...] = ()
        self._last_step = -1
        self.resize(num_rows)

    @property
    def in_flight(self) -> tuple[TaskUnit, ...]:
        """Units that have been admitted and have not finished, oldest first; at most two."""
        return self._in_flight

    @property
    def nbytes(self) -> int:
        """Memory of tables and staging ring, bytes."""
        return sum(table.nbytes for table in (self.versions, self._read, self._stale_run)) + self._ring.nbytes

    # ------------------------------------------------------------------------------------ hook 1: candidates

    def admit(self, step: int, scope: Tensor) -> TaskUnit:
        """Begins a unit.

        Args:
            step: follows the last one if that is in flight, otherwise any later one.
            scope: (R,) int64 ascending: rows that its views may read.

        Raises:
            HazardError: with two units in flight, or out of order.
            ValueError: when ``scope`` is not ascending or not in [0, N).
        """
        candidates = self._rows(scope)
        with self._lock:
            if step <= self._last_step or (self._in_flight and step != self._last_step + 1):
                raise HazardError(f"unit {step} cannot be admitted after unit {self._last_step}")
            self._ring.open(step)
            producer = self._in_flight[-1] if self._in_flight else None
            unit = TaskUnit(step, candidates, producer)
            unit.counts.scope = len(scope)
            self._in_flight += (unit,)
            self._last_step = step
        return unit

    def early(self, unit: TaskUnit) -> Tensor:
        """Rows to read without waiting that were not handed out yet. Asked again, it gives what became early since.

        Returns:
            (E,) int64 ascending. The reader copies their values before the unit's next call.
        """
        with self._lock:
            chosen = self.policy.early(unit) - unit.handed
            rows = self._hand_out(unit, chosen, stale=False)
            unit.counts.early += len(rows)
        return rows

    def late(self, unit: TaskUnit) -> Tensor:
        """Rows that had to be waited for, can be read now, and were not handed out yet.

        They have been published, or the policy reads them before that. :meth:`stall` says what is still missing.

        Returns:
            (L,) int64 ascending. The reader copies their values before the unit's next call; those that the policy
            reads ahead, before their publication.
        """
        with self._lock:
            released = self.policy.late(unit) - unit.handed
            rows = self._hand_out(unit, released, stale=False)
            unit.counts.late += len(rows)
            if not self.policy.delays:
                return rows
            unit.counts.fallback += len(rows)
            delayed = self.policy.delayed(unit, self._stale_run)
            stale = self._hand_out(unit, delayed, stale=True)
            unit.counts.late += len(stale)
            unit.counts.delayed += len(stale)
        return (released | delayed).rows()

    def stall(self, unit: TaskUnit) -> Stall | None:
        """What the unit waits for: the locks that keep rows of its scope from being handed out, None without any."""
        with self._lock:
            rows = (self.policy.held(unit) - unit.handed).rows()
            if len(rows) == 0 or unit.producer is None:
                return None
            return Stall(unit.step, unit.producer.step, rows)

    # ------------------------------------------------------------------------------------- hook 2: active set

    def backward(
        self, unit: TaskUnit, active: Tensor, magnitudes: Tensor | None = None, among: Tensor | None = None
    ) -> None:
        """The unit's backward is done and has reached some rows; those without a gradient are free for others now.

        Rows that the next unit waits for can be settled first, and the others in later calls.

        Args:
            unit: it has read its whole scope.
            active: (A,) int64 ascending: which of these rows have a gradient.
            magnitudes: (A,) not negative, size of each row's gradient. Without them no row is read before publication.
            among: (R,) int64 ascending, rows of the scope that this call settles; None: all that are left.

        Raises:
            HazardError: when part of the scope was not handed out, or rows were settled before.
            ValueError: when ``active`` or ``among`` is not ascending or goes beyond what is to be settled, or lengths
                differ.
        """
        chosen = self._rows(active)
        reached = unit.scope - unit.settled if among is None else self._rows(among)
        with self._lock:
            again = reached & unit.settled or unit.is_settled
            if again or not unit.complete:
                when = "a second time" if again else "before it has read its scope"
                raise HazardError(f"the backward of unit {unit.step} cannot be done {when}")
            for rows, of in ((reached, unit.scope), (chosen, reached)):
                if rows - of:
                    raise ValueError(f"row {int((rows - of).rows()[0])} is not in what unit {unit.step} has to settle")
            if magnitudes is not None:
                if magnitudes.shape != active.shape:
                    raise ValueError(f"{len(active)} active rows, magnitudes of shape {tuple(magnitudes.shape)}")
                unit.negligible = unit.negligible | self._rows(active[self.policy.negligible(magnitudes)])
            unit.settled = unit.settled | reached
            unit.active = chosen if unit.active is None else unit.active | chosen

    # ------------------------------------------------------------------------------------ hook 3: publication

    def stage(self, unit: TaskUnit, gradients: Mapping[str, Tensor], rows: Tensor | None = None) -> None:
        """Keeps gradients until they are published. Rows that the next unit waits for can be staged first.

        Args:
            unit: its backward is done.
            gradients: (R, ...) per parameter, in the order of ``rows``; copied.
            rows: (R,) int64 ascending, active and not staged yet; None: the whole active set.

        Raises:
            HazardError: before the backward, or for rows that are not active or are staged already.
            ValueError: when ``rows`` is not ascending or lengths differ.
        """
        if unit.active is None:
            raise HazardError(f"unit {unit.step} cannot stage gradients before its backward")
        part = unit.active if rows is None else self._rows(rows)
        if part - (unit.active - unit.staged):
            row = int((part - (unit.active - unit.staged)).rows()[0])
            raise HazardError(f"unit {unit.step} cannot stage row {row}: it is not active or is staged already")
        rows = part.rows() if rows is None else rows
        for name, gradient in gradients.items():
            if len(gradient) != len(rows):
                raise ValueError(f"gradients of {name} have {len(gradient)} rows instead of {len(rows)}")
        self._ring[unit.step].stage(rows, gradients)
        unit.staged = unit.staged | part

    def publish(self, unit: TaskUnit) -> Tensor:
        """Commits what is staged, raises the versions and releases the locks. Finishes the unit with its last row.

        Units publish in task order: one that comes before its turn is refused, and its gradients stay staged.

        Returns:
            (R,) int64: the rows published by this call, in the order of staging.

        Raises:
            HazardError: before the backward, out of order, after the unit has finished, or when a row was published
                by others since the unit read it.
        """
        with self._lock:
            if unit.active is None or unit.finished:
                when = "after it has finished" if unit.finished else "before its backward"
                raise HazardError(f"unit {unit.step} cannot publish {when}")
            hazards.check_order(unit)
            slot = self._ring[unit.step]
            rows, gradients = slot.uncommitted()
            read = self._read[unit.step % SLOTS].index_select(0, rows)
            hazards.check_reads(unit, rows, read, self.versions.index_select(0, rows))
        self._commit(unit.step, rows, gradients)
        rows = rows.clone()  # the buffer passes to another unit
        with self._lock:
            self.versions.index_fill_(0, rows, unit.step)
            unit.published = unit.staged
            slot.committed()
            if not unit.pending:
                unit.finished, unit.producer = True, None
                slot.clear()
                self._in_flight = self._in_flight[1:]
        return rows

    # -------------------------------------------------------------------------------------- structural changes

    def fence(self) -> None:
        """Makes sure that rows may be changed, added, removed or moved now.

        Raises:
            HazardError: while a unit is in flight.
        """
        if self._in_flight:
            steps = " and ".join(str(unit.step) for unit in self._in_flight)
            raise HazardError(f"structural changes must wait for the publication of unit {steps}")

    def resize(self, num_rows: int, versions: Tensor | None = None) -> None:
        """Begins anew with ``num_rows`` rows; see :meth:`fence`.

        Args:
            num_rows: N.
            versions: (N,) int32 what is known of them; None: none was published yet.
        """
        self.fence()
        self.num_rows = num_rows
        if versions is None:
            versions = torch.full((num_rows,), -1, dtype=torch.int32, device=self.device)
        self.versions = versions
        """(N,) int32: the step that published each row last, -1 if none has."""
        self._read = self.versions.repeat(SLOTS, 1)
        self._stale_run = torch.zeros(num_rows, dtype=torch.uint8, device=self.device)

    # ------------------------------------------------------------------------------------------------- details

    def _rows(self, rows: Tensor) -> Bitmap:
        """``rows`` as a set, after checking that they are ascending and exist."""
        if len(rows) and not (rows[0] >= 0 and rows[-1] < self.num_rows and (rows[1:] > rows[:-1]).all()):
            raise ValueError(f"rows must be ascending and in [0, {self.num_rows})")
        return Bitmap.from_rows(rows, self.num_rows)

    def _hand_out(self, unit: TaskUnit, chosen: Bitmap, stale: bool) -> Tensor:
        rows = chosen.rows()
        if len(rows) == 0:
            return rows
        unit.handed = unit.handed | chosen
        self._read[unit.step % SLOTS].index_copy_(0, rows, self.versions.index_select(0, rows))
        if stale:
            unit.stale = unit.stale | chosen
            self._stale_run[rows] += 1
        elif self.policy.delays:
            self._stale_run.index_fill_(0, rows, 0)
        return rows
