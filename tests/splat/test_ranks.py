"""The same scene, to the last bit, whatever the number of ranks and the policy: real processes over gloo."""

from __future__ import annotations

import multiprocessing
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from odin_nerfstudio.comm.checkpoint import checkpoint_path, read_checkpoint

from .test_resume import assert_equal, make_config

VIEWS_PER_STEP, STEPS = 4, 22
"""Over two densifications and an opacity reset (see ``make_config``)."""


def _rank(rank: int, size: int, port: int, capture: Path, output: Path, policy: str, load: Path | None) -> None:
    """One rank of a run, as the launcher starts it."""
    torch.set_num_threads(1)
    if size > 1:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    config = make_config(capture, output, max_num_iterations=STEPS, steps_per_save=11)
    config.pipeline.policy = policy  # type: ignore[assignment]
    config.pipeline.datamanager.batch_per_rank = VIEWS_PER_STEP // size
    config.steps_per_eval_image = config.steps_per_eval_all_images = 15
    if load is not None:
        config.load_dir, config.load_step, config.max_num_iterations = load, 11, STEPS - 12
    from nerfstudio.scripts.train import train_loop

    train_loop(rank, size, config, rank)
    if size > 1:
        dist.destroy_process_group()


def train_on(size: int, capture: Path, output: Path, policy: str = "quality", load: Path | None = None) -> Path:
    """Runs all ranks to the end; the folder of checkpoints."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    arguments = (size, port, capture, output, policy, load)
    ranks = [context.Process(target=_rank, args=(rank, *arguments)) for rank in range(size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(240)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        if process.is_alive():
            process.kill()
    assert codes == [0] * size
    return output / "demo" / "odin-splatfacto" / "run" / "nerfstudio_models"


@pytest.fixture(scope="module")
def reference(demo_capture: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks under ``quality``."""
    return train_on(2, demo_capture, tmp_path_factory.mktemp("reference"))


@pytest.mark.parametrize(("size", "policy"), [(1, "quality"), (4, "quality"), (2, "barrier")])
def test_ranks_and_policy_do_not_show(
    reference: Path, demo_capture: Path, tmp_path: Path, size: int, policy: str
) -> None:
    """Parameters, moments, statistics, ids and schedulers."""
    expected = read_checkpoint(checkpoint_path(reference))
    assert len(expected["ids"]["ids"]) != 852  # rows were added and removed on the way
    assert_equal(read_checkpoint(checkpoint_path(train_on(size, demo_capture, tmp_path, policy))), expected)


@pytest.mark.parametrize("size", [1, 2])
def test_checkpoint_of_two_ranks_resumes_on_any_number(
    reference: Path, demo_capture: Path, tmp_path: Path, size: int
) -> None:
    resumed = train_on(size, demo_capture, tmp_path, load=reference)
    assert_equal(read_checkpoint(checkpoint_path(resumed)), read_checkpoint(checkpoint_path(reference)))
