"""How much memory a rank has needed."""

from __future__ import annotations

import resource

import torch


def peak_memory(device: torch.device) -> int:
    """The most that this process has used so far, bytes: of the GPU that ``device`` is, or of the machine."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
