"""Marks, and when they were; the GPU's here without one, with one in tests/cuda/test_stopwatch.py."""

from __future__ import annotations

import time

import pytest
import torch

from odin_nerfstudio.shadow.stopwatch import DeviceStopwatch, HostStopwatch, stopwatch_of


def test_the_hosts_marks_are_of_the_monotonic_clock() -> None:
    watch = stopwatch_of(torch.device("cpu"))
    assert isinstance(watch, HostStopwatch)
    before = time.monotonic_ns()
    marks = [watch.mark() for _ in range(3)]
    times = [watch.ns(mark) for mark in marks]
    moments = [before, *times, time.monotonic_ns()]
    assert moments == sorted(moments)


class FakeGpu:
    """Its clock stands still while the host queues events and moves on when the host waits for one."""

    def __init__(self) -> None:
        self.ms = 1000.0
        self.queued: list[FakeEvent] = []

    def run(self, until: FakeEvent) -> None:
        while until.at is None:
            self.ms += 2.5
            self.queued.pop(0).at = self.ms


class FakeEvent:
    gpu = FakeGpu()

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing
        self.at: float | None = None

    def record(self, stream: object = None) -> None:
        self.gpu.queued.append(self)

    def synchronize(self) -> None:
        self.gpu.run(self)

    def elapsed_time(self, other: FakeEvent) -> float:
        assert self.at is not None and other.at is not None
        return other.at - self.at


def test_a_gpus_marks_are_told_by_the_hosts_clock_and_waited_for_only_then(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu()
    monkeypatch.setattr(FakeEvent, "gpu", gpu)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: object())
    before = time.monotonic_ns()
    watch = stopwatch_of(torch.device("cuda"))
    after = time.monotonic_ns()
    assert isinstance(watch, DeviceStopwatch)
    first, second, third = (watch.mark() for _ in range(3))
    assert len(gpu.queued) == 3
    begin = watch.ns(second) - 5_000_000
    assert before <= begin <= after
    assert len(gpu.queued) == 1
    assert (watch.ns(first), watch.ns(third)) == (begin + 2_500_000, begin + 7_500_000)
