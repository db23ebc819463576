"""When each step of a turn ended: by events on a GPU's stream, by the host's clock on a CPU."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import torch


class StepClock:
    """Times the steps between :meth:`begin` and :meth:`end` without waiting for the device in between.

    Args:
        device: that computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_gpu = device.type == "cuda"
        self._device = device
        self._marks: list[Any] = []
        self._begin = 0.0

    def begin(self) -> None:
        """The first step begins, once the device has done what came before."""
        self._synchronize()
        self._marks.clear()
        self._begin = time.perf_counter()
        self.mark()

    def mark(self) -> None:
        """A step ends, and the next one begins."""
        if self._is_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def end(self) -> tuple[list[float], float]:
        """Waits for the device. Seconds of each step, and of all of them by the host's clock."""
        self._synchronize()
        total = time.perf_counter() - self._begin
        pairs = list(pairwise(self._marks))
        if self._is_gpu:
            return [begin.elapsed_time(end) / 1e3 for begin, end in pairs], total
        return [end - begin for begin, end in pairs], total

    def _synchronize(self) -> None:
        if self._is_gpu:
            torch.cuda.synchronize(self._device)
