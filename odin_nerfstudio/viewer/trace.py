"""A recording as a file that Perfetto (ui.perfetto.dev) and chrome://tracing draw, and back.

The file is in Chrome's trace event format, one event a line. Ranks are processes, kinds of spans their lanes: ``unit``
from a unit's first span to its last, ``compute``, ``communication``, ``wait`` and ``hidden``, the overlap of
communication and compute. Every event names its unit. An event of the lane ``unit`` holds the numbers of the unit on
that rank; the plan's predictions, which are of no rank, stand on the first one. Counters draw early share, bytes and
exposed wait of each unit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from odin_nerfstudio.errors import UserError
from odin_nerfstudio.shadow.contention import Conflicts
from odin_nerfstudio.shadow.timeline import Interval, Kind, Span, StepRecord, Timeline
from odin_nerfstudio.viewer.files import write_file
from odin_nerfstudio.viewer.recording import Recording

FILE_NAME = "odin_trace.json"
"""Of a run's trace, in the folder with its config.yml."""
KINDS = ("unit", *get_args(Kind), "hidden")
LANES_PER_KIND = 1000
PREDICTED = 64
"""Units whose predictions are written: a plan takes its time, and no matrix shows more."""


def write_trace(recording: Recording, path: Path) -> None:
    """Writes all units that are recorded. May be called while the run goes on.

    Args:
        recording: of a run.
        path: of the file; its folder is made.

    Raises:
        UserError: the file cannot be written.
    """
    begins = (span.begin for timeline in recording.timelines for span in timeline.spans())
    origin = min(begins, default=0)  # small numbers stay exact as µs in floating point
    encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
    predicted = _predicted(recording)
    lines = [encode(event) for timeline in recording.timelines for event in _events(timeline, origin, predicted)]
    other = encode({"recorded_by": "odin_nerfstudio", "origin_ns": origin})
    write_file(path, '{"traceEvents":[\n' + ",\n".join(lines) + f'\n],"displayTimeUnit":"ms","otherData":{other}}}\n')


