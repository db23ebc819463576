"""The same scene, to the last bit, whatever the number of ranks and the policy: real processes over gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks
from training import assert_equal, learned, make_config, run

from odin_nerfstudio.comm.world import World

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
