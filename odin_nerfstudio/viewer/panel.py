"""The tab "Odin" in nerfstudio's viewer, and what it has for every method: what the ranks did when."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import viser
from nerfstudio.viewer.viewer_elements import ViewerControl

from odin_nerfstudio.errors import UserError
from odin_nerfstudio.viewer.monitor import Monitor
from odin_nerfstudio.viewer.recording import Recording
from odin_nerfstudio.viewer.timeline_plot import timeline_figure
from odin_nerfstudio.viewer.trace import FILE_NAME, read_trace
from odin_nerfstudio.viewer.widgets import Plot, Text

if TYPE_CHECKING:
    from nerfstudio.viewer.viewer import Viewer

PERIOD = 2.0
"""Seconds between two looks at the run."""
COST = 50
"""The panel works at most one part in so many of the time, clicks aside."""
UNITS, MAX_UNITS = 8, 60
"""That the timeline shows at first, and at most."""
CURVE = 240
"""Units that curves show."""
FINISHED = "This run is not training: there is nothing to control."

_log = logging.getLogger(__name__)


class Panel(ViewerControl, ABC):
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
            self._add_timeline(server.gui)
            self._add_sections(server)
            with server.gui.add_folder("This run"):
                self._add_controls(server.gui)
            with server.gui.add_folder("In the scene"):
                self._add_toggles(server)
        server.on_client_connect(lambda _: self._wake.set())
        threading.Thread(target=self._watch, name="odin panel", daemon=True).start()

    def _add_timeline(self, gui: viser.GuiApi) -> None:
        self._status = Text(gui)
        with gui.add_folder("Timeline"):
            self._timeline = Plot(gui)
            self._units = gui.add_slider("Units shown", 1, MAX_UNITS, 1, UNITS)
            self._freeze = gui.add_checkbox("Freeze", False, hint="Keep what is recorded now, for a closer look.")
            self._steps = {
                1: gui.add_button("Step back", disabled=True, icon=viser.Icon.PLAYER_SKIP_BACK),
                -1: gui.add_button("Step forward", disabled=True, icon=viser.Icon.PLAYER_SKIP_FORWARD),
            }
        self._wake_on(self._units, self._freeze)
        for units, button in self._steps.items():
            button.on_click(partial(self._step, units))

    @abstractmethod
    def _add_sections(self, server: viser.ViserServer) -> None:
        """Adds the folders of a method between the timeline and the controls."""

    def _add_controls(self, gui: viser.GuiApi) -> None:
        """Adds what acts on the run; ``_controls`` has them by field of :class:`~.controls.Controls`."""
        self._note = Text(gui)
        self._controls: dict[str, Any] = {"recording": gui.add_checkbox("Recording", self._monitor.controls.recording)}
        self._controls |= self._method_controls(gui)
        for name, handle in self._controls.items():
            handle.on_update(partial(self._ask, name))
        self._save = gui.add_button("Save trace", icon=viser.Icon.DEVICE_FLOPPY)
        self._save.on_click(self._ask_to_save)
        self._saved = Text(gui)

    def _method_controls(self, gui: viser.GuiApi) -> dict[str, Any]:
        """Adds the controls of a method, by field of :class:`~.controls.Controls`."""
        return {}

    @abstractmethod
    def _add_toggles(self, server: viser.ViserServer) -> None:
        """Adds what can be drawn into the scene."""

    def _wake_on(self, *handles: Any) -> None:
        for handle in handles:
            handle.on_update(lambda _: self._wake.set())

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
        shown = steps[-self._units.value :]
        self._status.show(self._summary(recording, shown))
        self._timeline.show((id(recording), *shown), lambda: timeline_figure(recording, shown))
        self._show_sections(recording, steps)

    @abstractmethod
    def _show_sections(self, recording: Recording, steps: Sequence[int]) -> None:
        """Brings the folders of a method up to date, as after the last of some units."""

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

    def _summary(self, recording: Recording, steps: Sequence[int]) -> str:
        """One line on the units that the timeline shows."""
        if not steps:
            if self._monitor.is_training:
                return "No unit is recorded yet."
            return f"Nothing was recorded: the run's folder has no readable {FILE_NAME}."
        units = [recording.unit(step) for step in steps]
        hidden, wait = np.mean([unit.hidden for unit in units]), np.mean([unit.wait for unit in units])
        said = [f"**Unit {steps[-1]}**", *self._in_force(), f"{hidden:.0%} hidden", f"{1e3 * wait:.2f} ms waited"]
        return " · ".join([*said, "frozen"] if self._frozen is not None else said)

    def _in_force(self) -> list[str]:
        """What the summary says of the controls."""
        return []

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


def _tab_group(gui: viser.GuiApi) -> Any:
    """The group of nerfstudio's tabs, or one of our own where there is none.

    nerfstudio keeps it in a local variable, so it is looked up through its tabs in viser's list of containers.
    """
    containers = gui._container_handle_from_id.values()
    tab = next((container for container in containers if isinstance(container, viser.GuiTabHandle)), None)
    return gui.add_tab_group() if tab is None else tab._parent
