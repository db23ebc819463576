"""Where the time of a step goes: spans and counters per unit, and what overlap hid (design §1).

Times are of the monotonic clock, which processes of one machine share.
"""

from __future__ import annotations

import threading
from bisect import bisect
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Literal

from odin_nerfstudio.shadow.contention import Conflicts
from odin_nerfstudio.shadow.stopwatch import HostStopwatch, Mark, Stopwatch

Kind = Literal["compute", "communication", "wait"]
"""Work of the rank, transfers under way, and exposed wait: the compute stream stands still for other ranks."""
Interval = tuple[int, int]
"""Begin and end, ns."""
_DEFERRED = 4
"""Units after which a device has certainly come to what was deferred, so that nobody waits for it."""


@dataclass(frozen=True)
class Sampling:
    """Which units are recorded: all of them, or a stretch of ``length`` in every ``period`` units."""

    length: int = 1
    period: int = 1

    def __contains__(self, step: int) -> bool:
        return self._number(step) < self.length

    def is_edge(self, step: int) -> bool:
        """Whether a unit begins or ends a stretch: it is recorded only for what it hides of its neighbours."""
        return self.length < self.period and self._number(step) in (0, self.length - 1)

    def _number(self, step: int) -> int:
        """Of a unit, in the stretch that begins before it."""
        # Around three quarters of the period, since scenes are changed and ranks meet at the hundreds.
        return (step - 3 * self.period // 4 + self.length // 2) % self.period


EVERY_UNIT = Sampling()
SAMPLED = Sampling(length=8, period=200)
"""Where recording a unit takes longer than a fiftieth of the unit."""


@dataclass(frozen=True)
class Span:
    """Something that took time."""

    kind: Kind
    name: str
    begin: int
    """ns."""
    end: int
    """ns."""


@dataclass
class StepRecord:
    """All that was recorded of one unit on this rank."""

    spans: list[Span] = field(default_factory=list)
    """In the order in which they ended."""
    counts: Counter[str] = field(default_factory=Counter)
    """See :meth:`Timeline.count`."""
    conflicts: Conflicts | None = None
    """With which units and ranks it met on this owner's primitives, once that is known."""
    finished: bool = False
    """Whether everything of it is published."""


class Timeline:
    """Recorder of one rank. Any thread may record; the last ``steps`` units are kept.

    Rank 0 also has one for every other rank, which :meth:`absorb` fills with what their own gave out.

    Args:
        rank: whose timeline this is.
        steps: how many units to keep, 0 to record nothing at next to no cost.
        stopwatch: tells when spans begin and end.
        sampling: which units are recorded.
    """

    def __init__(
        self,
        rank: int = 0,
        steps: int = 1000,
        stopwatch: Stopwatch | None = None,
        sampling: Sampling = EVERY_UNIT,
    ) -> None:
        self.rank = rank
        self.sampling = sampling
        """Which units are recorded; may be changed between units, on all ranks alike."""
        self.stopwatch: Stopwatch = stopwatch or HostStopwatch()
        self._coming: deque[tuple[int, Callable[[], None]]] = deque()
        self._catching_up = threading.RLock()
        self.recording = steps > 0
        """Whether anything is recorded; may be changed at any time."""
        self._keep = steps
        self._records: dict[int, StepRecord] = {}
        self._given_out = self._last_finished = -1
        self._compute: list[Interval] | None = None
        self._lock = threading.Lock()

    # ------------------------------------------------------------------------------------------------ recording

    def records(self, step: int) -> bool:
        """Whether unit ``step`` is recorded."""
        return self.recording and step in self.sampling

    def span(self, kind: Kind, step: int, name: str = "") -> AbstractContextManager[None]:
        """Records the time that the block takes, for unit ``step``; ``name`` is what a trace shows."""
        return self._span(kind, step, name) if self.records(step) else nullcontext()

    def add(self, kind: Kind, step: int, begin: int, end: int, name: str = "") -> None:
        """Records a span that was measured elsewhere, as CUDA events or a transfer's callbacks do; ns."""
        if self.records(step):
            with self._lock:
                self._record(step).spans.append(Span(kind, name or kind, begin, end))
                if kind == "compute":
                    self._compute = None

    def add_marked(self, kind: Kind, step: int, begin: Mark, end: Mark, name: str = "") -> None:
        """Records a span between two marks of the stopwatch, once they have been passed."""
        watch = self.stopwatch
        if isinstance(watch, HostStopwatch):
            self.add(kind, step, begin, end, name)
        else:
            self.defer(step, lambda: self.add(kind, step, watch.ns(begin), watch.ns(end), name))

    def defer(self, step: int, record: Callable[[], None]) -> None:
        """Lets something be recorded later, when a device has come to it: before anybody reads, or some units on."""
        if self.records(step):
            with self._lock:
                self._record(step)  # the unit has begun, although nothing is known of it
            self._coming.append((step, record))
            self._catch_up(step - _DEFERRED)

    def _catch_up(self, before: int | None = None) -> None:
        """Records what was deferred, of units before unit ``before`` or of all."""
        with self._catching_up:
            while self._coming and (before is None or self._coming[0][0] < before):
                self._coming.popleft()[1]()

    def count(self, step: int, **amounts: int) -> None:
        """Adds to counters of unit ``step``: scope, early, late, delayed, fallback (primitives), bytes (sent), busier
        (bytes in the busier direction of each transfer, which is what a full-duplex link takes its time for),
        primitives (that the rank has), memory (bytes that it uses)."""
        if self.records(step):
            with self._lock:
                self._record(step).counts.update(amounts)

    def finish(self, step: int, conflicts: Conflicts | None = None) -> None:
        """Everything of unit ``step`` is published; keeps with whom it met."""
        if self.records(step) and not self.sampling.is_edge(step):
            with self._lock:
                record = self._record(step)
                record.finished, record.conflicts = True, conflicts
                self._last_finished = max(self._last_finished, step)

    def take(self, before: int) -> dict[int, StepRecord]:
        """Records of units before unit ``before`` that were not given out yet, for another process to absorb."""
        self._catch_up()
        with self._lock:
            chosen = {step: record for step, record in self._records.items() if self._given_out < step < before}
            self._given_out = max(self._given_out, before - 1)
        return chosen

    def absorb(self, records: Mapping[int, StepRecord]) -> None:
        """Adds what the timeline of another process gave out."""
        with self._lock:
            self._records.update(records)
            finished = (step for step, record in records.items() if record.finished)
            self._last_finished = max(finished, default=self._last_finished)
            self._compute = None
            self._trim()

    @contextmanager
    def _span(self, kind: Kind, step: int, name: str) -> Iterator[None]:
        begin = self.stopwatch.mark()
        try:
            yield
        finally:
            self.add_marked(kind, step, begin, self.stopwatch.mark(), name)

    def _record(self, step: int) -> StepRecord:
        if step not in self._records:
            self._records[step] = StepRecord()
            self._trim()
        return self._records[step]

    def _trim(self) -> None:
        while len(self._records) > self._keep:
            del self._records[next(iter(self._records))]
            self._compute = None

    # -------------------------------------------------------------------------------------------------- reading

    @property
    def steps(self) -> list[int]:
        """Units that are recorded, in the order in which they began."""
        self._catch_up()
        with self._lock:
            return list(self._records)

    def spans(self, step: int | None = None) -> list[Span]:
        """Spans of one unit, or of all that are recorded."""
        self._catch_up()
        with self._lock:
            return [span for record in self._chosen(step) for span in record.spans]

    def hidden(self, step: int) -> list[Interval]:
        """When a unit's communication was under way behind this rank's computation of any unit."""
        return self._behind_compute(self._intervals("communication", step))

    def is_finished(self, step: int) -> bool:
        """Whether a unit is recorded to its end."""
        self._catch_up()
        with self._lock:
            record = self._records.get(step)
            return record is not None and record.finished

    @property
    def last_finished(self) -> int:
        """The last unit that is recorded to its end, −1 without any."""
        self._catch_up()
        return self._last_finished

    def record(self, step: int) -> StepRecord:
        """A copy of what is recorded of a unit, which no longer changes."""
        self._catch_up()
        with self._lock:
            record = self._records[step]
            return replace(record, spans=list(record.spans), counts=Counter(record.counts))

    def conflicts(self, step: int) -> Conflicts | None:
        """With which units and ranks a unit met, if that is known."""
        self._catch_up()
        with self._lock:
            record = self._records.get(step)
            return None if record is None else record.conflicts

    def counts(self, step: int | None = None) -> dict[str, int]:
        """Counters of one unit, or their sums over all that are recorded."""
        self._catch_up()
        total: Counter[str] = Counter()
        with self._lock:
            for record in self._chosen(step):
                total.update(record.counts)
        return dict(total)

    def seconds(self, kind: Kind, step: int | None = None) -> float:
        """Time in which at least one span of a kind was open, of one unit or of all that are recorded."""
        return _length(self._intervals(kind, step))

    def exposed_wait(self) -> float:
        """Mean exposed wait of a recorded step, seconds."""
        return self.seconds("wait") / max(1, len(self.steps))

    def hidden_fraction(self, step: int | None = None) -> float:
        """Share of the communication that computation overlapped.

        |communication ∩ compute| / |communication|, where both are the unions of their spans as sets of moments:
        communication of ``step`` or of all recorded units, computation of any of them, since a unit's transfers hide
        behind the computation of its neighbours. 1 where there was no communication, and so nothing to hide.
        """
        communication = self._intervals("communication", step)
        total = _length(communication)
        return _length(self._behind_compute(communication)) / total if total else 1.0

    def early_share(self, step: int | None = None) -> float:
        """Early primitives ÷ primitives in scope, 1 for an empty scope."""
        counts = self.counts(step)
        return counts.get("early", 0) / counts["scope"] if counts.get("scope") else 1.0

    def _chosen(self, step: int | None) -> list[StepRecord]:
        if step is None:
            return list(self._records.values())
        return [self._records[step]] if step in self._records else []

    def _behind_compute(self, intervals: list[Interval]) -> list[Interval]:
        with self._lock:
            if self._compute is None:  # kept, as it is of all units and asked for by each
                spans = (span for record in self._records.values() for span in record.spans)
                self._compute = _union((span.begin, span.end) for span in spans if span.kind == "compute")
            compute = self._compute
        return _intersection(intervals, compute)

    def _intervals(self, kind: Kind, step: int | None = None) -> list[Interval]:
        return _union((span.begin, span.end) for span in self.spans(step) if span.kind == kind)


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same moments as disjoint intervals, ascending."""
    union: list[Interval] = []
    for begin, end in sorted(intervals):
        if union and begin <= union[-1][1]:
            union[-1] = union[-1][0], max(end, union[-1][1])
        else:
            union.append((begin, end))
    return union


def _intersection(a: list[Interval], b: list[Interval]) -> list[Interval]:
    """Moments in both of two lists of disjoint ascending intervals."""
    common, i = [], 0
    j = max(0, bisect(b, a[0][0], key=itemgetter(0)) - 1) if a else 0  # a may lie anywhere in a long b
    while i < len(a) and j < len(b):
        begin, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if begin < end:
            common.append((begin, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return common


def _length(intervals: list[Interval]) -> float:
    """Seconds."""
    return sum(end - begin for begin, end in intervals) / 1e9
