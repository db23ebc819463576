"""``odin-bench viewer`` on a small run, and how it pairs blocks of steps."""

from __future__ import annotations

import pytest

from odin_nerfstudio.cli.bench.viewer import BLOCKS, WARMUP, ViewerBench, _pairs
from odin_nerfstudio.errors import UserError

BLOCK = BLOCKS["cpu"]
LEAST = 2 * (WARMUP + 4 * BLOCK)


def test_blocks_are_compared_with_their_neighbours() -> None:
    """Steps that grow steadily show no cost; recording makes every other block a tenth longer."""
    steps = range(3 * BLOCK, 10 * BLOCK + BLOCK // 2)
    growing = [1.0 + 0.01 * (step // BLOCK) for step in steps]
    assert [on / off for off, on in _pairs(growing, steps.start, BLOCK)] == pytest.approx([1.0] * 2)
    costly = [1.1 if step // BLOCK % 2 else 1.0 for step in steps]
    assert [on / off for off, on in _pairs(costly, steps.start, BLOCK)] == pytest.approx([1.1] * 2)


def test_it_measures_with_and_without_a_client() -> None:
    figures = ViewerBench(world_size=1, batch=1, steps=LEAST, scale=0.1).run()
    assert figures["recording_ratio"] > 0 and figures["recording_ratio_with_client"] > 0
    assert figures["pairs"] == {"nobody looks": 1, "somebody looks": 1}
    assert all(seconds > 0 for seconds in figures["step_s"].values())


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(UserError, match="--steps"):
        ViewerBench(steps=LEAST - 1).run()
