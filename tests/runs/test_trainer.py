"""Where the viewer of a run is to be found."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from training import make_config


def test_the_viewer_says_which_port_it_took_and_listens_on_this_machine_only(
    demo_capture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as occupant:
        occupant.bind(("127.0.0.1", 0))
        occupant.listen()
        taken = occupant.getsockname()[1]
        config = make_config(demo_capture, tmp_path, vis="viewer")
        config.viewer.websocket_port = taken
        trainer = config.setup()
        trainer.setup()
        server = trainer.viewer_state.viser_server
        try:
            port = server.get_port()
            assert port != taken
            assert f"Port {taken} is taken: the viewer is at http://127.0.0.1:{port}" in capsys.readouterr().out
            for address, answers in (("127.0.0.1", True), ("127.0.0.2", False)):
                with socket.socket() as client:
                    assert (client.connect_ex((address, port)) == 0) == answers
        finally:
            server.stop()
