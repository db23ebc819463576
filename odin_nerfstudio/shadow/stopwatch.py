"""When things begin and end: by the host's clock, or by a GPU's without waiting for it."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

Mark = Any
"""A moment; only the stopwatch that made it knows when it was."""


class Stopwatch(Protocol):
    """Makes marks, and tells later when they were."""

    def mark(self) -> Mark:
        """Now."""
        ...

    def ns(self, mark: Mark) -> int:
        """When a mark was, in ns of the monotonic clock."""
        ...


class HostStopwatch:
    """Of work that is done when its call returns."""

    def mark(self) -> int:
        """Now."""
        return time.monotonic_ns()

    def ns(self, mark: int) -> int:
        """When a mark was, in ns of the monotonic clock."""
        return mark


class DeviceStopwatch:
    """Of work that is queued on the current stream of a GPU: a mark is the moment at which the GPU comes to it.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._begin = torch.cuda.Event(enable_timing=True)
        self._begin.record(torch.cuda.current_stream(device))
        self._begin.synchronize()
        self._begin_ns = time.monotonic_ns()

    def mark(self) -> torch.cuda.Event:
        """Once the current stream has done what it was asked for so far."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ns(self, mark: torch.cuda.Event) -> int:
        """When a mark was, in ns of the monotonic clock; waits for it."""
        mark.synchronize()
        return self._begin_ns + int(1e6 * self._begin.elapsed_time(mark))


def stopwatch_of(device: torch.device) -> Stopwatch:
    """The stopwatch for work on a device."""
    return DeviceStopwatch(device) if device.type == "cuda" else HostStopwatch()
