"""What a person may change of a run while it goes on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from odin_nerfstudio.shadow.contention import WINDOW
from odin_nerfstudio.shadow.policy import Barrier, Quality, Throughput

PolicyName = Literal["barrier", "quality", "throughput"]


@dataclass(frozen=True)
class Controls:
    """Settings that all ranks take up at the end of the same unit."""

    policy: PolicyName = "quality"
    """When a step may read what the step before it has not published yet."""
    delay_ratio: float = 0.2
    """Of ``throughput``; see :class:`~odin_nerfstudio.shadow.policy.Throughput`."""
    max_delay: int = 4
    """Of ``throughput``."""
    window: int = WINDOW
    """Units over which contention is counted."""
    recording: bool = True
    """Whether timelines and conflicts are recorded."""

    @property
    def shadow_policy(self) -> Quality:
        """The policy that they describe."""
        if self.policy == "throughput":
            return Throughput(self.delay_ratio, self.max_delay)
        return Barrier() if self.policy == "barrier" else Quality()
