"""What the tab has for ``odin-splatfacto``: where the ranks meet, how much was read early, and the policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import viser

from odin_nerfstudio.shadow.contention import KINDS
from odin_nerfstudio.viewer.conflict_plot import group_conflict_figure, rank_conflict_figure
from odin_nerfstudio.viewer.controls import PolicyName
from odin_nerfstudio.viewer.drawing import Drawing
from odin_nerfstudio.viewer.panel import CURVE, Panel
from odin_nerfstudio.viewer.recording import Recording
from odin_nerfstudio.viewer.shares_plot import load_figure, shares_figure
from odin_nerfstudio.viewer.widgets import Plot

LABELS = {kind.upper() if kind != "delayed" else kind: kind for kind in KINDS}


class OdinPanel(Panel):
    """Conflicts of ranks and units, shares over time, the policy, and the plan drawn into the scene."""

    def _add_sections(self, server: viser.ViserServer) -> None:
        gui = server.gui
        with gui.add_folder("Conflicts"):
            self._kind = gui.add_dropdown("Kind", tuple(LABELS))
            self._ranks, self._groups = Plot(gui), Plot(gui)
        with gui.add_folder("Shares and load"):
            self._shares, self._load = Plot(gui), Plot(gui)
        self._wake_on(self._kind)

    def _method_controls(self, gui: viser.GuiApi) -> dict[str, Any]:
        controls = self._monitor.controls
        return {
            "policy": gui.add_dropdown("Policy", get_args(PolicyName), initial_value=controls.policy),
            "delay_ratio": gui.add_slider("Delay ratio", 0.0, 1.0, 0.01, controls.delay_ratio),
            "window": gui.add_slider("Window", 1, max(64, controls.window), 1, controls.window),
        }

    def _add_toggles(self, server: viser.ViserServer) -> None:
        sketch = self._monitor.sketch
        self._drawing = None if sketch is None else Drawing(server, sketch, self._wake.set)
        if sketch is None:
            server.gui.add_markdown("This run has no geometry to draw.")

    def _in_force(self) -> list[str]:
        return [self._monitor.controls.policy]

    def _show_sections(self, recording: Recording, steps: Sequence[int]) -> None:
        kind, source = LABELS[self._kind.value], id(recording)
        window, curve = steps[-self._monitor.controls.window :], steps[-CURVE:]
        self._ranks.show((source, kind, *window), lambda: rank_conflict_figure(recording, kind, window))
        self._groups.show((source, kind, *window), lambda: group_conflict_figure(recording, kind, window))
        self._shares.show((source, *curve), lambda: shares_figure(recording, curve))
        self._load.show((source, *curve), lambda: load_figure(recording, curve))
        if self._drawing is not None:
            self._drawing.update(steps[-1] if steps else 0, self._units.value)
