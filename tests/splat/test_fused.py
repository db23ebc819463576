"""The exchanges between GPUs, here on CPUs over gloo with the kernels' twins: the same training, other bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nerfstudio.data.dataparsers.nerfstudio_dataparser import NerfstudioDataParserConfig
from PIL import Image
from plyfile import PlyData, PlyElement
from ranks import run_ranks
from training import assert_equal, between_gpus, learned, make_config, run

from odin_nerfstudio.comm.exchange import Signal
from odin_nerfstudio.comm.world import World
from odin_nerfstudio.plan.schedule import Group, Schedule
from odin_nerfstudio.splat.fused import FusedSparseExchange, FusedSplatExchange, planning

VIEWS_PER_STEP, STEPS = 4, 10


def train(
    world: World, capture: Path, output: Path, fused: bool, options: dict[str, Any], little: float = planning.LITTLE
) -> Path:
    """One rank of a run; the folder of checkpoints."""
    if fused:
        between_gpus()
    planning.LITTLE = little
    config = make_config(capture, output, max_num_iterations=STEPS, steps_per_save=STEPS)
    config.pipeline.datamanager.batch_per_rank = VIEWS_PER_STEP // world.size
    config.pipeline.model.warmup_length = 100
    config.steps_per_eval_batch = config.steps_per_eval_image = config.steps_per_eval_all_images = 7
    for name, value in options.items():
        setattr(config.pipeline, name, value)
    return run(config, world)


def train_on(
    size: int, capture: Path, output: Path, fused: bool = True, little: float = planning.LITTLE, **options: Any
) -> dict[str, Any]:
    """What all ranks together have learned."""
    return learned(run_ranks(size, train, capture, output, fused, options, little, timeout=600)[0])


@pytest.fixture(scope="module")
def expected(demo_capture: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the exchanges between CPUs come to."""
    return train_on(1, demo_capture, tmp_path_factory.mktemp("expected"), fused=False)


