"""The trace file: what it draws, and that it says the same as the recording."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recordings import MS, UNITS, assert_equal_recordings, known_recording, predicted

from odin_nerfstudio.errors import UserError
from odin_nerfstudio.shadow.contention import Conflicts
from odin_nerfstudio.shadow.timeline import Kind, Timeline
from odin_nerfstudio.viewer.recording import Recording
from odin_nerfstudio.viewer.trace import read_trace, write_trace

ns = st.integers(0, 2**62)
spans = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.sampled_from(["compute", "communication", "wait"]),
        st.integers(0, 3),
        st.integers(0, 60) | st.integers(0, 2**50),
        st.integers(0, 12) | st.integers(0, 2**45),
        st.text(min_size=1),
    ),
    max_size=20,
)


@pytest.fixture
def events(tmp_path: Path) -> list[dict[str, Any]]:
    write_trace(known_recording(), tmp_path / "trace.json")
    content = json.loads((tmp_path / "trace.json").read_text())
    return content["traceEvents"]


def boxes(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == "X" and event["cat"] == kind]


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    recording = known_recording()
    write_trace(recording, tmp_path / "new" / "trace.json")
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["trace.json"]
    read = read_trace(tmp_path / "new" / "trace.json")
    assert_equal_recordings(read, recording)
    write_trace(read, tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == (tmp_path / "new" / "trace.json").read_text()


@given(recorded=spans, start=ns, world_size=st.integers(1, 3))
def test_any_spans_come_back_to_the_ns_and_no_two_boxes_of_a_lane_overlap(
    tmp_path_factory: pytest.TempPathFactory,
    recorded: list[tuple[int, Kind, int, int, int, str]],
    start: int,
    world_size: int,
) -> None:
    timelines = [Timeline(rank) for rank in range(world_size)]
    for rank, kind, step, begin, length, name in recorded:
        timelines[rank % world_size].add(kind, step, start + begin, start + begin + length, name)
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    write_trace(Recording(timelines), path)
    assert_equal_recordings(read_trace(path), Recording(timelines))
    lanes = defaultdict(list)
    for event in json.loads(path.read_text())["traceEvents"]:
        if event["ph"] == "X":
            begin = round(event["ts"] * 1e3)
            lanes[event["pid"], event["tid"]].append((begin, begin + round(event["dur"] * 1e3)))
    for drawn in lanes.values():
        drawn.sort()
        assert all(end <= begin for (_, end), (begin, _) in pairwise(drawn))


def test_ranks_are_processes_and_kinds_are_named_lanes(events: list[dict[str, Any]]) -> None:
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {0: "rank 0", 1: "rank 1"}
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert len(set(lanes)) == len(lanes)
    assert sorted(name for (rank, _), name in lanes.items() if rank == 0) == [
        "communication", "communication 2", "compute", "hidden", "unit", "wait",
    ]  # fmt: skip
    for event in events:
        if event["ph"] == "X":
            assert lanes[event["pid"], event["tid"]].split()[0] == event["cat"]


def test_units_hold_their_numbers_once(events: list[dict[str, Any]]) -> None:
    units = {(event["pid"], event["args"]["unit"]): event for event in boxes(events, "unit")}
    assert set(units) == {(rank, step) for rank in (0, 1) for step in UNITS} | {(0, 11)}
    assert len(boxes(events, "unit")) == len(units)
    for (rank, step), event in units.items():
        if step in UNITS:
            assert event["name"] == f"unit {step}"
            assert event["ts"] * 1e3 == (step - 7) * 10 * MS and event["dur"] * 1e3 == (10 + rank) * MS
            assert event["args"]["counts"]["early"] == 700 + step
            assert Conflicts.from_json(event["args"]["conflicts"]).ranks["raw"] == [[step, 10 + rank], [0, 2]]
            shares = {str(unit): predicted(step, unit) for unit in UNITS if unit < step and rank == 0}
            assert event["args"].get("predicted", {}) == shares
    assert not any({"counts", "conflicts"} & set(e["args"]) for e in events if e.get("cat") == "compute")


def test_what_was_hidden_is_drawn(events: list[dict[str, Any]]) -> None:
    for rank in (0, 1):
        for step in UNITS:
            drawn = [e for e in boxes(events, "hidden") if e["pid"] == rank and e["args"]["unit"] == step]
            assert [(e["ts"] * 1e3, e["dur"] * 1e3) for e in drawn] == [(((step - 7) * 10 + 4) * MS, 2 * MS)]


def test_counters_draw_each_unit(events: list[dict[str, Any]]) -> None:
    drawn = {(e["name"], e["pid"], e["ts"]): e["args"] for e in events if e["ph"] == "C"}
    for rank in (0, 1):
        for step in UNITS:
            time = (step - 7) * 10 * MS / 1e3
            assert drawn["early share", rank, time] == {"early share": (700 + step) / 1000}
            assert drawn["bytes", rank, time] == {"bytes": (1 + rank) * 1_000_000}
            assert drawn["exposed wait, ms", rank, time] == {"exposed wait, ms": pytest.approx(1 + rank)}


def test_perfetto_reads_it(tmp_path: Path, events: list[dict[str, Any]]) -> None:
    from perfetto.trace_processor import TraceProcessor, TraceProcessorConfig
    from perfetto.trace_processor.platform import PlatformDelegate

    try:
        program = shutil.which("trace_processor_shell") or PlatformDelegate().get_shell_path(None)
    except (subprocess.CalledProcessError, OSError):
        pytest.skip("the perfetto package could not download its trace_processor_shell; put it on the PATH")
    with TraceProcessor(str(tmp_path / "trace.json"), config=TraceProcessorConfig(bin_path=program)) as processor:
        rows = processor.query(
            "select slice.ts as ts, slice.dur as dur, slice.category as category, slice.name as name, "
            "process.pid as pid, process.name as rank from slice "
            "join thread_track on slice.track_id = thread_track.id join thread using (utid) join process using (upid)"
        )
        found = [(row.pid, row.rank, row.category, row.name, row.ts, row.dur) for row in rows]
        expected = [
            (e["pid"], f"rank {e['pid']}", e["cat"], e["name"], round(e["ts"] * 1e3), round(e["dur"] * 1e3))
            for e in events
            if e["ph"] == "X"
        ]
        assert sorted(found) == sorted(expected)
        assert sum(1 for _ in processor.query("select * from counter")) == sum(e["ph"] == "C" for e in events)
        errors = processor.query("select name, value from stats where severity = 'error' and value > 0")
        assert [row.name for row in errors] == []


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def of_another_program(path: Path) -> None:
    path.write_text(json.dumps({"traceEvents": [{"ph": "X", "pid": 1, "tid": 1, "name": "a", "ts": 0, "dur": 1}]}))


def without_counts(path: Path) -> None:
    path.write_text(path.read_text().replace('"counts":', '"amounts":'))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (Path.unlink, "there is no such file"),
        (cut_off, "is cut off or not JSON"),
        (lambda path: path.write_bytes(b"\xff\xfe\x00"), "is cut off or not JSON"),
        (lambda path: path.write_text("[]"), "is not a trace that odin_nerfstudio wrote"),
        (of_another_program, "is not a trace that odin_nerfstudio wrote"),
        (without_counts, "is not a trace that odin_nerfstudio wrote"),
        (lambda path: (path.unlink(), path.mkdir()), "cannot be read (Is a directory)"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, spoil, said: str) -> None:
    path = tmp_path / "trace.json"
    write_trace(known_recording(), path)
    spoil(path)
    with pytest.raises(UserError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}: {said}")


def test_a_full_disk_costs_neither_the_run_nor_the_file_that_was_there(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "trace.json"
    path.write_text("before")

    def fill(self: Path, *args: Any, **kwargs: Any) -> int:
        self.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", fill)
    with pytest.raises(UserError, match=r"trace\.json: cannot be written \(No space left on device\)"):
        write_trace(known_recording(), path)
    assert [file.name for file in tmp_path.iterdir()] == ["trace.json"] and path.read_bytes() == b"before"


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written"):
        write_trace(known_recording(), tmp_path / "file" / "trace.json")
