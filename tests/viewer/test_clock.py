"""Records of other machines, on this one's clock."""

from __future__ import annotations

from odin_nerfstudio.shadow.timeline import Span, StepRecord
from odin_nerfstudio.viewer.clock import Clock


def test_records_of_another_machine_are_shifted() -> None:
    record = StepRecord([Span("wait", "splats", 100, 130)], finished=True)
    here, there = Clock("a", 5000), Clock("b", 7000)
    assert here.read(there, record).spans == [Span("wait", "splats", 2100, 2130)]
    assert here.read(there, record).finished
    assert here.read(Clock("a", 5003), record) is record  # one clock, read at two moments
    assert there.read(here, here.read(there, record)) == record
