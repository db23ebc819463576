"""What rank 0 shows while the primitives are spread over all ranks: a copy of the scene and its history (design §5)."""

from __future__ import annotations

import torch
from torch import Tensor

from odin_nerfstudio.comm.placement import Placement, Shard
from odin_nerfstudio.comm.replicas import Replicas
from odin_nerfstudio.splat.densify.rowwise import sigmoid
from odin_nerfstudio.splat.model import OdinSplatfactoModel
from odin_nerfstudio.splat.raster import Rows
from odin_nerfstudio.splat.runner import UnitRunner
from odin_nerfstudio.viewer.heatmap import History


def own_history(model: OdinSplatfactoModel, runner: UnitRunner, rank: int, step: int) -> History:
    """What was recorded of this rank's primitives by the end of unit ``step``."""
    versions = runner.versions.clone()  # publications change it in place
    return History(model.ids, torch.full_like(versions, rank), runner.conflict, versions, step)


@torch.no_grad()
def gather_display(
    model: OdinSplatfactoModel, placement: Placement | Replicas, history: History, limit: int
) -> tuple[Rows, History] | None:
    """Collects what is worth showing. Rows are taken as they are: a look must not change what training computes.

    Args:
        model: the rows of this rank.
        placement: how they are spread; all ranks call this together.
        history: what was recorded of them.
        limit: the most primitives of all ranks; every rank gives the same share of its own.

    Returns:
        On rank 0, copies on the model's device in ascending order of id; None on the others.
    """
    recorded = history.to_rows()
    shard = Shard(model.ids, dict(model.gauss_params.items()) | recorded)
    if model.total > limit:
        chosen = _coverage(model).topk(len(shard) * limit // model.total).indices
        shard = shard.select(chosen.sort().values)
    merged = placement.merge(shard)
    if merged is None:
        return None
    ids, rows = merged.ids.to(model.device), {name: row.to(model.device) for name, row in merged.rows.items()}
    learned = {name: row for name, row in rows.items() if name not in recorded}
    return Rows(ids, **learned), History.from_rows(rows, ids, history.step)


def _coverage(model: OdinSplatfactoModel) -> Tensor:
    """(N,) opacity × the area of the two longest axes: what a primitive covers where it is seen broadside."""
    longest = model.scales.sort(dim=1).values[:, 1:]
    return sigmoid(model.opacities.flatten()) * torch.exp(longest.sum(dim=1))
