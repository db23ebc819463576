"""What takes turns in ``odin-bench step``: a system that trains, and what all systems of a rank have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from odin_nerfstudio.cli.bench.step.city import SAMPLED_POINTS, City, Ground
from odin_nerfstudio.comm.world import World
from odin_nerfstudio.plan.plan import Plan
from odin_nerfstudio.plan.schedule import Schedule, ScheduleConfig

LEARNING_RATES = {
    "means": 1e-3,
    "scales": 5e-3,
    "quats": 1e-3,
    "features_dc": 2e-3,
    "features_rest": 2e-3,
    "opacities": 5e-2,
}
EPS = 1e-15
BETAS = (0.9, 0.999)


@dataclass(frozen=True)
class Site:
    """What the systems of a rank train on."""

    world: World
    """The ranks."""
    city: City
    """The scene."""
    plan: Plan
    """Which rank renders which views in each step."""
    points: Tensor
    """(P, 3) positions of some primitives, on the CPU, that the plan was made from."""
    ground: Ground
    """Images of the views."""

    @staticmethod
    def build(world: World, city: City, views_per_rank: int) -> Site:
        """Makes the plan.

        Raises:
            UserError: for fewer views than a step needs, or when the ranks do not draw the same scene.
        """
        means = city.primitives(world.device)["means"]
        points = means[:: max(1, len(means) // SAMPLED_POINTS)].cpu()
        capture = city.capture(points.double().numpy())
        plan = Plan.build(capture, world.size, views_per_rank, ScheduleConfig(seed=city.seed))
        world.check_same(plan.schedule.fingerprint(), "the order of views")
        return Site(world, city, plan, points, Ground(city, world.device))

    def loss(self, images: Sequence[Tensor] | Tensor, views: Sequence[int]) -> Tensor:
        """Σ over views of the mean absolute error of their images ((height, width, 3) each)."""
        errors = [(rgb - self.ground.image(view)).abs().mean() for rgb, view in zip(images, views, strict=True)]
        return torch.stack(errors).sum()


@dataclass(frozen=True)
class Overlap:
    """What was recorded of some steps on one rank, beside their time."""

    exposed_wait_s: float
    """Time in which the rank stood still for others, mean of a step."""
    hidden_fraction: float
    """Share of the communication behind which the rank computed."""
    bytes_sent: float
    """By this rank, mean of a step."""
    scope: float
    """Primitives of this rank that a step may read, mean."""
    early: float
    """Those of them that were read before the step before had ended."""


class System(ABC):
    """Trains the whole city or a part of it; all ranks make the same calls together.

    Args:
        site: what it trains on.
        schedule: of the views; None: that of the plan.
    """

    def __init__(self, site: Site, schedule: Schedule | None = None) -> None:
        self.site = site
        self.schedule = schedule or site.plan.schedule
        self.views: dict[int, list[int]] = {}
        """By step of a turn, the views that this rank renders."""
        self.watching = False
        self.visible: list[int] = []
        """Splats of a view, of each step that was taken while somebody watched."""

    def prepare(self, steps: range) -> None:
        """Before the steps of a turn: what does not count as a part of them."""
        self.views = {step: self.schedule.group(step).of_rank(self.site.world.rank).tolist() for step in steps}

    @abstractmethod
    def step(self, step: int, last: bool) -> None:
        """Takes a training step. After the ``last`` one of a turn nothing is in flight."""

    def watch(self) -> None:
        """From here on records and counts, whatever time that takes."""
        self.watching = True

    def overlap(self, steps: range) -> Overlap | None:
        """What was recorded of these steps; None where nothing can be."""
        return None

    def errors(self) -> list[float]:
        """Mean absolute errors of this rank's share of the held-out views; nothing where that is of no interest."""
        return []

    def close(self) -> None:  # noqa: B027
        """Lets go of what memory does not let go of by itself."""
