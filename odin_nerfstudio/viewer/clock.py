"""Times of several machines on one axis."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass, replace

from odin_nerfstudio.shadow.timeline import Span, StepRecord


@dataclass(frozen=True)
class Clock:
    """The monotonic clock of a machine, from which timelines have their times."""

    machine: str
    """Processes with the same name share the clock."""
    offset: int
    """What has to be added to its times to make them times of day, ns."""

    @staticmethod
    def here() -> Clock:
        """That of this process."""
        return Clock(socket.gethostname(), time.time_ns() - time.monotonic_ns())

    def read(self, other: Clock, record: StepRecord) -> StepRecord:
        """What another clock recorded in this one's times, as exactly as the machines agree on the time of day."""
        shift = 0 if other.machine == self.machine else other.offset - self.offset
        if not shift:
            return record
        spans = [Span(span.kind, span.name, span.begin + shift, span.end + shift) for span in record.spans]
        return replace(record, spans=spans)
