"""What the tab has for ``nerfxl``: what each tile costs, how long ranks wait for others, and where the tiles are."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import viser
from numpy.typing import NDArray

from odin_nerfstudio.viewer.drawing import Drawn, boxes
from odin_nerfstudio.viewer.monitor import Monitor
from odin_nerfstudio.viewer.panel import CURVE, Panel
from odin_nerfstudio.viewer.recording import Recording
from odin_nerfstudio.viewer.tile_plot import tile_figure
from odin_nerfstudio.viewer.widgets import Plot


class TilePanel(Panel):
    """Samples of each tile over time, and the tiles as boxes.

    Args:
        monitor: of the run.
        tiles: gives the (K, 2, 3) corners of the tiles as they are now, in the model's coordinates.
    """

    def __init__(self, monitor: Monitor, tiles: Callable[[], NDArray[np.float64]]) -> None:
        super().__init__(monitor)
        self._tiles = tiles

    def _add_sections(self, server: viser.ViserServer) -> None:
        with server.gui.add_folder("Load"):
            self._load = Plot(server.gui)

    def _add_toggles(self, server: viser.ViserServer) -> None:
        self._boxes = server.gui.add_checkbox("Tiles", False, hint="The part of space that each tile models.")
        self._drawn = Drawn(server.scene)
        self._wake_on(self._boxes)

    def _show_sections(self, recording: Recording, steps: Sequence[int]) -> None:
        curve = steps[-CURVE:]
        self._load.show((id(recording), *curve), lambda: tile_figure(recording, curve))
        self._drawn.show(boxes("tiles", self._tiles(), 2.0) if self._boxes.value else {})
