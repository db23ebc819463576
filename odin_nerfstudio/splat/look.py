"""Splats of views outside training units, such as those of an evaluation, in both placements."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from odin_nerfstudio.shadow.optimizer import catch_up_rows
from odin_nerfstudio.splat.arrival import merge, pack
from odin_nerfstudio.splat.raster import PinholeCamera, Rows, Splats
from odin_nerfstudio.splat.unit import UnitExchange, read_rows


class ShardedLook(UnitExchange):
    """Every rank projects its shard for all views."""

    @torch.no_grad()
    def look(self, cameras: Sequence[PinholeCamera], ranks: Sequence[int]) -> list[Splats]:
        """Projects this shard for all views, and merges what arrives for this rank's."""
        step, model = self._model.step, self._model
        rows = model.scope(cameras, step)
        catch_up_rows(model.optimizers, rows)
        splats = self._project(read_rows(model, rows), cameras, step)
        by_rank = [[view for view, r in enumerate(ranks) if r == rank] for rank in range(self._world.size)]
        blocks = [pack(splats, views, rows.device) for views in by_rank]
        arrived = torch.cat(self._exchange.wait(self._exchange.all_to_all(blocks, "evaluation", step)))
        views = merge(arrived, len(ranks))[0]
        return [views[view] for view in by_rank[self._world.rank]]

    def _project(self, values: Rows, cameras: Sequence[PinholeCamera], step: int) -> dict[int, Splats]:
        settings, rasterizer = self._model.raster_settings(step), self._model.rasterizer
        return {view: rasterizer.project(values, camera, settings) for view, camera in enumerate(cameras)}


class ReplicatedLook(UnitExchange):
    """Every rank projects its views from its own rows."""

    @torch.no_grad()
    def look(self, cameras: Sequence[PinholeCamera], ranks: Sequence[int]) -> list[Splats]:
        """Splats of this rank's views; every rank brings the rows of all views up to date, to stay the same."""
        step, model = self._model.step, self._model
        catch_up_rows(model.optimizers, model.scope(cameras, step))
        mine = [camera for camera, rank in zip(cameras, ranks, strict=True) if rank == self._world.rank]
        values = read_rows(model, model.scope(mine, step))
        return [model.rasterizer.project(values, camera, model.raster_settings(step)) for camera in mine]