def read_trace(path: Path) -> Recording:
    """Reads what :func:`write_trace` wrote: the same spans, in ns, the same numbers and predictions.

    Times are exact as long as the clocks of all ranks lie within 100 days of each other.

    Raises:
        UserError: there is no such file, it cannot be read, is cut off, or is no trace of ours.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path}: there is no such file.") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}).") from error
    except ValueError as error:
        raise UserError(f"{path}: is cut off or not JSON; write the trace again.") from error
    try:
        return _recording(content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path}: is not a trace that odin_nerfstudio wrote; write the trace again.") from error


# --------------------------------------------------------------------------------------------------------- writing


@dataclass(frozen=True)
class _Slice:
    """A box in a lane."""

    kind: str
    name: str
    begin: int
    """ns."""
    end: int
    """ns."""
    args: dict[str, Any]


def _predicted(recording: Recording) -> dict[int, dict[str, float]]:
    """By unit, of the last ones, and earlier unit that it was compared with, the predicted share."""
    if recording.predicted is None:
        return {}
    last = set(recording.steps(PREDICTED))
    found = ((step, timeline.conflicts(step)) for timeline in recording.timelines for step in last)
    pairs = {(step, earlier) for step, conflicts in found if conflicts is not None for earlier in conflicts.groups}
    predicted: dict[int, dict[str, float]] = {}
    for step, earlier in sorted(pairs):
        share = float(recording.predicted(step, earlier))
        if not math.isnan(share):
            predicted.setdefault(step, {})[str(earlier)] = share
    return predicted


def _events(timeline: Timeline, origin: int, predicted: dict[int, dict[str, float]]) -> Iterator[dict[str, Any]]:
    """Events of one rank, those of each unit together and in the order in which they were recorded.

    Predictions that it draws are taken out of ``predicted``: the first rank has them, as they are the same for all.
    """
    rank, slices = timeline.rank, list(_slices(timeline, origin, predicted))
    yield _metadata("process_name", rank, 0, {"name": f"rank {rank}"})
    yield _metadata("process_sort_index", rank, 0, {"sort_index": rank})
    threads = [0] * len(slices)
    for place, kind in enumerate(KINDS):
        chosen = [number for number, each in enumerate(slices) if each.kind == kind]
        lanes = _lanes([(slices[number].begin, slices[number].end) for number in chosen])
        first = 1 + place * LANES_PER_KIND
        for lane in range(max(lanes, default=0) + 1):
            yield _metadata("thread_name", rank, first + lane, {"name": f"{kind} {lane + 1}" if lane else kind})
            yield _metadata("thread_sort_index", rank, first + lane, {"sort_index": first + lane})
        for number, lane in zip(chosen, lanes, strict=True):
            threads[number] = first + lane
    for each, thread in zip(slices, threads, strict=True):
        begin, duration = (each.begin - origin) / 1e3, (each.end - each.begin) / 1e3
        place_and_time = {"pid": rank, "tid": thread, "ts": begin, "dur": duration}
        yield {"ph": "X", "cat": each.kind, "name": each.name, **place_and_time, "args": each.args}
        if each.kind == "unit":
            for name, value in _drawn(timeline, each.args["unit"]).items():
                yield {"ph": "C", "name": name, "pid": rank, "ts": begin, "args": {name: value}}


def _slices(timeline: Timeline, origin: int, predicted: dict[int, dict[str, float]]) -> Iterator[_Slice]:
    for step in timeline.steps:
        spans = timeline.spans(step)
        begin = min((span.begin for span in spans), default=origin)
        end = max((span.end for span in spans), default=origin)
        numbers: dict[str, Any] = {"unit": step, "counts": timeline.counts(step)}
        numbers["finished"] = timeline.is_finished(step)
        conflicts = timeline.conflicts(step)
        if conflicts is not None:
            numbers["conflicts"] = conflicts.to_json()
        if step in predicted:
            numbers["predicted"] = predicted.pop(step)
        yield _Slice("unit", f"unit {step}", begin, end, numbers)
        for span in spans:
            yield _Slice(span.kind, span.name, span.begin, span.end, {"unit": step})
        for begin, end in timeline.hidden(step):
            yield _Slice("hidden", "hidden", begin, end, {"unit": step})


def _drawn(timeline: Timeline, step: int) -> dict[str, float]:
    return {
        "early share": timeline.early_share(step),
        "bytes": timeline.counts(step).get("bytes", 0),
        "exposed wait, ms": timeline.seconds("wait", step) * 1e3,
    }


def _lanes(intervals: Sequence[Interval]) -> list[int]:
    """For each interval the first lane that is free: Perfetto drops boxes that overlap others of their lane."""
    lanes = [0] * len(intervals)
    free_from: list[int] = []
    for number in sorted(range(len(intervals)), key=intervals.__getitem__):
        begin, end = intervals[number]
        lane = next((lane for lane, free in enumerate(free_from) if free <= begin), len(free_from))
        free_from[lane : lane + 1] = [end]
        lanes[number] = lane
    return lanes


def _metadata(name: str, rank: int, thread: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": rank, "tid": thread, "args": args}


# --------------------------------------------------------------------------------------------------------- reading


def _recording(content: dict[str, Any]) -> Recording:
    """Raises KeyError, TypeError, ValueError or AttributeError for what :func:`write_trace` does not write."""
    origin = int(content["otherData"]["origin_ns"])
    records: dict[int, dict[int, StepRecord]] = {}
    predicted: dict[tuple[int, int], float] = {}
    for event in content["traceEvents"]:
        units, args = records.setdefault(event["pid"], {}), event["args"]
        if event["ph"] != "X":
            continue
        record = units.setdefault(args["unit"], StepRecord())
        if event["cat"] == "unit":
            record.counts.update(args["counts"])
            record.finished = args["finished"]
            if "conflicts" in args:
                record.conflicts = Conflicts.from_json(args["conflicts"])
            predicted |= {(args["unit"], int(earlier)): share for earlier, share in args.get("predicted", {}).items()}
        elif event["cat"] in get_args(Kind):
            begin = origin + round(event["ts"] * 1e3)
            record.spans.append(Span(event["cat"], event["name"], begin, begin + round(event["dur"] * 1e3)))
    timelines = []
    for rank, units in sorted(records.items()):
        timeline = Timeline(rank, steps=len(units))
        timeline.absorb(units)
        timelines.append(timeline)
    return Recording(timelines, (lambda *pair: predicted.get(pair, math.nan)) if predicted else None)
