"""Marks of a GPU: when it comes to them, and that nobody waits for that."""

from __future__ import annotations

import time

import pytest
import torch

from odin_nerfstudio.shadow.stopwatch import stopwatch_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_marks_are_told_by_the_hosts_clock() -> None:
    watch = stopwatch_of(torch.device("cuda"))
    before = time.monotonic_ns()
    begin = watch.mark()
    torch.cuda._sleep(200_000_000)
    end = watch.mark()
    queued = time.monotonic_ns()
    torch.cuda.synchronize()
    after = time.monotonic_ns()
    slack = 5_000_000  # the two clocks were compared once, and drift
    assert before - slack <= watch.ns(begin) <= queued + slack
    assert queued < watch.ns(end) <= after + slack
    assert watch.ns(end) - watch.ns(begin) > 20_000_000
