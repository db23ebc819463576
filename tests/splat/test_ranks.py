"""The same scene, to the last bit, whatever the number of ranks and the policy: real processes over gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import run_ranks
from training import assert_equal, learned, make_config, run

from odin_nerfstudio.comm.world import World
from odin_nerfstudio.plan.schedule import Schedule
from odin_nerfstudio.runs import trainer

VIEWS_PER_STEP, STEPS = 4, 22
"""Over two densifications and an opacity reset (see ``make_config``)."""


def train(world: World, capture: Path, output: Path, policy: str, load: Path | None, options: dict[str, Any]) -> Path:
    """One rank of a run, with options of the model; the folder of checkpoints."""
    config = make_config(capture, output, max_num_iterations=STEPS, steps_per_save=11)
    config.pipeline.policy = policy  # type: ignore[assignment]
    config.pipeline.datamanager.batch_per_rank = VIEWS_PER_STEP // world.size
    config.steps_per_eval_batch = config.steps_per_eval_image = config.steps_per_eval_all_images = 15
    for name, value in options.items():
        setattr(config.pipeline.model, name, value)
    if load is not None:
        config.load_dir, config.load_step, config.max_num_iterations = load, 11, STEPS - 12
    return run(config, world)


def train_on(
    size: int, capture: Path, output: Path, policy: str = "quality", load: Path | None = None, **options: Any
) -> Path:
    """Runs all ranks to the end."""
    return run_ranks(size, train, capture, output, policy, load, options, timeout=600)[0]


@pytest.fixture(scope="module")
def reference(demo_capture: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks under ``quality``."""
    return train_on(2, demo_capture, tmp_path_factory.mktemp("reference"))


@pytest.mark.parametrize(("size", "policy"), [(1, "barrier"), (4, "quality")])
def test_ranks_and_policy_do_not_show(
    reference: Path, demo_capture: Path, tmp_path: Path, size: int, policy: str
) -> None:
    """Parameters, moments, statistics, ids and schedulers."""
    expected = learned(reference)
    assert expected["ids"]["next_id"] > len(expected["ids"]["ids"])  # rows were added and removed on the way
    assert_equal(learned(train_on(size, demo_capture, tmp_path, policy)), expected)


def train_and_meet(world: World, capture: Path, output: Path) -> tuple[Path, list[list[int]], int]:
    """A run that meets often: its folder, who renders which views by what they cost, and how many groups that moved."""
    trainer.UNITS_BETWEEN_MEETINGS = 5
    planned, dealt, moved = Schedule.group, {}, 0

    def group(self, step, costs=None):
        nonlocal moved
        found = planned(self, step, costs)
        if costs is not None and step not in dealt:
            assert (costs > 1).all() and len(set(costs)) > 1  # the whole epoch was seen, and views differ
            dealt[step] = found.ranks.tolist()
            moved += not np.array_equal(found.ranks, planned(self, step).ranks)
        return found

    Schedule.group = group  # type: ignore[method-assign]
    return train(world, capture, output, "quality", None, {}), list(dealt.values()), moved


def test_views_are_dealt_out_by_cost(reference: Path, demo_capture: Path, tmp_path: Path) -> None:
    """All ranks deal them alike, and the scene stays the same."""
    ranks = run_ranks(2, train_and_meet, demo_capture, tmp_path, timeout=600)
    folder, dealt, moved = ranks[0]
    assert ranks[1][1] == dealt and len(dealt) > 5
    assert moved > 0
    assert_equal(learned(folder), learned(reference))


def test_checkpoint_of_two_ranks_resumes_on_one(reference: Path, demo_capture: Path, tmp_path: Path) -> None:
    resumed = train_on(1, demo_capture, tmp_path, load=reference)
    assert_equal(learned(resumed), learned(reference))


def test_losses_over_all_primitives_count_once(demo_capture: Path, tmp_path: Path) -> None:
    """All of them together, while primitives are added, and after resuming."""
    options = {
        "use_scale_regularization": True,
        "max_gauss_ratio": 1.05,
        "strategy": "mcmc",
        "mcmc_opacity_reg": 1.0,
        "mcmc_scale_reg": 1.0,
    }
    alone, together = (train_on(size, demo_capture, tmp_path / str(size), **options) for size in (1, 2))
    expected = learned(alone)
    assert_equal(learned(together), expected)
    resumed = train_on(2, demo_capture, tmp_path / "resumed", load=together, **options)
    assert_equal(learned(resumed), expected)
