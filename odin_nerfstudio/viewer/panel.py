"""The tab "Odin" in nerfstudio's viewer: what the ranks do, where they meet, and controls that act on the run."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import plotly.graph_objects as go
import viser
from nerfstudio.viewer.viewer_elements import ViewerControl

from odin_nerfstudio.errors import UserError
from odin_nerfstudio.shadow.contention import KINDS
from odin_nerfstudio.viewer.conflict_plot import group_conflict_figure, rank_conflict_figure
from odin_nerfstudio.viewer.controls import PolicyName
from odin_nerfstudio.viewer.drawing import Drawing
from odin_nerfstudio.viewer.monitor import Monitor
from odin_nerfstudio.viewer.recording import Recording
from odin_nerfstudio.viewer.shares_plot import load_figure, shares_figure
from odin_nerfstudio.viewer.style import aspect, empty_figure
from odin_nerfstudio.viewer.timeline_plot import timeline_figure
from odin_nerfstudio.viewer.trace import FILE_NAME, read_trace

if TYPE_CHECKING:
    from nerfstudio.viewer.viewer import Viewer

PERIOD = 2.0
"""Seconds between two looks at the run."""
COST = 50
"""The panel works at most one part in so many of the time, clicks aside."""
UNITS, MAX_UNITS = 8, 60
"""That the timeline shows at first, and at most."""
CURVE = 240
"""Units that the curves show."""
LABELS = {kind.upper() if kind != "delayed" else kind: kind for kind in KINDS}
FINISHED = "This run is not training: there is nothing to control."

_log = logging.getLogger(__name__)


class OdinPanel(ViewerControl):
    """A tab beside nerfstudio's own. One daemon thread draws it while somebody looks.

    That thread reads the monitor and sends messages to the browser. It takes no lock of the run, calls no collective,
    and what fails in it stays in it. Callbacks of the browser only leave a note for it.

    Args:
        monitor: of the run.
    """

    def __init__(self, monitor: Monitor) -> None:
        # All is private, since nerfstudio evaluates public attributes when a viewer starts.
        self._monitor = monitor
        self._wake = threading.Event()
        self._frozen: Recording | None = None
        self._loaded: Recording | None = None
        self._back = 0
        self._is_save_wanted = False
        self._has_failed = False

    def _setup(self, viewer: Viewer) -> None:
        """Called by nerfstudio once its own tabs are there."""
        super()._setup(viewer)
        self._trace_path = viewer.log_filename.parent / FILE_NAME
        server = viewer.viser_server
        with server.atomic(), _tab_group(server.gui).add_tab("Odin"):
            self._add_elements(server)
        server.on_client_connect(lambda _: self._wake.set())
        threading.Thread(target=self._watch, name="odin panel", daemon=True).start()

    def _add_elements(self, server: viser.ViserServer) -> None:
        gui, controls = server.gui, self._monitor.controls
        self._status = _Text(gui)
        with gui.add_folder("Timeline"):
            self._timeline = _Plot(gui)
            self._units = gui.add_slider("Units shown", 1, MAX_UNITS, 1, UNITS)
            self._freeze = gui.add_checkbox("Freeze", False, hint="Keep what is recorded now, for a closer look.")
            self._steps = {
                1: gui.add_button("Step back", disabled=True, icon=viser.Icon.PLAYER_SKIP_BACK),
                -1: gui.add_button("Step forward", disabled=True, icon=viser.Icon.PLAYER_SKIP_FORWARD),
            }
        with gui.add_folder("Conflicts"):
            self._kind = gui.add_dropdown("Kind", tuple(LABELS))
            self._ranks, self._groups = _Plot(gui), _Plot(gui)
        with gui.add_folder("Shares and load"):
            self._shares, self._load = _Plot(gui), _Plot(gui)
        with gui.add_folder("This run"):
            self._note = _Text(gui)
            self._controls = {
                "policy": gui.add_dropdown("Policy", get_args(PolicyName), initial_value=controls.policy),
                "delay_ratio": gui.add_slider("Delay ratio", 0.0, 1.0, 0.01, controls.delay_ratio),
                "window": gui.add_slider("Window", 1, max(64, controls.window), 1, controls.window),
                "recording": gui.add_checkbox("Recording", controls.recording),
            }
            self._save = gui.add_button("Save trace", icon=viser.Icon.DEVICE_FLOPPY)
            self._saved = _Text(gui)
        with gui.add_folder("In the scene"):
            sketch = self._monitor.sketch
            self._drawing = None if sketch is None else Drawing(server, sketch, self._wake.set)
            if sketch is None:
                gui.add_markdown("This run has no geometry to draw.")
        for handle in (self._units, self._freeze, self._kind):
            handle.on_update(lambda _: self._wake.set())
        for units, button in self._steps.items():
            button.on_click(partial(self._step, units))
        self._save.on_click(self._ask_to_save)
        for name, handle in self._controls.items():
            handle.on_update(partial(self._ask, name))

    # --------------------------------------------------------------------------------------- from the browser

    def _ask(self, name: str, event: viser.GuiEvent) -> None:
        if event.client is not None:  # values that the panel sets itself come without a client
            self._monitor.ask(**{name: event.target.value})
            self._wake.set()

    def _step(self, units: int, _: viser.GuiEvent) -> None:
        self._back += units
        self._wake.set()

    def _ask_to_save(self, _: viser.GuiEvent) -> None:
        self._is_save_wanted = True
        self._wake.set()

    # ------------------------------------------------------------------------------------------ to the browser

    def _watch(self) -> None:
        while True:
            began = time.monotonic()
            try:
                if self.viser_server.get_clients():
                    self._refresh()
            except Exception:  # of a client that left, a message that failed: the next look may succeed
                if not self._has_failed:
                    _log.warning("The Odin tab could not be refreshed; it goes on trying.", exc_info=True)
                self._has_failed = True
            self._wake.wait(max(PERIOD, COST * (time.monotonic() - began)))
            self._wake.clear()

    def _refresh(self) -> None:
        """Brings everything up to date; what has not changed is neither drawn nor sent again."""
        self._show_controls()
        recording = self._recording()
        steps = recording.steps()
        for button in self._steps.values():
            button.disabled = self._frozen is None
        self._back = max(0, min(self._back, len(steps) - 1))
        steps = steps[: len(steps) - self._back]
        shown, window = steps[-self._units.value :], steps[-self._monitor.controls.window :]
        kind, curve = LABELS[self._kind.value], steps[-CURVE:]
        self._status.show(self._summary(recording, shown))
        source = id(recording)
        self._timeline.show((source, *shown), lambda: timeline_figure(recording, shown))
        self._ranks.show((source, kind, *window), lambda: rank_conflict_figure(recording, kind, window))
        self._groups.show((source, kind, *window), lambda: group_conflict_figure(recording, kind, window))
        self._shares.show((source, *curve), lambda: shares_figure(recording, curve))
        self._load.show((source, *curve), lambda: load_figure(recording, curve))
        if self._drawing is not None:
            self._drawing.update(steps[-1] if steps else 0, self._units.value)

    def _recording(self) -> Recording:
        """What is to be seen: frozen, live, or from the file of a finished run."""
        live = self._monitor.recording
        if not self._monitor.is_training and not live.steps():
            if self._loaded is None:
                self._loaded = self._load_trace() or live
            live = self._loaded
        if not self._freeze.value:
            self._frozen, self._back = None, 0
            return live
        if self._frozen is None:
            self._frozen = live.excerpt(live.steps())
        return self._frozen

    def _load_trace(self) -> Recording | None:
        try:
            return read_trace(self._trace_path)
        except UserError:
            return None

    def _summary(self, recording: Recording, steps: list[int]) -> str:
        """One line on the units that the timeline shows."""
        if not steps:
            if self._monitor.is_training:
                return "No unit is recorded yet."
            return f"Nothing was recorded: the run's folder has no readable {FILE_NAME}."
        units = [recording.unit(step) for step in steps]
        hidden, wait = np.mean([unit.hidden for unit in units]), np.mean([unit.wait for unit in units])
        line = (
            f"**Unit {steps[-1]}** · {self._monitor.controls.policy} · {hidden:.0%} hidden · {1e3 * wait:.2f} ms waited"
        )
        return line + (" · frozen" if self._frozen is not None else "")

    def _show_controls(self) -> None:
        """Lets the elements say what is in force, unless a wish is under way."""
        monitor = self._monitor
        self._note.show("" if monitor.is_training else FINISHED)
        for name, handle in self._controls.items():
            handle.disabled = not monitor.is_training
            value = getattr(monitor.controls, name)
            if monitor.wish is None and handle.value != value:
                handle.value = value
        self._save.disabled = monitor.save_trace is None
        if self._is_save_wanted and monitor.save_trace is not None:
            self._is_save_wanted = False
            try:
                self._saved.show(f"Saved as `{monitor.save_trace()}`.")
            except (UserError, OSError) as error:
                self._saved.show(f"Not saved: {error}")


class _Plot:
    """A figure in the panel."""

    def __init__(self, gui: viser.GuiApi) -> None:
        figure = empty_figure("no unit recorded yet")
        self._handle = gui.add_plotly(figure, aspect(figure))
        self._aspect = aspect(figure)
        self._key: Hashable = None

    def show(self, key: Hashable, draw: Callable[[], go.Figure]) -> None:
        """Draws and sends the figure if it is not the one of this key already."""
        if key == self._key:
            return
        figure = draw()
        self._handle.figure = figure
        if aspect(figure) != self._aspect:
            self._handle.aspect = self._aspect = aspect(figure)
        self._key = key


class _Text:
    """A line of markdown in the panel."""

    def __init__(self, gui: viser.GuiApi) -> None:
        self._handle = gui.add_markdown("")

    def show(self, text: str) -> None:
        """Sends the text if it is another one."""
        if text != self._handle.content:
            self._handle.content = text


def _tab_group(gui: viser.GuiApi) -> Any:
    """The group of nerfstudio's tabs, or one of our own where there is none.

    nerfstudio keeps it in a local variable, so it is looked up through its tabs in viser's list of containers.
    """
    containers = gui._container_handle_from_id.values()
    tab = next((container for container in containers if isinstance(container, viser.GuiTabHandle)), None)
    return gui.add_tab_group() if tab is None else tab._parent
