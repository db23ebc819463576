"""The copy of the scene that rank 0 shows while the primitives are spread over all ranks (design §5)."""

from __future__ import annotations

import torch
from torch import Tensor

from odin_nerfstudio.comm.placement import Placement, Shard
from odin_nerfstudio.comm.replicas import Replicas
from odin_nerfstudio.splat.densify.rowwise import sigmoid
from odin_nerfstudio.splat.model import OdinSplatfactoModel
from odin_nerfstudio.splat.raster import Rows


@torch.no_grad()
def gather_display(model: OdinSplatfactoModel, placement: Placement | Replicas, limit: int) -> Rows | None:
    """Collects what is worth showing. Rows are taken as they are: a look must not change what training computes.

    Args:
        model: the rows of this rank.
        placement: how they are spread; all ranks call this together.
        limit: the most primitives of all ranks; every rank gives the same share of its own.

    Returns:
        On rank 0, copies on the model's device in ascending order of id; None on the others.
    """
    shard = Shard(model.ids, dict(model.gauss_params.items()))
    if model.total > limit:
        chosen = _coverage(model).topk(len(shard) * limit // model.total).indices
        shard = shard.select(chosen.sort().values)
    merged = placement.merge(shard)
    if merged is None:
        return None
    return Rows(merged.ids.to(model.device), **{name: row.to(model.device) for name, row in merged.rows.items()})


def _coverage(model: OdinSplatfactoModel) -> Tensor:
    """(N,) opacity × the area of the two longest axes: what a primitive covers where it is seen broadside."""
    longest = model.scales.sort(dim=1).values[:, 1:]
    return sigmoid(model.opacities.flatten()) * torch.exp(longest.sum(dim=1))
