"""``odin-bench scaling``: which cases run, what is said of the others, and that the figures are those of the step."""

from __future__ import annotations

import json
from typing import Any

import pytest

from odin_nerfstudio.cli.bench import cases
from odin_nerfstudio.cli.bench.scaling import Case, ScalingBench
from odin_nerfstudio.errors import UserError

TINY: dict[str, Any] = {"device": "cpu", "num_views": 12, "width": 64, "height": 48, "warmup": 1, "recorded": 1}


def test_real_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    bench = ScalingBench((1, 2), (3000,), systems=("barrier", "quality"), density=0.003, rounds=1, steps=2, **TINY)
    figures = bench.run()
    assert json.loads(json.dumps(figures)) == figures
    assert [(case["link"], case["world_size"]) for case in figures["cases"]] == [("local", 1), ("local", 2)]
    one, two = (case["systems"]["quality"] for case in figures["cases"])
    assert figures["weak_scaling"] == {"3,000 primitives, 2 × local": one["step_ms"] / two["step_ms"]}
    assert figures["failed"] == {} and figures["left_out"] == []
    assert "scaling" in capsys.readouterr().out


def measured(step_ms: float) -> dict[str, Any]:
    return {"systems": {"quality": {"step_ms": step_ms}}, "hidden_of_barrier": None}


def test_a_case_that_fails_does_not_end_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(self: ScalingBench, case: Case, left: float) -> dict[str, Any]:
        if case.world_size == 2:
            raise UserError("rank 1 ended.")
        return measured(4.0 * case.world_size)

    monkeypatch.setattr(ScalingBench, "_measure", measure)
    figures = ScalingBench((1, 2, 4), (3000,), **TINY).run()
    assert figures["failed"] == {"3,000 primitives, 2 × local": "rank 1 ended."}
    assert figures["weak_scaling"] == {"3,000 primitives, 4 × local": 0.25}


def test_what_there_is_no_time_for_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def measure(self: ScalingBench, case: Case, left: float) -> dict[str, Any]:
        assert left == 100 - now[0]
        now[0] += 40
        return measured(1.0)

    monkeypatch.setattr(cases.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(ScalingBench, "_measure", measure)
    figures = ScalingBench((1, 2, 4), (3000, 9000), budget_s=100, **TINY).run()
    assert [case["world_size"] for case in figures["cases"]] == [1, 2]
    left = ["3,000 primitives, 4 × local", *(f"9,000 primitives, {size} × local" for size in (1, 2, 4))]
    assert figures["left_out"] == left


def test_a_run_that_fails_is_told_by_its_last_line() -> None:
    with pytest.raises(UserError, match=r"No case ended well.*--num-views 1"):
        ScalingBench((2,), (3000,), **TINY | {"num_views": 1}).run()


def test_every_link_on_gpus_and_one_rank_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    cases = ScalingBench(num_primitives=(8,))._cases()
    expected = [("nvlink", 1), ("nvlink", 2), ("host", 2), ("socket", 2)]
    assert [(case.link, case.world_size) for case in cases] == expected


@pytest.mark.parametrize(
    ("bench", "flag"),
    [
        (ScalingBench(world_sizes=(0,), device="cpu"), "--world-sizes"),
        (ScalingBench(num_primitives=(3,), device="cpu"), "--num-primitives"),
        (ScalingBench(density=0, device="cpu"), "--density"),
        (ScalingBench(links=("host",), device="cpu"), "--links host"),
        (ScalingBench(world_sizes=(99,)), "--device cuda"),
    ],
)
def test_mistakes_name_the_flag(bench: ScalingBench, flag: str) -> None:
    with pytest.raises(UserError, match=flag):
        bench.run()
