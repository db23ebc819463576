"""Ownership: every primitive is somewhere, exactly once, with all that belongs to it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from ranks import run_ranks

from odin_nerfstudio.comm.placement import TOLERANCE, Placement, Shard
from odin_nerfstudio.comm.world import World


def scene(count: int, spread: float = 1.0) -> Shard:
    """Rows that tell their id in every tensor, ids with gaps, in one half of a cube of side 2·``spread``."""
    generator = torch.Generator().manual_seed(count)
    ids = (3 * torch.arange(count) + 1) * 2**33
    number = torch.arange(count, dtype=torch.float32)
    means = spread * (2 * torch.rand(count, 3, generator=generator) - 1)
    rows = {
        "means": means,
        "means.exp_avg": number[:, None].expand(count, 3) + 0.25,
        "features_rest": number[:, None, None].expand(count, 15, 3) + 0.5,
        "nothing": torch.zeros(count, 0, 3),
        "row_step": number.clone(),
        "visible": number % 3 == 0,
        "count": torch.arange(count) + 2**40,
    }
    return Shard(ids, rows)


def join(shards: Sequence[Shard]) -> Shard:
    """The union in order of id."""
    ids = torch.cat([shard.ids for shard in shards])
    order = ids.argsort()
    return Shard(
        ids[order], {name: torch.cat([shard.rows[name] for shard in shards])[order] for name in shards[0].rows}
    )


def assert_same(one: Shard | None, other: Shard) -> None:
    assert one is not None
    assert torch.equal(one.ids, other.ids)
    assert list(one.rows) == list(other.rows)
    for name, row in one.rows.items():
        assert row.dtype == other.rows[name].dtype and torch.equal(row, other.rows[name]), name


def assert_ascending(shards: Sequence[Shard]) -> None:
    assert all(bool((shard.ids[1:] > shard.ids[:-1]).all()) for shard in shards)


def shard_and_merge(world: World, count: int) -> tuple[Shard, Shard | None]:
    everything = scene(count)
    placement = Placement(world, everything.rows["means"])
    shard = placement.shard(everything)
    assert (placement.owner(shard.rows["means"]) == world.rank).all()
    assert placement.rebalance(shard) is shard
    return shard, placement.merge(shard)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_row_has_one_owner_and_merges_back(size: int) -> None:
    shards, merged = zip(*run_ranks(size, shard_and_merge, 1001), strict=True)
    assert_ascending(shards)
    assert max(map(len, shards)) - min(map(len, shards)) <= 1
    assert_same(join(shards), scene(1001))
    assert_same(merged[0], scene(1001))
    assert merged[1:] == (None,) * (size - 1)


def scatter_and_merge(world: World, count: int) -> tuple[Shard, Shard | None]:
    placement = Placement(world, torch.zeros(0, 3))
    shard = placement.scatter(scene(count) if world.rank == 0 else None)
    assert torch.equal(placement.owner(shard.rows["means"]), torch.full((len(shard),), world.rank))
    return shard, placement.merge(shard)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [2, 1001])
def test_what_is_merged_scatters_over_any_number_of_ranks(size: int, count: int) -> None:
    shards, merged = zip(*run_ranks(size, scatter_and_merge, count), strict=True)
    assert_ascending(shards)
    assert max(map(len, shards)) - min(map(len, shards)) <= 1
    assert_same(join(shards), scene(count))
    assert_same(merged[0], scene(count))


def grow_on_one_side(world: World, count: int) -> tuple[Shard, Shard, Shard | None, str]:
    everything = scene(count)
    # Space is split by points whose median lies far to one side of the scene's.
    placement = Placement(world, everything.rows["means"] * 0.05 + 0.9)
    before = placement.shard(everything)
    after = placement.rebalance(before)
    assert (placement.owner(after.rows["means"]) == world.rank).all()
    assert not after.rows["means"].requires_grad
    assert placement.rebalance(after) is after
    return before, after, placement.merge(after), str(placement.partition)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_unequal_shards_are_balanced_with_all_their_rows(size: int) -> None:
    before, after, merged, partitions = zip(*run_ranks(size, grow_on_one_side, 1001), strict=True)
    if size > 1:
        assert max(map(len, before)) > TOLERANCE * 1001 / size
    assert max(map(len, after)) <= TOLERANCE * 1001 / size
    assert_ascending(after)
    assert_same(join(after), scene(1001))
    assert_same(merged[0], scene(1001))
    assert len(set(partitions)) == 1


def pile_up(world: World) -> None:
    everything = scene(10, spread=0.0)
    placement = Placement(world, torch.rand(9, 3, generator=torch.Generator().manual_seed(0)) - 0.5)
    shard = placement.shard(everything)
    assert placement.rebalance(shard) is shard


def test_what_cannot_be_balanced_stays() -> None:
    run_ranks(3, pile_up)


def test_parameters_give_plain_rows() -> None:
    placement = Placement(World.current(), torch.zeros(0, 3))
    shard = Shard(torch.arange(4), {"means": torch.nn.Parameter(torch.rand(4, 3))})
    for rows in (placement.shard(shard), placement.merge(shard), placement.scatter(shard)):
        assert rows is not None and not rows.rows["means"].requires_grad
