"""What the panel and the run have of each other. The panel's thread never waits for a rank."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from odin_nerfstudio.comm.world import World
from odin_nerfstudio.shadow.timeline import Timeline
from odin_nerfstudio.viewer.clock import Clock
from odin_nerfstudio.viewer.controls import Controls
from odin_nerfstudio.viewer.recording import Recording


@dataclass(frozen=True)
class Sketch:
    """The geometry of a run that can be drawn into the scene, in the model's coordinates."""

    cells: NDArray[np.float64]
    """(G, 2, 3) corners of the ranks' cells; the outer ones are infinite."""
    shards: NDArray[np.float64]
    """(G, 2, 3) corners of the box around each rank's primitives, NaN for a rank without any."""
    cameras: NDArray[np.float64]
    """(V, 3) positions of the training cameras."""
    group_of: Callable[[int], NDArray[np.int64]]
    """Step → (n,) the training views of its group."""
    rlg: sp.csr_array
    """(V, V) relative locality graph."""


class Monitor:
    """Rank 0's recording, the controls in force, and what somebody wishes they were.

    Args:
        recording: of the run.
        controls: in force.
        sketch: gives the geometry as it is now; None where there is none to draw.
    """

    def __init__(self, recording: Recording, controls: Controls, sketch: Callable[[], Sketch] | None = None) -> None:
        self.recording = recording
        self.controls = controls
        """In force on all ranks."""
        self.sketch = sketch
        self.is_training = False
        """Whether there are ranks that a wish can reach."""
        self.save_trace: Callable[[], Path] | None = None
        """Writes the recording to the run's folder and says where; raises UserError. None where there is no folder."""
        self._wish: Controls | None = None
        self._lock = threading.Lock()

    def ask(self, **changes: Any) -> None:
        """Wishes for other controls, by field of :class:`~.controls.Controls`. May come from any thread."""
        with self._lock:
            self._wish = replace(self._wish or self.controls, **changes)

    def hear(self, world: World, timeline: Timeline, step: int) -> list[int]:
        """Rank 0 hears what the others have recorded. All ranks together, with no unit in flight.

        Args:
            world: the ranks.
            timeline: of this rank.
            step: the unit that all have finished.

        Returns:
            On rank 0, the units that are known in full since the last time; nothing on the others.
        """
        known = self.recording.steps(1)
        told = world.gather_objects((timeline.take(step + 1), Clock.here()))
        if told is None:
            return []
        own = told[0][1]
        self.recording.absorb(
            [{unit: own.read(clock, record) for unit, record in records.items()} for records, clock in told]
        )
        return [unit for unit in self.recording.steps() if not known or unit > known[0]]

    @property
    def wish(self) -> Controls | None:
        """What the ranks have been asked for and have not taken up."""
        return self._wish

    def take_wish(self) -> Controls | None:
        """What the ranks should take up now, once; None: nothing new."""
        with self._lock:
            wish, self._wish = self._wish, None
        return wish
