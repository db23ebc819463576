"""A second renderer, unlike splatting, joins by the three hooks alone and trains to the sequential result.

It draws bumps on a line (a smooth histogram) with autograd and takes plain gradient steps. Real threads run the units:
even ones on one thread, odd ones on another, with pauses at random.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

from odin_nerfstudio.shadow.bitmap import Bitmap
from odin_nerfstudio.shadow.graph import ShadowGraph
from odin_nerfstudio.shadow.policy import Barrier, Quality, Throughput

BUMPS, STEPS, RATE = 120, 40, 0.3
REACH = 3.0
"""A bump is drawn up to this far from its place."""


class LineRenderer:
    """Knows nothing of graphs: candidates of a window, its picture, its gradient, an update of rows."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.params = {
            "place": torch.linspace(0, 100, BUMPS, dtype=torch.float64),
            "height": torch.rand(BUMPS, 1, dtype=torch.float64, generator=generator),
        }
        self.home = self.params["place"].clone()

    def candidates(self, window: tuple[float, float]) -> Tensor:
        """Places move by less than 1 in a run, which is this renderer's guard band."""
        low, high = window
        return ((self.home > low - REACH - 1) & (self.home < high + REACH + 1)).nonzero()[:, 0]

    def gradients(self, values: dict[str, Tensor], window: tuple[float, float]) -> dict[str, Tensor]:
        x = torch.linspace(*window, 40, dtype=torch.float64)
        leaves = {name: value.clone().requires_grad_() for name, value in values.items()}
        distance = (x[:, None] - leaves["place"]) / REACH
        bumps = leaves["height"][:, 0] * torch.where(distance.abs() < 1, (1 - distance**2) ** 2, 0.0)
        loss = ((bumps.sum(1) - 2 - torch.sin(x)) ** 2).mean()
        return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))

    def commit(self, step: int, rows: Tensor, gradients: Mapping[str, Tensor], chosen: Tensor | None) -> None:
        meant = slice(None) if chosen is None else chosen
        for name, gradient in gradients.items():
            self.params[name][rows[meant]] -= RATE * gradient[meant]


def windows(overlap: bool) -> list[tuple[float, float]]:
    draw = random.Random(1)
    lows = [draw.uniform(0, 30) if overlap else 55 * (step % 2) + draw.uniform(0, 30) for step in range(STEPS)]
    return [(low, low + 12) for low in lows]


def sequential(views: list[tuple[float, float]]) -> LineRenderer:
    renderer = LineRenderer()
    for step, window in enumerate(views):
        rows = renderer.candidates(window)
        gradients = renderer.gradients({name: value[rows] for name, value in renderer.params.items()}, window)
        renderer.commit(step, rows, gradients, gradients["place"] != 0)
    return renderer


class Pipeline:
    """The loop of one unit, run by two threads."""

    def __init__(self, views: list[tuple[float, float]], policy: Quality, seed: int) -> None:
        self.views, self.renderer, self.draw = views, LineRenderer(), random.Random(seed)
        self.graph = ShadowGraph(BUMPS, self.renderer.commit, policy)
        self.failure: BaseException | None = None
        self.begun = self.early = self.scope = self.delayed = 0

    def run(self) -> None:
        threads = [threading.Thread(target=self.units, args=(parity,), daemon=True) for parity in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        if self.failure is not None:
            raise self.failure
        assert not any(thread.is_alive() for thread in threads)
        self.graph.fence()

    def units(self, parity: int) -> None:
        try:
            for step in range(parity, STEPS, 2):
                self.unit(step)
        except BaseException as failure:
            self.failure = failure

    def unit(self, step: int) -> None:
        graph, window = self.graph, self.views[step]
        rows = self.renderer.candidates(window)
        self.until(lambda: self.begun == step and len(graph.in_flight) < 2)
        unit = graph.admit(step, Bitmap.from_rows(rows, BUMPS))
        self.begun = step + 1
        values = {name: torch.full_like(value[rows], torch.nan) for name, value in self.renderer.params.items()}

        def read(handed: Bitmap) -> None:
            chosen = handed.contains(rows)
            for name, value in self.renderer.params.items():
                values[name][chosen] = value[rows[chosen]]

        def all_read() -> bool:
            read(graph.early(unit))
            self.pause()
            read(graph.late(unit))
            return unit.complete

        self.until(all_read)
        gradients = self.renderer.gradients(values, window)
        self.pause()
        active = gradients["place"] != 0
        small = graph.policy.negligible(gradients["height"][:, 0].abs(), active)
        graph.backward(unit, Bitmap.from_rows(rows, BUMPS, active), Bitmap.from_rows(rows, BUMPS, small))
        self.pause()
        half = torch.arange(len(rows)) < len(rows) // 2
        for part in (half, ~half):
            graph.stage(unit, rows, gradients, active & part)
            self.until(lambda: graph.in_flight[0] is unit)
            graph.publish(unit, last=part is not half)
            self.pause()
        counts = graph.counts(unit)
        self.early += counts.early
        self.scope += counts.scope
        self.delayed += counts.delayed

    def pause(self) -> None:
        time.sleep(self.draw.choice((0, 0, 0.0005, 0.002)))

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30
        while not condition():
            if self.failure is not None or time.monotonic() > deadline:
                raise TimeoutError(f"stuck: {[str(self.graph.stall(unit)) for unit in self.graph.in_flight]}")
            time.sleep(0)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("policy", [Barrier(), Quality()])
def test_threads_train_to_the_sequential_result(policy: Quality, overlap: bool) -> None:
    expected = sequential(windows(overlap))
    assert (expected.params["place"] - expected.home).abs().max() < 1
    for seed in range(3):
        pipeline = Pipeline(windows(overlap), policy, seed)
        pipeline.run()
        for name, value in expected.params.items():
            assert torch.equal(pipeline.renderer.params[name], value)
        if not overlap:  # neighbours share nothing, which only the barrier does not use
            assert (pipeline.early == pipeline.scope) == (not isinstance(policy, Barrier))


def test_throughput_stays_close_to_the_sequential_result() -> None:
    expected = sequential(windows(True))
    pipeline = Pipeline(windows(True), Throughput(delay_ratio=1.0), 0)
    pipeline.run()
    assert pipeline.delayed > 0
    moved = (expected.params["height"] - LineRenderer().params["height"]).norm()
    difference = (expected.params["height"] - pipeline.renderer.params["height"]).norm()
    assert 0 < difference < 0.1 * moved
