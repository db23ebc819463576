"""The scalars, as TensorBoard reads them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import nerfstudio.configs.base_config  # noqa: F401  # writer and this import each other; only this order works
import pytest
from nerfstudio.utils import writer
from recordings import UNITS, known_recording
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from odin_nerfstudio.shadow.contention import Conflicts
from odin_nerfstudio.shadow.timeline import Timeline
from odin_nerfstudio.viewer.recording import Recording
from odin_nerfstudio.viewer.scalars import put_scalars, unit_scalars


@pytest.fixture
def tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder that nerfstudio's TensorBoard writer, the only one, writes to."""
    board = writer.TensorboardWriter(tmp_path)
    monkeypatch.setattr(writer, "EVENT_WRITERS", [board])
    monkeypatch.setattr(writer, "EVENT_STORAGE", [])
    yield tmp_path
    board.tb_writer.close()


def test_tensorboard_shows_the_figures_of_each_unit(tensorboard: Path) -> None:
    recording = known_recording()
    put_scalars(recording, recording.steps())
    writer.write_out_storage()
    writer.EVENT_WRITERS[0].tb_writer.flush()
    events = EventAccumulator(str(tensorboard)).Reload()
    read = {
        name: {event.step: event.value for event in events.Scalars(name)}
        for name in events.Tags()["scalars"]
        if name.startswith("Odin/")
    }
    for step in UNITS:
        expected = {
            "early_share": (700 + step) / 1000,
            "late_share": (300 - step) / 1000,
            "delayed_share": 0.02,
            "fallback_share": 0.05,
            "hidden_fraction": 0.5,
            "exposed_wait_ms": 1.5,
            "bytes": 3_000_000,
            "raw": 2 * step + 10 + 11 + 2 + 2,
            "waw": 8,
            "delayed": 2,
            "primitives/rank 0": 5000 + step,
            "primitives/rank 1": 5100 + step,
            "memory_gib/rank 0": 2,
            "memory_gib/rank 1": 3,
        }
        found = {name.removeprefix("Odin/"): values[step] for name, values in read.items()}
        assert found == pytest.approx(expected)
    assert all(set(values) == set(UNITS) for values in read.values())


def test_an_empty_scope_has_shares_too() -> None:
    timeline = Timeline()
    timeline.finish(0, Conflicts({kind: [[0]] for kind in ("raw", "waw", "delayed")}, {}))
    scalars = unit_scalars(Recording([timeline]), 0)
    assert scalars["Odin/early_share"] == scalars["Odin/hidden_fraction"] == 1
    assert scalars["Odin/late_share"] == scalars["Odin/exposed_wait_ms"] == scalars["Odin/waw"] == 0
