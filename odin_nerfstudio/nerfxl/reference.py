"""An analytic radiance field, rays that try to break it, and its rendering by double sums: what tests and
``odin-bench nerfxl`` hold the tiles against. It is slow on purpose: each formula as it stands.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from odin_nerfstudio.comm.world import World
from odin_nerfstudio.nerfxl.compose import Rendered, compose
from odin_nerfstudio.nerfxl.exchange import EXCHANGES, Radiance
from odin_nerfstudio.nerfxl.lattice import lattice, split
from odin_nerfstudio.nerfxl.rays import cross
from odin_nerfstudio.nerfxl.tiles import Tiles, tiles_of_rank

Exchange = Literal["tile", "sample"]


class Rays(NamedTuple):
    """R rays with N samples each."""

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
    """``count`` tiles from a KD-tree on random points within [−1, 1]³, flat in one draw and cubic in another."""
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
    """``count`` ≥ 5 float64 rays with ``samples`` intervals each, from outside and inside, some in the planes of faces,
    along edges or axes, one of no length, which misses everything.
    """
    origins = 4 * torch.rand(count, 3, generator=generator, dtype=torch.float64) - 2
    origins[::3] *= 0.3
    directions = functional.normalize(0.5 * torch.rand(count, 3, generator=generator).double() - origins)
    faces = [(axis, v) for axis in range(3) for v in tiles.bounds[:, :, axis].flatten().tolist() if abs(v) < 1e9]
    for ray in range(0, count, 2):
        for _ in range(1 + ray % 4 // 2):
            if faces:
                axis, face = faces[int(torch.randint(len(faces), (), generator=generator))]
                origins[ray, axis] = face
                directions[ray, axis] = -0.0 if ray % 8 else 0.0
    directions[1] = torch.tensor([0.0, -1.0, -0.0])
    directions = functional.normalize(directions)
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
    exchange: Exchange = "tile",
    centre: Tensor | float = 0.0,
    scale: float = 1.0,
) -> Rendered:
    """The field tile by tile, in the rays' precision.

    Args:
        tiles: K tiles.
        rays: R rays.
        blobs: (K, 4, 8) of all tiles; only the own ones are looked at.
        background: (3,) colour.
        world: the ranks, which all call this together; unset, those of this process.
        exchange: what they send each other.
        centre: (3,) world position where the blobs have their origin.
        scale: world length of a unit of the blobs.
    """
    world = world or World.current()
    origins, directions, near, far, ends = rays
    crossings = cross(tiles, origins, directions, near, far)
    held = tiles_of_rank(world.rank, world.size, len(tiles))
    parts = []
    for tile, samples in zip(held, split(ends, origins, directions, tiles, held), strict=True):
        sigma, rgb = radiance(blobs[tile], (samples.positions(origins, directions) - centre) / scale)
        parts.append(Radiance(samples, sigma / scale, rgb))
    shared = EXCHANGES[exchange](world, parts, crossings.enter)
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
    """As :func:`render`, from all samples of a ray at once: one field, whose parameters depend on where it is asked."""
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
    """Largest difference of two tensors of one shape, over the largest wanted value."""
    largest = wanted.abs().max().item()
    return (value - wanted).abs().max().item() / (largest or 1.0)


def cut_errors(seed: int, count: int, exchange: Exchange) -> dict[str, float]:
    """How far a random field, cut into ``count`` tiles, is from the same field in one piece, in float64.

    Returns:
        The relative error of every output of :class:`~.compose.Rendered`, and of the ``gradient`` of a loss in which
        every output of every ray has a weight of its own: the worst tile's, relative to its largest entry. Of a tile
        that hardly counts, the double sums leave only the rounding of larger numbers; so no tile's largest entry is
        taken as less than a thousandth of the largest of all.
    """
    generator = torch.Generator().manual_seed(seed)
    tiles = draw_tiles(generator, count)
    rays, blobs = draw_rays(generator, tiles), draw_blobs(generator, count).requires_grad_()
    background = torch.tensor([0.3, 0.6, 0.9], dtype=torch.float64)
    cut = render(tiles, rays, blobs, background, exchange=exchange)
    whole = render_uncut(tiles, rays, blobs, background)
    errors = {name: relative_error(getattr(cut, name), getattr(whole, name)) for name in Rendered._fields}
    share = torch.rand(torch.cat(whole, dim=1).shape, generator=generator, dtype=torch.float64)
    mine, wanted = (torch.autograd.grad((share * torch.cat(seen, dim=1)).sum(), blobs)[0] for seen in (cut, whole))
    largest = torch.maximum(wanted.abs().amax((1, 2)), 1e-3 * wanted.abs().max())
    return {**errors, "gradient": ((mine - wanted).abs().amax((1, 2)) / largest).max().item()}


def single_errors(seed: int, count: int, away: float) -> dict[str, float]:
    """How far float32 is from the double sums in a scene 200 long at coordinates of 10⁴.

    Args:
        seed: of the scene.
        count: of tiles.
        away: distance added between the rays' origins and the scene, 0 to see it from within.

    Returns:
        The relative errors of colour, accumulation, depth and distortion.
    """
    generator = torch.Generator().manual_seed(seed)
    centre, scale = torch.tensor([1e4, -1.2e4, 8e3], dtype=torch.float64), 100.0
    background = torch.tensor([0.3, 0.6, 0.9], dtype=torch.float64)
    rays = draw_rays(generator, draw_tiles(generator, count))
    blobs = draw_blobs(generator, count, same=True)
    tiles = Tiles.build(centre + scale * (torch.rand(200, 3, generator=generator) * 2 - 1), count)
    origins = centre + scale * rays.origins - away * rays.directions
    lengths = [away + scale * t.clamp(max=10) for t in (rays.near, rays.far, rays.ends)]
    single = Rays(*(part.float() for part in (origins, rays.directions, *lengths)))
    double = Rays(*(part.double() for part in single))
    mine = render(tiles, single, blobs.float(), background.float(), centre=centre.float(), scale=scale)
    wanted = render_uncut(tiles, double, blobs, background, centre=centre, scale=scale)
    names = ("rgb", "accumulation", "depth", "distortion")
    return {name: relative_error(getattr(mine, name).double(), getattr(wanted, name)) for name in names}
