"""An analytic radiance field, rays that try to break it, and its rendering by double sums that tests trust."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from odin_nerfstudio.comm.world import World
from odin_nerfstudio.nerfxl.compose import Rendered, compose
from odin_nerfstudio.nerfxl.exchange import EXCHANGES, Radiance
from odin_nerfstudio.nerfxl.lattice import lattice, split
from odin_nerfstudio.nerfxl.rays import cross
from odin_nerfstudio.nerfxl.tiles import Tiles, tiles_of_rank


class Rays(NamedTuple):
    origins: Tensor
    """(R, 3)."""
    directions: Tensor
    """(R, 3) unit."""
    near: Tensor
    """(R, 1)."""
    far: Tensor
    """(R, 1)."""
    ends: Tensor
    """(R, N + 1) the lattice."""


def draw_tiles(generator: torch.Generator, count: int) -> Tiles:
    points = torch.rand(200, 3, generator=generator, dtype=torch.float64) * 2 - 1
    return Tiles.build(points * torch.rand(3, generator=generator), count)


def draw_blobs(generator: torch.Generator, tiles: int, same: bool = False) -> Tensor:
    """(K, 4, 8) centre, width, density and colour of four blobs per tile, ``same`` in all tiles or nearly so."""
    blobs = torch.rand(1, 4, 8, generator=generator, dtype=torch.float64)
    blobs[..., :3] = 1.6 * blobs[..., :3] - 0.8
    blobs[..., 3] = 0.2 + 0.4 * blobs[..., 3]
    blobs[..., 4] *= 10 ** (4 * torch.rand(1, 4, generator=generator) - 2)
    change = 0 if same else 0.1 * torch.rand(tiles, 4, 8, generator=generator, dtype=torch.float64)
    return blobs + change * torch.ones(tiles, 1, 1, dtype=torch.float64)


def radiance(blobs: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """(..., 4, 8) blobs at (..., 3) positions → (...) density, (..., 3) colour."""
    offset = (positions[..., None, :] - blobs[..., :3]) / blobs[..., 3:4]
    falloff = torch.exp(-offset.square().sum(-1) / 2)
    return (blobs[..., 4] * falloff).sum(-1), (blobs[..., 5:] * falloff[..., None]).sum(-2)


def draw_rays(generator: torch.Generator, tiles: Tiles, count: int = 24, samples: int = 40) -> Rays:
    """Rays from outside and inside, some in the planes of faces, along edges or axes, some of no length."""
    origins = 4 * torch.rand(count, 3, generator=generator, dtype=torch.float64) - 2
    origins[::3] *= 0.3
    directions = torch.nn.functional.normalize(0.5 * torch.rand(count, 3, generator=generator).double() - origins)
    faces = [(axis, v) for axis in range(3) for v in tiles.bounds[:, :, axis].flatten().tolist() if abs(v) < 1e9]
    for ray in range(0, count, 2):
        for _ in range(1 + ray % 4 // 2):
            if faces:
                axis, face = faces[int(torch.randint(len(faces), (), generator=generator))]
                origins[ray, axis] = face
                directions[ray, axis] = -0.0 if ray % 8 else 0.0
    directions[1] = torch.tensor([0.0, -1.0, -0.0])
    directions = torch.nn.functional.normalize(directions)
    near = 0.05 + 0.1 * torch.rand(count, 1, generator=generator, dtype=torch.float64)
    far = near + 5
    far[3::5] += 1000
    far[4] = near[4]
    jitter = torch.rand(count, 1, generator=generator, dtype=torch.float64)
    return Rays(origins, directions, near, far, lattice(near, far, samples, jitter=jitter, knee=3.0))


def render(
    tiles: Tiles,
    rays: Rays,
    blobs: Tensor,
    background: Tensor,
    *,
    world: World | None = None,
    exchange: str = "tile",
    centre: Tensor | float = 0.0,
    scale: float = 1.0,
) -> Rendered:
    """The field tile by tile. ``blobs`` (K, 4, 8) are those of all tiles; only the own ones are looked at.

    World positions are ``centre + scale · x`` for the x that the blobs are given in.
    """
    world = world or World.current()
    origins, directions, near, far, ends = rays
    crossings = cross(tiles, origins, directions, near, far)
    held = tiles_of_rank(world.rank, world.size, len(tiles))
    parts = []
    for tile, samples in zip(held, split(ends, origins, directions, tiles, held), strict=True):
        sigma, rgb = radiance(blobs[tile], (samples.positions(origins, directions) - centre) / scale)
        parts.append(Radiance(samples, sigma / scale, rgb))
    shared = EXCHANGES[exchange](world, parts, crossings.enter)  # type: ignore[index]
    return compose(shared.segments, crossings.order, crossings.enter, background)


def render_uncut(
    tiles: Tiles,
    rays: Rays,
    blobs: Tensor,
    background: Tensor,
    *,
    centre: Tensor | float = 0.0,
    scale: float = 1.0,
) -> Rendered:
    """The same from all samples of a ray at once: one field, whose parameters depend on where it is asked."""
    start, end = rays.ends[:, :-1], rays.ends[:, 1:]
    positions = rays.origins[:, None] + ((start + end) / 2)[..., None] * rays.directions[:, None]
    owner = torch.from_numpy(tiles.partition.owner(positions.reshape(-1, 3).numpy())).view(start.shape)
    sigma, rgb = radiance(blobs[owner], (positions - centre) / scale)
    weight = weights(sigma / scale, end - start)
    accumulation = weight.sum(1, keepdim=True)
    tile_weights = torch.stack([(weight * (owner == tile)).sum(1) for tile in range(len(tiles))], 1)
    return Rendered(
        (weight[..., None] * rgb).sum(1) + (1 - accumulation) * background,
        accumulation,
        (weight * (start + end) / 2).sum(1, keepdim=True),
        double_sum(weight, start, end)[:, None],
        tile_weights,
    )


def weights(sigma: Tensor, delta: Tensor) -> Tensor:
    """(..., N) density and lengths along rays → (..., N) weights."""
    optical = sigma * delta
    return torch.exp(-(optical.cumsum(-1) - optical)) * -torch.expm1(-optical)


def double_sum(weight: Tensor, start: Tensor, end: Tensor) -> Tensor:
    """(..., N) → (...) Σᵢⱼ wᵢwⱼ|mᵢ − mⱼ| + ⅓ Σ w²δ, mip-NeRF 360's eq. 15 as it stands."""
    middle = (start + end) / 2
    pairs = weight[..., :, None] * weight[..., None, :] * (middle[..., :, None] - middle[..., None, :]).abs()
    return pairs.sum((-1, -2)) + (weight**2 * (end - start)).sum(-1) / 3


def relative_error(value: Tensor, wanted: Tensor) -> float:
    """Largest difference over the largest value."""
    assert value.shape == wanted.shape
    largest = wanted.abs().max().item()
    return (value - wanted).abs().max().item() / (largest or 1.0)
