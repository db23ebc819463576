"""What is recorded of a run whose conflicts are known: two spots that nobody sees together, on two real ranks."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nerfstudio.data.dataparsers.nerfstudio_dataparser import NerfstudioDataParserConfig
from PIL import Image
from plyfile import PlyData, PlyElement
from ranks import run_ranks
from training import between_gpus, make_config, run

from odin_nerfstudio.comm.world import World
from odin_nerfstudio.plan.schedule import Group, Schedule
from odin_nerfstudio.shadow.timeline import EVERY_UNIT, Sampling
from odin_nerfstudio.splat import runner
from odin_nerfstudio.viewer.trace import read_trace

POINTS = {"here": 30, "there": 20}
"""Seed points at each spot."""
AT = ["here", "here", "here", "there"]
"""The spot that each view sees."""
GROUPS = [(0, 1), (2, 3)]
"""Views of even and odd units: two of one spot, and two that share nothing. The first is rendered by rank 0."""
STEPS = 6


def write_spots(folder: Path) -> Path:
    """Two clusters of points ten apart, and cameras that see one each; images of noise, so that nothing fits."""
    folder.mkdir()
    draws = np.random.default_rng(0)
    centres = {"here": np.array([-5.0, 0, 0]), "there": np.array([5.0, 0, 0])}
    points = np.concatenate([centres[spot] + draws.uniform(-0.4, 0.4, (count, 3)) for spot, count in POINTS.items()])
    rows = np.array(
        [(*p, 200, 100, 50) for p in points],
        [*((c, "f4") for c in "xyz"), *((c, "u1") for c in ("red", "green", "blue"))],
    )
    PlyData([PlyElement.describe(rows, "vertex")]).write(folder / "points.ply")
    frames = []
    for view, spot in enumerate(AT):
        Image.fromarray(draws.integers(0, 255, (48, 64, 3), dtype=np.uint8)).save(folder / f"{view}.png")
        pose = np.eye(4)
        pose[:3, 3] = centres[spot] + [0.02 * view, 0, 3]
        frames.append({"file_path": f"{view}.png", "transform_matrix": pose.tolist()})
    camera = {"camera_model": "OPENCV", "fl_x": 120, "fl_y": 120, "cx": 32, "cy": 24, "w": 64, "h": 48}
    (folder / "transforms.json").write_text(json.dumps({**camera, "frames": frames, "ply_file_path": "points.ply"}))
    return folder


def train(
    world: World, capture: Path, output: Path, placement: str, fused: bool, sampling: Sampling = EVERY_UNIT
) -> Path:
    """One rank of a run whose groups are :data:`GROUPS` in turns."""
    if fused:
        between_gpus()
    runner.EVERY_UNIT = sampling  # type: ignore[attr-defined]
    Schedule.group = lambda self, step: Group(step, np.array(GROUPS[step % 2]), np.array([0, 1]))  # type: ignore[method-assign]
    config = make_config(capture, output, max_num_iterations=STEPS, steps_per_save=STEPS)
    parser = NerfstudioDataParserConfig(load_3D_points=True, eval_mode="all", downscale_factor=1)
    config.pipeline.datamanager.dataparser = parser
    config.pipeline.placement = placement  # type: ignore[assignment]
    config.pipeline.model.warmup_length = 100
    config.logging.steps_per_log = 1
    return run(config, world).parent


@pytest.fixture(scope="module", params=product(["sharded", "replicated"], [False, True]), ids=str)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a finished run."""
    base = tmp_path_factory.mktemp("spots")
    capture = write_spots(base / "capture")
    return run_ranks(2, train, capture, base / "outputs", *request.param, timeout=300)[0]


def test_the_trace_tells_the_known_conflicts(folder: Path) -> None:
    recording = read_trace(folder / "odin_trace.json")
    assert recording.steps() == list(range(STEPS))
    here, there = POINTS["here"], POINTS["there"]
    both = here + there
    for step in range(STEPS):
        ranks, groups = recording.conflicts(step).ranks, recording.conflicts(step).groups
        even = step % 2 == 0
        # Two ranks write the spot that both see, or spots of their own.
        assert ranks["waw"] == ([[0, here], [here, 0]] if even else [[0, 0], [0, 0]])
        if step == 0:
            expected = [[0, 0], [0, 0]]
        elif even:  # reads what rank 0 wrote here in the unit before; rank 1 was there
            expected = [[here, 0], [here, 0]]
        else:  # rank 0 reads what both wrote, rank 1 is there
            expected = [[here, here], [0, 0]]
        assert ranks["raw"] == expected
        seen = {earlier: {"raw": here, "waw": here, "delayed": 0} for earlier in range(step)}
        if not even:
            seen |= {earlier: {"raw": both, "waw": both, "delayed": 0} for earlier in range(1, step, 2)}
        assert groups == seen
        unit = recording.unit(step)
        copies = sum(unit.primitives) // both  # replicas all have all primitives, and count what they read of them
        assert unit.primitives in ([both // 2, both // 2], [both, both])
        assert unit.early + unit.late == unit.scope == copies * (here if even else both)


def test_of_a_sampled_run_the_units_within_stretches_are_known(tmp_path: Path) -> None:
    capture, sampling = write_spots(tmp_path / "capture"), Sampling(length=4, period=STEPS)
    (folder, _) = run_ranks(2, train, capture, tmp_path / "outputs", "sharded", True, sampling, timeout=300)
    recording = read_trace(folder / "odin_trace.json")
    assert recording.steps() == [3, 4], "of 2 to 5, which are recorded, those that have neighbours"
    here = POINTS["here"]
    assert recording.conflicts(4).ranks["raw"] == [[here, 0], [here, 0]]
    assert recording.conflicts(4).groups.keys() == {2, 3}
    assert all(recording.unit(step).bytes > 0 for step in (3, 4))


def test_predictions_stand_beside_what_was_measured(folder: Path) -> None:
    recording = read_trace(folder / "odin_trace.json")
    share = POINTS["here"] / sum(POINTS.values())
    predicted = recording.predicted_conflicts([0, 1, 2, 3])
    assert predicted[np.tril_indices(4, -1)].tolist() == pytest.approx([share, 1, 1, share, 1, share])


def test_tensorboard_shows_the_same_numbers(folder: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    recording = read_trace(folder / "odin_trace.json")
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()

    def shown(name: str) -> dict[int, Any]:
        return {event.step: event.value for event in events.Scalars(f"Odin/{name}")}

    units = [recording.unit(step) for step in range(STEPS)]
    assert shown("early_share") == pytest.approx({unit.step: unit.early_share for unit in units})
    assert shown("bytes") == pytest.approx({unit.step: unit.bytes for unit in units})
    assert shown("exposed_wait_ms") == pytest.approx({unit.step: 1e3 * np.mean(unit.wait) for unit in units})
    assert shown("hidden_fraction") == pytest.approx({unit.step: unit.hidden for unit in units})
    here = POINTS["here"]
    assert shown("waw") == {step: 0 if step % 2 else here for step in range(STEPS)}
    assert shown("raw") == {step: 2 * here if step else 0 for step in range(STEPS)}
    assert shown("delayed") == dict.fromkeys(range(STEPS), 0)
