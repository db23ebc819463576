"""Scopes of units where a size is known as soon as it is asked for: on CPUs, and on GPUs without our kernels."""

from __future__ import annotations

from typing import ClassVar

from odin_nerfstudio.comm.exchange import Signal
from odin_nerfstudio.shadow.bitmap import Bitmap
from odin_nerfstudio.shadow.policy import Quality
from odin_nerfstudio.splat.raster import PinholeCamera
from odin_nerfstudio.splat.unit import FEW, Unit, UnitExchange


class HostPlanning(UnitExchange):
    """Plans a unit just before it begins."""

    unit_type: ClassVar[type[Unit]]
    """A unit with what this exchange has to remember of it."""

    def plan(
        self,
        step: int,
        ranks: list[int],
        cameras: list[PinholeCamera],
        before: Unit | None,
        policy: Quality,
        pending: int,
        signal: Signal,
    ) -> Unit:
        """Finds the rows that the views may touch, and those of them that the unit before cannot change."""
        scope = Bitmap.from_rows(self._model.scope(cameras, step), self._model.num_points)
        early = None if before is None or self._world.size == 1 else policy.ahead(scope, before.scope)
        return self.unit_type(step, ranks, cameras, scope, early=early)

    def _want(self, unit: Unit, before: Unit) -> None:
        """Finds out for which rows of the unit before this one waits."""
        assert unit.early is not None
        before.wanted = before.scope & (unit.scope - unit.early)
        if before.wanted.count() > FEW * before.scope.count():
            before.wanted = before.scope