def assert_close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Parameters and statistics differ by rounding, in a few rows by what Adam makes of it where gradients are tiny."""
    for name, value in expected["pipeline"].items():
        if "gauss_params" in name:
            off = (found["pipeline"][name] - value).abs() > 1e-4 * (1 + value.abs())
            assert off.float().mean() < 1e-2, name
    for name in ("grad2d", "count"):
        torch.testing.assert_close(found["strategy"][name], expected["strategy"][name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("size", "placement"), [(1, "sharded"), (2, "sharded"), (2, "replicated")])
def test_trains_to_the_same_scene(
    expected: dict[str, Any], demo_capture: Path, tmp_path: Path, size: int, placement: str
) -> None:
    assert_close(train_on(size, demo_capture, tmp_path, placement=placement), expected)


GROUPS = {
    "some wanted": [(0, 1), (2, 3), (4, 5)],
    "nothing wanted": [(1, 6), (3, 7), (5, 8)],
    "all wanted": [(0, 2), (4, 0), (2, 4)],
}
"""Views in turns. Even views below 6 see a small spot that all of them share; 1, 3, 5 and 6, 7, 8 see large ones that
two of them share: 1 and 6, 3 and 7, 5 and 8."""
SPOTS = [0, 1, 0, 2, 0, 3, 1, 2, 3]
"""The spot that each view sees."""
POINTS = [10, 40, 40, 40]
"""Seed points at each spot."""


def write_spots(folder: Path) -> Path:
    """Clusters of points ten apart, and cameras that see one each; images of noise, so that nothing fits."""
    folder.mkdir()
    draws = np.random.default_rng(0)
    centres = [np.array([10 * spot, 0, 0]) for spot in range(len(POINTS))]
    clusters = [c + draws.uniform(-0.4, 0.4, (count, 3)) for c, count in zip(centres, POINTS, strict=True)]
    rows = np.array(
        [(*p, 200, 100, 50) for p in np.concatenate(clusters)],
        [*((c, "f4") for c in "xyz"), *((c, "u1") for c in ("red", "green", "blue"))],
    )
    PlyData([PlyElement.describe(rows, "vertex")]).write(folder / "points.ply")
    frames = []
    for view, spot in enumerate(SPOTS):
        Image.fromarray(draws.integers(0, 255, (48, 64, 3), dtype=np.uint8)).save(folder / f"{view}.png")
        pose = np.eye(4)
        pose[:3, 3] = [10 * spot + 0.02 * view, 0, 3]
        frames.append({"file_path": f"{view}.png", "transform_matrix": pose.tolist()})
    camera = {"camera_model": "OPENCV", "fl_x": 120, "fl_y": 120, "cx": 32, "cy": 24, "w": 64, "h": 48}
    (folder / "transforms.json").write_text(json.dumps({**camera, "frames": frames, "ply_file_path": "points.ply"}))
    return folder


def train_spots(world: World, capture: Path, output: Path, fused: bool, groups: str, options: dict[str, Any]) -> Any:
    """One rank of a run whose groups are known; the folder of checkpoints, and which pushes the units made."""
    turns = GROUPS[groups]
    Schedule.group = lambda self, step: Group(  # type: ignore[method-assign]
        step, np.array(turns[step % 3]), np.arange(2) if world.size > 1 else np.zeros(2, np.int64)
    )
    pushes: list[bool] = []
    if fused:
        between_gpus()
        kind = FusedSparseExchange if options.get("placement") == "replicated" else FusedSplatExchange
        push = kind.push

        def noted(self: Any, unit: Any, first: bool, signal: Signal = Signal.NONE) -> Any:
            pushes.append(first)
            return push(self, unit, first, signal)

        kind.push = noted  # type: ignore[method-assign]
    config = make_config(capture, output, max_num_iterations=7, steps_per_save=7)
    parser = NerfstudioDataParserConfig(load_3D_points=True, eval_mode="all", downscale_factor=1)
    config.pipeline.datamanager.dataparser = parser
    config.pipeline.datamanager.batch_per_rank = 2 // world.size
    config.pipeline.model.warmup_length = 100
    for name, value in options.items():
        setattr(config.pipeline, name, value)
    return run(config, world), pushes


@pytest.mark.parametrize("placement", ["sharded", "replicated"])
@pytest.mark.parametrize("groups", list(GROUPS))
def test_gradients_that_are_waited_for_travel_first(tmp_path: Path, groups: str, placement: str) -> None:
    """However much of them there is, the scene comes out the same."""
    capture, options = write_spots(tmp_path / "capture"), {"placement": placement}
    (expected, _), *_ = run_ranks(1, train_spots, capture, tmp_path / "one", False, groups, {}, timeout=300)
    (found, pushes), *_ = run_ranks(2, train_spots, capture, tmp_path / "two", True, groups, options, timeout=300)
    assert_close(learned(found), learned(expected))
    # The first unit and the last one end at a fence, the others in the way that their follower asks for.
    others = {"some wanted": [True, False], "nothing wanted": [False], "all wanted": [True]}[groups]
    assert pushes == [True, *others * 5, True]


@pytest.mark.parametrize("placement", ["sharded", "replicated"])
def test_overlap_does_not_show(demo_capture: Path, tmp_path: Path, placement: str) -> None:
    """Sums are taken in one order here, so that it does not even in the last bit."""
    barrier = train_on(2, demo_capture, tmp_path / "barrier", placement=placement, policy="barrier")
    for little in (0.0, 1.1):  # units are always read in two parts, or never
        quality = train_on(2, demo_capture, tmp_path / f"{little}", little=little, placement=placement)
        assert_equal(barrier["pipeline"], quality["pipeline"])


def test_throughput_trains(expected: dict[str, Any], demo_capture: Path, tmp_path: Path) -> None:
    found = train_on(2, demo_capture, tmp_path, policy="throughput", delay_ratio=1.0)
    means = "_model.gauss_params.means"
    assert (found["pipeline"][means] - expected["pipeline"][means]).abs().max() < 0.05
