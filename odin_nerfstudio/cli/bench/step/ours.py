"""Our own systems: the model, the plan and the runner of ``odin-splatfacto``, without nerfstudio's trainer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import mean
from typing import ClassVar

import torch
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.data.scene_box import SceneBox
from torch import Tensor

from odin_nerfstudio.cli.bench.step.city import HELD_OUT, City
from odin_nerfstudio.cli.bench.step.system import BETAS, EPS, LEARNING_RATES, Overlap, Site, System
from odin_nerfstudio.comm.placement import Placement, Shard
from odin_nerfstudio.comm.replicas import Replicas
from odin_nerfstudio.plan.plan import Plan
from odin_nerfstudio.plan.schedule import Group
from odin_nerfstudio.shadow.bitmap import Bitmap
from odin_nerfstudio.shadow.optimizer import LazyAdam
from odin_nerfstudio.shadow.policy import Barrier, Quality, Throughput
from odin_nerfstudio.shadow.timeline import EVERY_UNIT
from odin_nerfstudio.shadow.unit import TaskUnit
from odin_nerfstudio.splat.model import OdinSplatfactoModel, OdinSplatfactoModelConfig
from odin_nerfstudio.splat.raster import Splats
from odin_nerfstudio.splat.rows import install
from odin_nerfstudio.splat.runner import UnitRunner


@dataclass(frozen=True)
class Unvalidated(Quality):
    """Everything is read at once, also what the unit before is still going to change: wrong by design.

    A row that both units read moves on as if the first one had no gradient for it, which is added when it has arrived.
    """

    validates: ClassVar[bool] = False

    def ahead(self, scope: Bitmap, before: Bitmap) -> Bitmap:
        return scope

    def early(self, unit: TaskUnit) -> Bitmap:
        return unit.scope

    def late(self, unit: TaskUnit) -> Bitmap:
        return unit.nothing

    def held(self, unit: TaskUnit) -> Bitmap:
        return unit.nothing


@dataclass(frozen=True)
class Variant:
    """One of our systems."""

    policy: Quality = field(default_factory=Quality)
    """What may be read while another unit is in flight."""
    replicated: bool = False
    """Whether every rank has all primitives, rather than a part of space."""
    local: bool = True
    """Whether the plan's order of views is followed, and views go to the ranks that have their primitives; otherwise
    the order is random, and views go to ranks as they come."""


VARIANTS = {
    "barrier": Variant(Barrier()),
    "quality": Variant(),
    "throughput": Variant(Throughput()),
    "replicated-barrier": Variant(Barrier(), replicated=True),
    "replicated-quality": Variant(replicated=True),
    "replicated-throughput": Variant(Throughput(), replicated=True),
    "no-locality": Variant(local=False),
    "no-validation": Variant(Unvalidated()),
}
"""By the name that a bench calls it."""


class Odin(System):
    """A variant on the city."""

    def __init__(self, site: Site, variant: Variant) -> None:
        plan = site.plan if variant.local else _without_locality(site.plan)
        super().__init__(site, plan.schedule)
        self._data = CityData(site.city, plan)
        self._model = _build_model(site, variant.replicated)
        # The datamanager's part of planning and cameras is all that the runner asks for.
        self._runner = UnitRunner(self._model, self._data, site.world, variant.policy, variant.replicated)  # type: ignore[arg-type]
        self._runner.timeline.recording = False

    def step(self, step: int, last: bool) -> None:
        def loss(leaves: list[Splats]) -> Tensor:
            if self.watching:
                self.visible.append(sum(len(splats.ids) for splats in leaves) // len(leaves))
            return self._loss(self.views[step], leaves)

        self._model.step = step
        self._runner.run(step, lambda: loss(self._runner.leaves(step)), lambda: last)

    def prepare(self, steps: range) -> None:
        super().prepare(steps)
        for step in steps:  # as after the first epoch of a run
            for view in self.schedule.group(step).views.tolist():
                _ = self._model.pinhole(self._data.train_camera(view), step).row

    def watch(self) -> None:
        super().watch()
        self._runner.timeline.recording, self._runner.timeline.sampling = True, EVERY_UNIT
        self._runner.contention.watching = False  # or waits would be those of a host that has as much to do again

    def overlap(self, steps: range) -> Overlap:
        timeline = self._runner.timeline
        hidden = sum(end - begin for step in steps for begin, end in timeline.hidden(step)) / 1e9
        communication = sum(timeline.seconds("communication", step) for step in steps)
        return Overlap(
            exposed_wait_s=mean(timeline.seconds("wait", step) for step in steps),
            hidden_fraction=hidden / communication if communication else 1.0,
            bytes_sent=mean(timeline.counts(step).get("bytes", 0) for step in steps),
            scope=mean(timeline.counts(step).get("scope", 0) for step in steps),
            early=mean(timeline.counts(step).get("early", 0) for step in steps),
        )

    @torch.no_grad()
    def errors(self) -> list[float]:
        first, size, rank = self.site.city.num_views, self.site.world.size, self.site.world.rank
        views = range(first, first + HELD_OUT)
        pinholes = [self._model.pinhole(self._data.train_camera(view), self._model.step) for view in views]
        splats = self._runner.look(pinholes, [number % size for number in range(HELD_OUT)])
        mine = zip(views[rank::size], splats, strict=True)
        return [float(self._loss([view], [of_view])) for view, of_view in mine]

    def close(self) -> None:
        self._runner.close()

    def _loss(self, views: list[int], splats: list[Splats]) -> Tensor:
        size, rasterize = (self.site.city.width, self.site.city.height), self._model.rasterizer.rasterize
        return self.site.loss([rasterize(of_view, *size, depth=False).rgb for of_view in splats], views)


class CityData:
    """What the runner asks of a datamanager: the schedule, and the cameras of its views.

    Args:
        city: whose views these are.
        plan: of the training.
    """

    def __init__(self, city: City, plan: Plan) -> None:
        self._plan = plan
        self._city = city
        self._kept: dict[int, Cameras] = {}

    def group(self, step: int) -> Group:
        """The group of a step, after the plan."""
        return self._plan.schedule.group(step)

    def train_camera(self, view: int) -> Cameras:
        """The camera of a view: shape (1,), on the CPU, its index in ``metadata["cam_idx"]``. Kept, as others do."""
        if view not in self._kept:
            self._kept[view] = self._cameras[view : view + 1]
            self._kept[view].metadata = {"cam_idx": view}
        return self._kept[view]

    @cached_property
    def _cameras(self) -> Cameras:
        city = self._city
        return Cameras(
            city.camera_to_worlds(), city.focal, city.focal, city.width / 2, city.height / 2, city.width, city.height
        )


def _without_locality(plan: Plan) -> Plan:
    config = replace(plan.schedule.config, order="random")
    return replace(plan, schedule=replace(plan.schedule, config=config, ownership=None))


def _build_model(site: Site, replicated: bool) -> OdinSplatfactoModel:
    """A model with this rank's part of the city, and its optimizers."""
    world, city = site.world, site.city
    config = OdinSplatfactoModelConfig(
        sh_degree=3, sh_degree_interval=1, num_downscales=0, background_color="black", stop_split_at=0
    )
    model: OdinSplatfactoModel = config.setup(
        scene_box=SceneBox(aabb=torch.tensor([[-1.0] * 3, [1.0] * 3])),
        num_train_data=city.num_views,
        metadata={},
        seed_points=(torch.eye(4, 3), torch.zeros(4, 3)),  # replaced below
    ).to(world.device)
    rows = city.primitives(world.device)
    everything = Shard(torch.arange(city.num_primitives, device=world.device), rows)
    placement = Replicas(world) if replicated else Placement(world, site.points)
    install(model, placement.shard(everything))
    model.set_ids(model.ids, city.num_primitives, city.num_primitives)
    model.optimizers = {
        name: LazyAdam([param], lr=LEARNING_RATES[name], betas=BETAS, eps=EPS)
        for name, param in model.gauss_params.items()
    }
    return model
