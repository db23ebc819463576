"""A field cut into tiles against the field in one piece: values and gradients."""

from __future__ import annotations

import torch
from blobs import Rays, draw_blobs, draw_rays, draw_tiles, relative_error, render, render_uncut
from hypothesis import given, settings
from hypothesis import strategies as st

from odin_nerfstudio.nerfxl.compose import Rendered, compose

BACKGROUND = torch.tensor([0.3, 0.6, 0.9], dtype=torch.float64)


def gradient(rendered: Rendered, blobs: torch.Tensor, seed: int) -> torch.Tensor:
    """Of a loss in which every output of every ray has a weight of its own."""
    generator = torch.Generator().manual_seed(seed)
    outputs = torch.cat([*rendered], dim=1)
    loss = (torch.rand(outputs.shape, generator=generator, dtype=outputs.dtype) * outputs).sum()
    return torch.autograd.grad(loss, blobs)[0]


@given(st.integers(0, 2**32 - 1), st.integers(1, 8), st.sampled_from(["tile", "sample"]))
@settings(deadline=None, max_examples=40)
def test_cut_field_equals_the_field_in_one_piece(seed: int, count: int, exchange: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    tiles = draw_tiles(generator, count)
    rays, blobs = draw_rays(generator, tiles), draw_blobs(generator, count).requires_grad_()
    cut = render(tiles, rays, blobs, BACKGROUND, exchange=exchange)
    whole = render_uncut(tiles, rays, blobs, BACKGROUND)
    for name in Rendered._fields:
        assert relative_error(getattr(cut, name), getattr(whole, name)) < 1e-12, name
    mine, wanted = gradient(cut, blobs, seed), gradient(whole, blobs, seed)
    # Of a tile that hardly counts, the sums of all samples leave only what rounding leaves of larger numbers.
    largest = torch.maximum(wanted.abs().amax((1, 2)), 1e-3 * wanted.abs().max())
    assert ((mine - wanted).abs().amax((1, 2)) < 1e-12 * largest).all()


@given(st.integers(0, 2**32 - 1), st.integers(1, 8), st.sampled_from(["there", "from afar"]))
@settings(deadline=None, max_examples=25)
def test_single_precision_at_large_coordinates(seed: int, count: int, where: str) -> None:
    """A scene 200 long at coordinates of 10⁴, seen from within or from 10⁴ away."""
    generator = torch.Generator().manual_seed(seed)
    centre, scale = torch.tensor([1e4, -1.2e4, 8e3], dtype=torch.float64), 100.0
    tiles = draw_tiles(generator, count)
    rays, blobs = draw_rays(generator, tiles), draw_blobs(generator, count, same=True)
    tiles = type(tiles).build(centre + scale * (torch.rand(200, 3, generator=generator) * 2 - 1), count)
    shift = 0.0 if where == "there" else 1e4
    origins = centre + scale * rays.origins - shift * rays.directions
    lengths = [shift + scale * t.clamp(max=10) for t in (rays.near, rays.far, rays.ends)]
    single = Rays(*(part.float() for part in (origins, rays.directions, *lengths)))
    double = Rays(*(part.double() for part in single))
    mine = render(tiles, single, blobs.float(), BACKGROUND.float(), centre=centre.float(), scale=scale)
    wanted = render_uncut(tiles, double, blobs, BACKGROUND, centre=centre, scale=scale)
    for name in ("rgb", "accumulation", "depth", "distortion"):
        assert relative_error(getattr(mine, name).double(), getattr(wanted, name)) < 1e-4, name


def test_absent_tiles_and_opaque_ones() -> None:
    segments = torch.zeros(1, 3, 6, dtype=torch.float64, requires_grad=True)
    order, enter = torch.tensor([[2, 0, 1]]), torch.tensor([[1.0, 2.0, 0.0]], dtype=torch.float64)
    empty = compose(segments, order, enter, BACKGROUND)
    assert torch.equal(empty.rgb[0], BACKGROUND)
    assert all(not part.any() for part in empty[1:])

    wall = segments.detach().clone()
    wall[0, 0] = torch.tensor([1e5, 0.125, 0.25, 0.5, 0.5, 0.0])
    wall[0, 1] = torch.tensor([2.0, 1.0, 1.0, 1.0, 0.1, 0.1])
    wall.requires_grad_()
    hidden = compose(wall, order, enter, BACKGROUND)
    assert hidden.rgb[0].tolist() == [0.125, 0.25, 0.5]
    assert hidden.depth.item() == 1.5 and hidden.accumulation.item() == 1.0
    assert hidden.tile_weights.tolist() == [[1.0, 0.0, 0.0]]
    (slope,) = torch.autograd.grad(torch.cat([*hidden], dim=1).sum(), wall)
    assert slope.isfinite().all() and not slope[0, 1].any()
