"""``odin-bench train``: a real run on two ranks, what a run is told, and what becomes of one that fails."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from torchmetrics.image.lpip import LearnedPerceptualImagePatchSimilarity

from odin_nerfstudio.cli.bench import train
from odin_nerfstudio.cli.bench.train import Case, TrainBench, scaled_schedule
from odin_nerfstudio.cli.train import parse
from odin_nerfstudio.errors import UserError

HERE = (Path("."),)


def test_a_real_run(demo_capture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = TrainBench((demo_capture,), (2,), images=24, scale=0.5, device="cpu").run()
    assert json.loads(json.dumps(figures)) == figures
    assert figures["failed"] == {} and figures["left_out"] == []
    (case,) = figures["cases"]
    assert (case["world_size"], case["policy"]) == (2, "quality")
    assert 0 < case["loop_s"] < case["wall_s"] and case["step_ms"] > 0
    assert case["psnr"] > 8 and 0 < case["ssim"] < 1 and case["primitives"] > 100
    assert case["views_per_s"] == pytest.approx(2 * 11 / case["loop_s"])
    assert case["ratio_one_loop"] is None and case["ratio_splatfacto"] is None
    assert "quality" in capsys.readouterr().out


def test_schedule_keeps_its_events_in_views() -> None:
    assert scaled_schedule(1)["pipeline.model.refine-every"] == 100
    assert scaled_schedule(8)["pipeline.model.stop-split-at"] == 15_000 // 8
    assert scaled_schedule(8)["optimizers.means.scheduler.max-steps"] == 30_000 // 8
    assert min(scaled_schedule(1000).values()) == 1


def arguments(method: train.Method, world_size: int, policy: train.PolicyName | None = None) -> list[str]:
    """What a run is told after its module."""
    case = Case(Path("somewhere"), method, world_size, policy)
    return [*TrainBench(HERE, images=4000)._training(case)[1:], *train._parser(case.capture)]


@pytest.mark.parametrize(
    ("method", "policy", "steps"), [("odin-splatfacto", "throughput", 500), ("nerfxl", None, 4000)]
)
def test_what_a_run_on_eight_ranks_is_told(method: train.Method, policy: train.PolicyName | None, steps: int) -> None:
    config, layout = parse(arguments(method, 8, policy))
    assert layout.ranks_per_node == 8 and config.max_num_iterations == steps
    if policy is not None:
        assert config.pipeline.policy == policy and config.pipeline.model.refine_every == 12


def test_steps_of_more_views_are_fewer() -> None:
    bench = TrainBench(HERE, images=4000, views_per_rank=2)
    told = bench._training(Case(Path("somewhere"), "odin-splatfacto", 2, "quality"))[1:]
    config, _ = parse([*told, "--data", "it"])
    assert config.pipeline.datamanager.batch_per_rank == 2 and config.max_num_iterations == 1000
    assert config.pipeline.model.refine_every == 25


def test_splatfacto_is_the_peer_on_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    config, _ = parse(arguments("splatfacto", 1))
    assert config.max_num_iterations == 4000 and config.pipeline.model.refine_every == 100
    bench = TrainBench(HERE, methods=("odin-splatfacto", "splatfacto"), policies=("quality", "throughput"))
    odin = [(1, None), (2, "quality"), (2, "throughput")]
    cases = [(case.method, (case.world_size, case.policy)) for case in bench._cases()]
    assert cases == [*(("odin-splatfacto", case) for case in odin), ("splatfacto", (1, None))]
    done = {case: {"wall_s": 8.0, "loop_s": 6.0 / case.world_size, "views_per_s": 4.0} for case in bench._cases()}
    expected = {"ratio_one_wall": 1.0, "ratio_one_loop": 0.5, "ratio_splatfacto": 1.0}
    assert train._ratios(Case(HERE[0], "odin-splatfacto", 2, "quality"), done) == expected


def test_nothing_is_downloaded_for_lpips(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train._write_stand_in_weights(tmp_path)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr("torch.hub.download_url_to_file", None)
    LearnedPerceptualImagePatchSimilarity(normalize=True)


def test_a_run_that_fails_is_told_by_its_last_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^NameError: name 'boom' is not defined$"):
        train._finish(["timeit", "-n", "1", "boom"], dict(os.environ), tmp_path, 60)


def test_the_end_of_the_budget_ends_a_run(tmp_path: Path) -> None:
    begin = time.monotonic()
    with pytest.raises(UserError, match=r"timeit was ended after 1 s, when --budget-s was over"):
        train._finish(["timeit", "-n", "1", "import time; time.sleep(60)"], dict(os.environ), tmp_path, 1)
    assert time.monotonic() - begin < 20


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"captures": (Path("nowhere"),)}, "--captures nowhere"),
    ({"captures": ()}, "--captures"),
    ({"methods": ("nerfxl", "nerfxl")}, "--methods nerfxl nerfxl"),
    ({"methods": ("splatfacto",)}, "--methods splatfacto"),
    ({"policies": ()}, "--policies"),
    ({"world_sizes": (0,)}, "--world-sizes 0"),
    ({"images": 5, "world_sizes": (2,)}, "--images 5"),
    ({"scale": 1.5}, "--scale"),
    ({"device": "cuda", "world_sizes": (99,)}, "--device cuda"),
]


@pytest.mark.parametrize(("flags", "sentence"), MISTAKES)
def test_mistakes_name_the_flag(flags: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        TrainBench(**{"captures": HERE, "device": "cpu", **flags}).run()
