"""The benches on real ranks: their figures, never their times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from odin_nerfstudio.cli.bench.equivalence import EquivalenceBench
from odin_nerfstudio.cli.bench.overlap import OverlapBench
from odin_nerfstudio.errors import UserError
from odin_nerfstudio.viewer.trace import read_trace


def test_policies_and_worlds_end_with_the_same_scene(demo_capture: Path) -> None:
    figures = EquivalenceBench(demo_capture, world_size=2, steps=20, batch=2, scale=0.5, timeout_s=600).run()
    assert json.loads(json.dumps(figures)) == figures
    for pair in ("quality_barrier", "world", "placement"):
        assert figures[f"max_abs_diff_{pair}"] == figures[f"unmatched_{pair}"] == 0
    assert figures["world_sizes"] == [1, 2]
    assert figures["primitives"] != figures["primitives_at_start"]
    # 59 numbers of 4 bytes each (SH of degree 3), and two moments of each.
    assert figures["bytes_per_rank"] * 2 >= figures["primitives"] * 59 * 4 * 3
    assert 1 <= figures["bytes_per_rank_ratio"] <= 1.15


def test_overlap_is_consistent(demo_capture: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    bench = OverlapBench(
        demo_capture, steps=8, warmup=2, batch=2, scale=0.5, link_gbps=0.1, link_latency_us=200, trace=trace
    )
    figures = bench.run()
    assert json.loads(json.dumps(figures)) == figures
    policies: dict[str, dict[str, float]] = figures["policies"]
    for each in policies.values():
        assert 0 <= each["early_share"] <= 1
        assert each["scope"] == pytest.approx(each["early"] + each["late"])
        assert each["bytes"] > 0 and each["step_s"] > 0
        waits = sum(each[f"wait_for_{what}_s"] for what in ("splats", "wanted_gradients", "gradients"))
        assert each["exposed_wait_s"] == pytest.approx(waits)
        assert each["hidden_fraction"] <= 1
    assert policies["barrier"]["early_share"] == policies["barrier"]["hidden_fraction"] == 0
    assert policies["quality"]["early_share"] == figures["early_share"] > 0
    assert policies["quality"]["scope"] == policies["barrier"]["scope"]  # the same run
    timelines = read_trace(trace).timelines
    assert [(timeline.rank, timeline.steps) for timeline in timelines] == [(0, list(range(8))), (1, list(range(8)))]
    waits = [timeline.seconds("wait", step) for timeline in timelines for step in range(2, 7)]
    assert policies["quality"]["exposed_wait_s"] == pytest.approx(sum(waits) / len(waits))


@pytest.mark.parametrize(
    ("bench", "flag"),
    [
        (EquivalenceBench(batch=3), "--batch"),
        (EquivalenceBench(steps=3), "--steps"),
        (OverlapBench(world_size=1), "--world-size"),
        (OverlapBench(link_gbps=0.0), "--link-gbps"),
    ],
)
def test_mistakes_name_the_flag(bench: EquivalenceBench | OverlapBench, flag: str) -> None:
    with pytest.raises(UserError, match=flag):
        bench.run()


def test_failed_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"2 ranks quality: rank \d: .*nothing-here"):
        EquivalenceBench(tmp_path / "nothing-here", world_size=2, steps=20).run()


def test_run_that_takes_too_long_is_ended(demo_capture: Path) -> None:
    with pytest.raises(UserError, match="2 ranks quality: did not end within --timeout-s 1"):
        EquivalenceBench(demo_capture, world_size=2, steps=20, timeout_s=1).run()
