"""What others offer: gsplat's own distributed rendering, data parallelism; and the least that a step can take.

gsplat is imported at first use, so that a machine without CUDA never tries to build its kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from odin_nerfstudio.cli.bench.step.system import BETAS, EPS, LEARNING_RATES, Site, System

FLOOR_GROUPS = 8
"""Groups of views that the floor keeps the rows of; it goes round among them."""


class Renderer:
    """Renders views of the city with gsplat 1.4.0 in packed mode."""

    def __init__(self, site: Site) -> None:
        city, device = site.city, site.world.device
        self._viewmats = city.viewmats().to(device)
        self._Ks = city.K().to(device).repeat(len(self._viewmats), 1, 1)
        self._city = city

    def __call__(
        self, params: Mapping[str, Tensor], views: list[int], distributed: bool = False
    ) -> tuple[Tensor, dict[str, Any]]:
        """(B, height, width, 3) images of B views, and what gsplat tells of them."""
        from gsplat.rendering import rasterization

        images, _, info = rasterization(
            params["means"],
            params["quats"],
            torch.exp(params["scales"]),
            torch.sigmoid(params["opacities"]),
            params["colors"],
            torch.stack([self._viewmats[view] for view in views]),
            self._Ks[: len(views)],
            self._city.width,
            self._city.height,
            sh_degree=3,
            packed=True,
            distributed=distributed,
        )
        return images, info


class Peer(System):
    """gsplat with torch's fused Adam: every rank has a share of the primitives, or all of them.

    Args:
        site: what it trains on.
        sharded: a share, with gsplat's ``distributed=True``; otherwise all, and an all-reduce of every gradient.
    """

    def __init__(self, site: Site, sharded: bool) -> None:
        super().__init__(site)
        count, rank, size = site.city.num_primitives, site.world.rank, site.world.size
        rows = slice(rank * count // size, (rank + 1) * count // size) if sharded else slice(None)
        self._render = Renderer(site)
        self._sharded = sharded
        self._params = _leaves(site.city.primitives(site.world.device), rows)
        self._optimizer = _adam(self._params)

    def step(self, step: int, last: bool) -> None:
        site = self.site
        views, several = self.views[step], site.world.size > 1
        images, info = self._render(self._params, views, distributed=self._sharded and several)
        site.loss(images, views).backward()
        if several and not self._sharded:
            for param in self._params.values():
                assert param.grad is not None
                dist.all_reduce(param.grad)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if self.watching:  # of a share of the primitives gsplat tells in how many views of all ranks they are seen
            self.visible.append(int((info["radii"] > 0).sum()) // len(views))


class Floor(System):
    """Renders only rows that its views see, selected beforehand, and steps only these: no communication.

    It trains a copy of the rows of a few groups of views, each for itself.
    """

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self._render = Renderer(site)
        self._groups: list[tuple[list[int], dict[str, Parameter], torch.optim.Adam]] = []

    def prepare(self, steps: range) -> None:
        super().prepare(steps)
        self._groups.clear()
        everything = _leaves(self.site.city.primitives(self.site.world.device), slice(None))
        for step in steps[:FLOOR_GROUPS]:
            views = self.views[step]
            with torch.no_grad():
                seen = torch.unique(self._render(everything, views)[1]["gaussian_ids"])
            params = _leaves(everything, seen)
            self._groups.append((views, params, _adam(params)))
        for number in range(len(self._groups)):  # moments are made by the first step
            self.step(number, last=False)

    def step(self, step: int, last: bool) -> None:
        views, params, optimizer = self._groups[step % len(self._groups)]
        images, info = self._render(params, views)
        self.site.loss(images, views).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if self.watching:
            self.visible.append(int((info["radii"] > 0).sum()) // len(views))


def _leaves(values: Mapping[str, Tensor], rows: slice | Tensor) -> dict[str, Parameter]:
    """Copies of some rows as gsplat takes them: opacities (R,), and all SH coefficients together as ``colors``."""
    chosen = {name: value.detach()[rows] for name, value in values.items()}
    if "colors" not in chosen:
        dc, rest = chosen.pop("features_dc"), chosen.pop("features_rest")
        chosen["colors"] = torch.cat([dc[:, None], rest], dim=1)
        chosen["opacities"] = chosen["opacities"][:, 0]
    return {name: Parameter(value.clone()) for name, value in chosen.items()}


def _adam(params: Mapping[str, Parameter]) -> torch.optim.Adam:
    rates = LEARNING_RATES | {"colors": LEARNING_RATES["features_rest"]}
    groups = [{"params": [param], "lr": rates[name]} for name, param in params.items()]
    return torch.optim.Adam(groups, betas=BETAS, eps=EPS, fused=True)
