"""The tab on a real viser server: what it shows is what was recorded, and what is set in it reaches the run."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import viser
import websockets.sync.client
from handmade import add_unit, handmade_recording
from nerfstudio.viewer.utils import parse_object
from nerfstudio.viewer.viewer_elements import ViewerControl
from viser import _messages as messages
from websockets.sync.client import ClientConnection

from odin_nerfstudio.cli.bench.viewer_client import CAMERA
from odin_nerfstudio.viewer.controls import Controls
from odin_nerfstudio.viewer.monitor import Monitor
from odin_nerfstudio.viewer.odin_panel import OdinPanel
from odin_nerfstudio.viewer.panel import FINISHED
from odin_nerfstudio.viewer.recording import Recording
from odin_nerfstudio.viewer.trace import write_trace

CLIENT = 7


@pytest.fixture
def viewer(tmp_path: Path) -> Iterator[SimpleNamespace]:
    """As much of nerfstudio's viewer as a control sees: its server, with tabs, and the run's folder."""
    server = viser.ViserServer(host="127.0.0.1", port=18_080, verbose=False)
    server.gui.add_tab_group().add_tab("Control")
    yield SimpleNamespace(viser_server=server, log_filename=tmp_path / "viewer.log")
    server.stop()


@pytest.fixture
def install(viewer: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Callable[[Monitor], OdinPanel]:
    """Sets a panel up that looks at the run only when the test says so."""

    def setup(monitor: Monitor) -> OdinPanel:
        monkeypatch.setattr(OdinPanel, "_watch", lambda self: None)
        panel = OdinPanel(monitor)
        panel._setup(viewer)
        panel._refresh()
        return panel

    return setup


def training(recording: Recording | None = None, **controls: Any) -> Monitor:
    monitor = Monitor(recording or handmade_recording(units=20), Controls(**controls))
    monitor.is_training = True
    return monitor


def browse(panel: OdinPanel, handle: Any, value: Any) -> None:
    """Does what viser does when somebody sets an element in a browser, and lets the panel look."""
    server = panel.viser_server
    server._connected_clients[CLIENT] = SimpleNamespace(client_id=CLIENT)
    try:
        server.gui._handle_gui_updates(CLIENT, messages.GuiUpdateMessage(handle._impl.id, {"value": value}))
    finally:
        del server._connected_clients[CLIENT]
    panel._refresh()


def shown_units(panel: OdinPanel) -> list[int]:
    compute = panel._timeline._handle.figure.data[0]
    return sorted({row[1] for row in compute.customdata})


def test_the_tab_stands_beside_those_of_nerfstudio(install: Callable[[Monitor], OdinPanel]) -> None:
    panel = install(training())
    containers = panel.viser_server.gui._container_handle_from_id.values()
    (group,) = {id(tab._parent): tab._parent for tab in containers if isinstance(tab, viser.GuiTabHandle)}.values()
    assert group._labels == ["Control", "Odin"]


def test_nerfstudio_finds_the_control(install: Callable[[Monitor], OdinPanel]) -> None:
    pipeline = SimpleNamespace(odin=install(training()))
    assert parse_object(pipeline, ViewerControl, "Custom Elements") == [("Custom Elements/odin", pipeline.odin)]
    public = [name for name in vars(pipeline.odin) if not name.startswith("_")]
    assert public == ["viewer", "viser_server"]  # nerfstudio's own


def test_it_shows_the_last_units(install: Callable[[Monitor], OdinPanel]) -> None:
    monitor = training(window=5)
    panel = install(monitor)
    assert shown_units(panel) == list(range(12, 20))
    assert panel._status._handle.content == "**Unit 19** · quality · 57% hidden · 0.75 ms waited"  # (7 × 60 + 40) ÷ 8
    assert list(panel._groups._handle.figure.data[0].x) == ["15", "16", "17", "18", "19"]
    add_unit(monitor.recording, 20)
    browse(panel, panel._units, 3)
    assert shown_units(panel) == [18, 19, 20]


def test_the_kind_of_conflict_can_be_chosen(install: Callable[[Monitor], OdinPanel]) -> None:
    monitor = training(window=5)
    panel = install(monitor)
    for label, kind in (("WAW", "waw"), ("delayed", "delayed"), ("RAW", "raw")):
        browse(panel, panel._kind, label)
        expected = monitor.recording.rank_conflicts(kind, range(15, 20)).tolist()
        assert [list(row) for row in panel._ranks._handle.figure.data[0].z] == expected


def test_what_has_not_changed_is_not_sent_again(install: Callable[[Monitor], OdinPanel]) -> None:
    panel = install(training())
    plots = (panel._timeline, panel._ranks, panel._groups, panel._shares, panel._load)
    before = [plot._handle.figure for plot in plots]
    panel._refresh()
    assert all(plot._handle.figure is figure for plot, figure in zip(plots, before, strict=True))
    add_unit(panel._monitor.recording, 20)
    panel._refresh()
    assert not any(plot._handle.figure is figure for plot, figure in zip(plots, before, strict=True))


def test_frozen_units_can_be_walked_through(install: Callable[[Monitor], OdinPanel]) -> None:
    panel = install(training())
    back, forward = panel._steps[1], panel._steps[-1]
    browse(panel, panel._units, 2)
    assert back.disabled and forward.disabled
    browse(panel, panel._freeze, True)
    assert not back.disabled and not forward.disabled
    browse(panel, back, True)
    assert shown_units(panel) == [17, 18]
    for step in range(20, 1100):  # the live recording forgets them
        add_unit(panel._monitor.recording, step)
    browse(panel, back, True)
    assert shown_units(panel) == [16, 17] and panel._status._handle.content.endswith("frozen")
    browse(panel, forward, True)
    browse(panel, forward, True)
    browse(panel, forward, True)  # there is nothing after the last one
    browse(panel, back, True)
    assert shown_units(panel) == [17, 18]
    browse(panel, panel._freeze, False)
    assert shown_units(panel) == [1098, 1099]


def test_controls_ask_the_run(install: Callable[[Monitor], OdinPanel]) -> None:
    monitor = training()
    panel = install(monitor)
    assert monitor.wish is None
    browse(panel, panel._controls["policy"], "throughput")
    browse(panel, panel._controls["delay_ratio"], 0.35)
    browse(panel, panel._controls["window"], 11)
    browse(panel, panel._controls["recording"], False)
    assert monitor.wish == Controls("throughput", delay_ratio=0.35, window=11, recording=False)
    assert panel._controls["policy"].value == "throughput"  # not set back while the wish is under way


def test_controls_follow_the_run_without_asking(install: Callable[[Monitor], OdinPanel]) -> None:
    monitor = training()
    panel = install(monitor)
    monitor.controls = Controls("barrier", window=3)
    panel._refresh()
    assert panel._controls["policy"].value == "barrier" and panel._controls["window"].value == 3
    time.sleep(0.1)  # viser calls back from another thread
    assert monitor.wish is None


def test_a_finished_run_shows_its_trace_and_has_no_controls(
    install: Callable[[Monitor], OdinPanel], tmp_path: Path
) -> None:
    write_trace(handmade_recording(units=4), tmp_path / "odin_trace.json")
    panel = install(Monitor(handmade_recording(units=0), Controls()))
    panel._refresh()
    assert shown_units(panel) == [0, 1, 2, 3]
    assert all(handle.disabled for handle in panel._controls.values())
    assert panel._note._handle.content == FINISHED


def test_a_finished_run_without_a_trace_says_so(install: Callable[[Monitor], OdinPanel]) -> None:
    panel = install(Monitor(handmade_recording(units=0), Controls()))
    assert "odin_trace.json" in panel._status._handle.content


def test_the_trace_is_saved_and_its_place_told(install: Callable[[Monitor], OdinPanel], tmp_path: Path) -> None:
    monitor = training()
    panel = install(monitor)
    assert panel._save.disabled
    monitor.save_trace = lambda: tmp_path / "odin_trace.json"
    panel._refresh()
    assert not panel._save.disabled
    browse(panel, panel._save, True)
    assert panel._saved._handle.content == f"Saved as `{tmp_path / 'odin_trace.json'}`."

    def full() -> Path:
        raise OSError(28, "No space left on device")

    monitor.save_trace = full
    browse(panel, panel._save, True)
    assert "No space left" in panel._saved._handle.content


def test_a_failed_look_does_not_end_the_watch(viewer: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []

    def refresh(panel: OdinPanel) -> None:
        looks.append(len(looks))
        if len(looks) == 1:
            raise ConnectionError("the client is gone")

    monkeypatch.setattr(OdinPanel, "_refresh", refresh)
    panel = OdinPanel(training())
    panel._setup(viewer)
    panel._wake.set()
    time.sleep(0.2)
    assert not looks  # nobody looks
    viewer.viser_server._connected_clients[CLIENT] = SimpleNamespace(client_id=CLIENT)
    try:
        deadline = time.monotonic() + 30
        while len(looks) < 2 and time.monotonic() < deadline:
            panel._wake.set()
            time.sleep(0.05)
    finally:
        del viewer.viser_server._connected_clients[CLIENT]
    assert len(looks) >= 2


def test_a_client_that_vanishes_in_the_middle_of_an_update_harms_nothing(
    viewer: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("odin_nerfstudio.viewer.panel.PERIOD", 0.01)
    monkeypatch.setattr("odin_nerfstudio.viewer.panel.COST", 0)
    monitor = training()
    panel = OdinPanel(monitor)
    panel._setup(viewer)
    address, ending = f"ws://127.0.0.1:{viewer.viser_server.get_port()}", struct.pack("ii", 1, 0)

    def connect() -> ClientConnection:
        client = websockets.sync.client.connect(address, max_size=None)
        client.send(msgspec.msgpack.encode(CAMERA))
        client.recv(10)
        return client

    for unit in range(20, 26):  # each comes, gets the figures of a unit or a part of them, and is gone without a word
        client = connect()
        add_unit(monitor.recording, unit)
        client.recv(10)
        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ending)
        client.socket.close()
    add_unit(monitor.recording, 26)
    with connect():
        deadline = time.monotonic() + 20
        while shown_units(panel)[-1:] != [26]:
            assert time.monotonic() < deadline
            time.sleep(0.05)
