"""What ranks tell each other of a batch of rays, in the forward pass only (NeRF-XL §3.2, §3.4; design §4).

Values of other ranks arrive without a graph and own ones keep theirs. As every rank then computes the same loss, the
gradients of its own tiles are complete, and no tensor travels in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from odin_nerfstudio.comm.world import World
from odin_nerfstudio.nerfxl.lattice import Samples
from odin_nerfstudio.nerfxl.segments import WIDTH, integrate
from odin_nerfstudio.nerfxl.tiles import tiles_of_rank


class Radiance(NamedTuple):
    """What a tile's field says of its samples."""

    samples: Samples
    """S packed samples."""
    sigma: Tensor
    """(S,) density."""
    rgb: Tensor
    """(S, 3) colour."""


class Shared(NamedTuple):
    """All tiles' segments, as each rank knows them after an exchange."""

    segments: Tensor
    """(R, K, 6) as :func:`~.compose.compose` takes them."""
    sent: int
    """Bytes from this rank to all others together."""
    received: int
    """Bytes from all others to this rank."""


def share_tiles(
    world: World, held: Sequence[Radiance], enter: Tensor, waiting: Callable[[], AbstractContextManager] = nullcontext
) -> Shared:
    """Integrates the own tiles and gathers the results: 6 numbers per ray and tile, however many samples.

    Called by all ranks together, with the same rays.

    Args:
        world: the ranks.
        held: the tiles of this rank, those of :func:`~.tiles.tiles_of_rank` in that order; they may have no samples.
        enter: (R, K) where the rays enter the tiles, the same on all ranks.
        waiting: gives a context for the part in which this rank waits for the others.
    """
    rays, count = enter.shape
    tiles = _own(world, held, count)
    parts = [integrate(*radiance, enter[:, tile]) for tile, radiance in zip(tiles, held, strict=True)]
    own = torch.stack(parts) if parts else _nothing(enter, rays, WIDTH)
    with waiting():
        gathered = world.all_gather_rows(own)
    all_rows = _splice(gathered, own, tiles.start)
    return _shared(world, all_rows, own.nbytes, all_rows.nbytes)


def share_samples(
    world: World, held: Sequence[Radiance], enter: Tensor, waiting: Callable[[], AbstractContextManager] = nullcontext
) -> Shared:
    """Gathers every sample and integrates all tiles on each rank: NeRF-XL's baseline, for comparison of cost.

    Arguments, result and gradients as with :func:`share_tiles`; the bytes grow with the samples.
    """
    rays, count = enter.shape
    tiles = _own(world, held, count)
    # Tiles lie one after the other in the ranks' order, so "tile · R + ray" ascends over all samples together.
    indices, rows = [enter.new_zeros(0, dtype=torch.int32)], [_nothing(enter, 6)]
    for tile, ((ray, *ends), sigma, rgb) in zip(tiles, held, strict=True):
        indices.append((ray + tile * rays).int())
        rows.append(torch.cat([torch.stack([*ends, sigma], 1), rgb], 1))
    index, own = torch.cat(indices), torch.cat(rows)
    with waiting():
        all_indices, gathered = world.all_gather_rows(index), world.all_gather_rows(own)
    all_rows = _splice(gathered, own, int((all_indices < tiles.start * rays).sum()))
    t_start, t_end, sigma = all_rows[:, :3].unbind(1)
    samples = Samples(all_indices.long(), t_start.detach(), t_end.detach())
    segments = integrate(samples, sigma, all_rows[:, 3:], enter.T.reshape(-1))
    mine, total = own.nbytes + index.nbytes, all_rows.nbytes + all_indices.nbytes
    return _shared(world, segments.view(count, rays, WIDTH), mine, total)


EXCHANGES: dict[Literal["tile", "sample"], Callable[..., Shared]] = {
    "tile": share_tiles,
    "sample": share_samples,
}
"""By the name that the flag ``exchange`` takes."""


def _own(world: World, held: Sequence[Radiance], count: int) -> range:
    tiles = tiles_of_rank(world.rank, world.size, count)
    if len(held) != len(tiles):
        raise ValueError(f"rank {world.rank} holds {len(tiles)} of {count} tiles, but was given {len(held)}")
    return tiles


def _nothing(like: Tensor, *shape: int) -> Tensor:
    """No rows of ``shape``, from a rank without tiles. It has a graph, so that this rank too can go backward."""
    return like.new_zeros(0, *shape, requires_grad=torch.is_grad_enabled())


def _splice(gathered: Tensor, own: Tensor, first: int) -> Tensor:
    """``gathered`` with ``own``, which keeps its graph, in the place of its copy from row ``first`` on."""
    return torch.cat([gathered[:first].detach(), own, gathered[first + len(own) :].detach()])


def _shared(world: World, segments: Tensor, own_bytes: int, all_bytes: int) -> Shared:
    """Tile-major (K, R, 6) segments with the bytes that moved."""
    return Shared(segments.transpose(0, 1), own_bytes * (world.size - 1), all_bytes - own_bytes)
