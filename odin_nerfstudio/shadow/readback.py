"""Numbers on their way from the device: asked for now, read when they are needed."""

from __future__ import annotations

import torch
from torch import Tensor


class HostCounts:
    """Integers that a device computes and the host will want; see :func:`counts_to_host`."""

    def __init__(self, values: Tensor, arrived: torch.cuda.Event | None) -> None:
        self._values = values
        self._arrived = arrived

    def get(self) -> list[int]:
        """The numbers. Waits for their copy and what was queued before it, not for what came after."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values.tolist()


def counts_to_host(counts: Tensor) -> HostCounts:
    """Begins to copy numbers to the host, without waiting.

    Args:
        counts: (C,) integers, computed on the current stream of their device; may be changed afterwards.
    """
    if counts.device.type != "cuda":
        return HostCounts(counts.clone(), None)
    # torch's allocator of pinned memory gives it out again only after the copies that were queued into it, also when
    # nobody waits for them.
    values = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True)
    values.copy_(counts, non_blocking=True)
    return HostCounts(values, torch.cuda.current_stream(counts.device).record_event())
