"""A plan: what is known about a capture and decided about its training before the first step (design §2)."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from odin_nerfstudio.plan.capture import Capture
from odin_nerfstudio.plan.conflict import mean_coupling, points_seen, predicted_conflict
from odin_nerfstudio.plan.covisibility import Visibility, measure_visibility
from odin_nerfstudio.plan.locality_graph import relative_locality_graph
from odin_nerfstudio.plan.partition import Partition
from odin_nerfstudio.plan.schedule import Schedule, ScheduleConfig

PREDICTED_GROUPS = 2_000
"""Groups that a prediction looks at, in whole epochs and at least two, so that the seams between epochs count."""


@dataclass(frozen=True)
class Plan:
    """Visibility, locality graph, partition and schedule of one capture for one number of ranks."""

    capture: Capture
    """What it was made for."""
    visibility: Visibility
    """Who sees what."""
    rlg: sp.csr_array
    """(V, V) relative locality graph."""
    partition: Partition
    """The cells of space, one per rank."""
    schedule: Schedule
    """The groups of all steps."""

    @staticmethod
    def build(capture: Capture, world_size: int, batch_per_rank: int, config: ScheduleConfig) -> Plan:
        """Makes the plan.

        Raises:
            UserError: the capture's COLMAP model cannot be read, or a group would need more views than there are.
        """
        visibility = measure_visibility(capture.image_names, capture.cameras, capture.points, capture.colmap_dir)
        rlg = relative_locality_graph(visibility.incidence)
        schedule = Schedule(rlg, config, world_size, batch_per_rank)
        seeds = visibility.positions if capture.points is None else capture.points
        partition = Partition.build(np.empty((0, 3)) if seeds is None else seeds, world_size)
        if visibility.positions is not None:
            owner = partition.owner(visibility.positions)
            schedule = replace(schedule, ownership=visibility.ownership(owner, world_size))
        return Plan(capture, visibility, rlg, partition, schedule)

    @cached_property
    def control(self) -> Schedule:
        """The same schedule in random order."""
        return replace(self.schedule, config=replace(self.schedule.config, order="random"))

    def groups(self, schedule: Schedule) -> NDArray[np.int64]:
        """(S, n) the groups of the first epochs, as many as a prediction looks at."""
        epochs = max(2, -(-PREDICTED_GROUPS * schedule.group_size // schedule.views))
        return np.stack([schedule.group_views(step) for step in range(schedule.steps(epochs).start)])

    def predicted_share(self, step: int, earlier: int) -> float:
        """Of the points that the group of a step sees, the part that the group of an earlier one sees too."""
        seen, before = self._points_of(step), self._points_of(earlier)
        return len(np.intersect1d(seen, before, assume_unique=True)) / len(seen) if len(seen) else 0.0

    @cached_property
    def _points_of(self) -> Callable[[int], NDArray[np.integer]]:
        """Step → points that its group sees."""
        return lru_cache(maxsize=128)(
            lambda step: points_seen(self.schedule.group(step).views, self.visibility.incidence)
        )

    @cached_property
    def figures(self) -> dict[str, Any]:
        """The numbers of the plan, ready for JSON."""
        config, weights = self.schedule.config, self.rlg.data
        ours, random = self.groups(self.schedule), self.groups(self.control)
        views, edges = self.schedule.views, self.rlg.nnz // 2
        percentiles = np.percentile(weights, [5, 25, 50, 75, 95]) if edges else np.zeros(5)
        return {
            "capture": self.capture.name,
            "views": views,
            "views_observing_nothing": int((np.diff(self.visibility.incidence.indptr) == 0).sum()),
            "visibility": self.visibility.source,
            "visibility_reason": self.visibility.reason,
            "points": self.visibility.incidence.shape[1],
            "edges": edges,
            "edge_density": edges / max(views * (views - 1) / 2, 1),
            "weight_percentiles": dict(zip(("5", "25", "50", "75", "95"), percentiles.tolist(), strict=True)),
            "order": config.order,
            "window": config.window,
            "seed": config.seed,
            "world_size": self.schedule.world_size,
            "batch_per_rank": self.schedule.batch_per_rank,
            "steps_per_epoch": views / self.schedule.group_size,
            "predicted_conflict": self._conflict(ours),
            "predicted_conflict_random": self._conflict(random),
            "mean_coupling": self._coupling(ours),
            "mean_coupling_random": self._coupling(random),
            "fingerprint": self.schedule.fingerprint(),
        }

    def to_json(self) -> str:
        """The figures, the cells, and the groups of the first epoch, as a JSON document.

        Infinite bounds, which JSON cannot hold, are null.
        """
        bounds = self.partition.bounds.astype(object)
        bounds[np.isinf(self.partition.bounds)] = None
        groups = [
            {"step": group.step, "views": group.views.tolist(), "ranks": group.ranks.tolist()}
            for group in self.schedule.epoch(0)
        ]
        content = {"images": self.capture.image_names, "cells": bounds.tolist(), "groups": groups}
        return json.dumps({"figures": self.figures, **content}, allow_nan=False)

    def _conflict(self, groups: NDArray[np.int64]) -> float:
        return float(predicted_conflict(groups, self.visibility.incidence, self.schedule.config.window).mean())

    def _coupling(self, groups: NDArray[np.int64]) -> float:
        lags = range(1, min(self.schedule.config.window, len(groups) - 1) + 1)
        return float(np.mean([mean_coupling(groups, self.rlg, lag) for lag in lags]))
