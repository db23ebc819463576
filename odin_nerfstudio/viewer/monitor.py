"""What the panel and the run have of each other. The panel's thread never waits for a rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

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
        self.wish: Controls | None = None
        """What the ranks take up when they meet next; None: nothing new."""
        self.sketch = sketch
        self.is_training = False
        """Whether there are ranks that a wish can reach."""
        self.save_trace: Callable[[], Path] | None = None
        """Writes what is recorded into the run's folder and says where; None where that is not possible."""

    def ask(self, **changes: Any) -> None:
        """Wishes for other controls, by field of :class:`~.controls.Controls`. May come from any thread."""
        self.wish = replace(self.wish or self.controls, **changes)
