"""Two ranks are one process with two tiles: gradients, evaluation, and what travels when."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from xl_runs import make_config

from odin_nerfstudio.comm.world import World
from odin_nerfstudio.nerfxl.pipeline import NerfXLPipeline


def make_pipeline(capture: Path, tiles: int, exchange: str = "tile") -> NerfXLPipeline:
    """Every regulariser acts."""
    config = make_config(capture, capture, tiles).pipeline
    config.model.exchange = exchange  # type: ignore[assignment]
    config.model.appearance_embed_dim = 4
    config.model.camera_optimizer.mode = "SO3xR3"
    config.model.camera_optimizer.trans_l2_penalty = config.model.camera_optimizer.rot_l2_penalty = 1.0
    config.model.hash_decay_mult, config.model.distortion_loss_mult = 1.0, 0.1
    pipeline = config.setup(device="cpu", test_mode="val")
    # Where it is zero, the norm that the regulariser is made of has no gradient.
    generator = torch.Generator().manual_seed(0)
    pipeline.model.camera_optimizer.pose_adjustment.data.normal_(0, 1e-3, generator=generator)
    return pipeline


def gradients(world: World, capture: Path, tiles: int, exchange: str) -> tuple[dict[str, Any], Counter[str]]:
    """Gradients of a step after the occupancy warm-up, and the collectives that ran in its backward."""
    pipeline = make_pipeline(capture, tiles, exchange)
    for step in (0, 16):
        pipeline.train()
        pipeline.model.prepare_step(step)
    _, losses, _ = pipeline.get_train_loss_dict(16)
    calls: Counter[str] = Counter()
    originals = {name: getattr(dist, name) for name in ("all_reduce", "all_gather", "broadcast", "send", "recv")}
    for name in originals:
        setattr(dist, name, lambda *_, name=name, **__: calls.update([name]))
    torch.stack(list(losses.values())).sum().backward()
    for name, original in originals.items():
        setattr(dist, name, original)
    world.sum_gradients(pipeline.shared_parameters())
    grads = {name: param.grad for name, param in pipeline.model.named_parameters() if param.grad is not None}
    return grads, calls


Cases = list[tuple[int, str]]


def all_gradients(world: World, capture: Path, cases: Cases) -> list[tuple[dict[str, Any], Counter[str]]]:
    """:func:`gradients` for several numbers of tiles and exchanges."""
    return [gradients(world, capture, tiles, exchange) for tiles, exchange in cases]


@pytest.mark.parametrize(("ranks", "cases"), [(2, [(2, "tile"), (3, "sample")]), (3, [(2, "tile")])])
def test_gradients_are_those_of_one_process(demo_capture: Path, ranks: int, cases: Cases) -> None:
    """With as many, more and fewer tiles than ranks; shared parameters too, and regularisers once."""
    results = run_ranks(ranks, all_gradients, demo_capture, cases, timeout=240)
    for case, (tiles, _) in enumerate(cases):
        expected, _ = gradients(World.current(), demo_capture, tiles, "tile")
        seen = set()
        for grads, calls in (result[case] for result in results):
            assert not calls
            for name, grad in grads.items():
                error = (grad - expected[name]).norm() / expected[name].norm().clamp_min(1e-12)
                assert error <= 1e-6, name
                seen.add(name)
        assert seen == expected.keys()


def evaluation(world: World, capture: Path) -> tuple[dict[str, Any], torch.Tensor, torch.Tensor]:
    """Metrics of all tiles, and images with and without the other ranks."""
    pipeline = make_pipeline(capture, 2)
    metrics = pipeline.get_average_eval_image_metrics()
    pipeline.get_eval_image_metrics_and_images(0)
    _, losses, _ = pipeline.get_eval_loss_dict(0)
    camera, _ = pipeline.datamanager.eval_view(0)
    pipeline.eval()
    with pipeline.model.together():
        whole = pipeline.model.get_outputs_for_camera(camera)["accumulation"]
    alone = pipeline.model.get_outputs_for_camera(camera)["accumulation"] if world.rank == 0 else whole
    return {"psnr": metrics["psnr"], "ssim": metrics["ssim"], **losses}, whole, alone


def test_evaluation_sees_all_tiles_and_a_viewer_those_of_its_rank(demo_capture: Path) -> None:
    expected, image, _ = evaluation(World.current(), demo_capture)
    (first, whole, alone), (second, other, _) = run_ranks(2, evaluation, demo_capture, timeout=240)
    for name, value in expected.items():
        torch.testing.assert_close(torch.as_tensor(first[name]), torch.as_tensor(value), rtol=1e-5, atol=1e-6)
        assert first[name] == second[name]
    torch.testing.assert_close(whole, image, rtol=1e-5, atol=1e-6)
    assert torch.equal(whole, other)
    assert (alone <= whole + 1e-6).all() and alone.sum() < whole.sum()
