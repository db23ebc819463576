from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from odin_nerfstudio.nerfxl.lattice import Samples
from odin_nerfstudio.nerfxl.reference import double_sum, relative_error, weights
from odin_nerfstudio.nerfxl.segments import integrate


def draw(seed: int, rays: int) -> tuple[Samples, torch.Tensor, torch.Tensor]:
    """Samples with gaps, a random number on each ray, of densities from almost nothing to opaque."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, 30, (rays,), generator=generator) * torch.randint(0, 2, (rays,), generator=generator)
    ray = torch.arange(rays).repeat_interleave(counts)
    t = torch.rand(rays, 60, generator=generator, dtype=torch.float64).cumsum(1)
    ends = torch.cat([t[i, : 2 * n].view(-1, 2) for i, n in enumerate(counts.tolist())])
    sigma = 10 ** (8 * torch.rand(len(ray), generator=generator, dtype=torch.float64) - 6)
    return Samples(ray, *ends.unbind(1)), sigma, torch.rand(len(ray), 3, generator=generator, dtype=torch.float64)


@given(st.integers(0, 2**32 - 1), st.integers(1, 20))
@settings(deadline=None, max_examples=40)
def test_every_ray_equals_its_double_sums(seed: int, rays: int) -> None:
    samples, sigma, rgb = draw(seed, rays)
    reference = torch.linspace(-3, 3, rays, dtype=torch.float64)
    segments = integrate(samples, sigma, rgb, reference)
    assert segments.shape == (rays, 6)
    for ray in range(rays):
        own = samples.ray_index == ray
        start, end = samples.t_start[own], samples.t_end[own]
        weight = weights(sigma[own], end - start)
        offset = (start + end) / 2 - reference[ray]
        wanted = torch.cat(
            [
                (sigma[own] * (end - start)).sum()[None],
                weight @ rgb[own],
                (weight @ offset)[None],
                double_sum(weight, start, end)[None],
            ]
        )
        torch.testing.assert_close(segments[ray], wanted, rtol=1e-12, atol=1e-14)


def test_gradients() -> None:
    samples, sigma, rgb = draw(1, 4)
    sigma = sigma.clamp(0.01, 3).requires_grad_()
    reference = torch.zeros(4, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda s, c: integrate(samples, s, c, reference), (sigma, rgb.requires_grad_()))


def test_a_ray_does_not_feel_the_rounding_of_others() -> None:
    """Float32: ten thousand dense rays come first in the packed array; distances are 10⁴ and opacity is thin."""
    rays, each = 10_001, 20
    ray = torch.arange(rays).repeat_interleave(each)
    start = (1e4 + torch.arange(each) / 4).repeat(rays)
    sigma = torch.full((len(ray),), 1e3)
    sigma[-each:] = torch.linspace(1e-5, 2e-5, each)
    packed = Samples(ray, start, start + 0.25), sigma, torch.ones(len(ray), 3)
    reference = torch.full((rays,), 9e3)
    single = integrate(*packed, reference)[-1]
    start, sigma = start[-each:].double(), sigma[-each:].double()
    weight = weights(sigma, torch.full_like(sigma, 0.25))
    assert relative_error(single[0].double(), sigma.sum() / 4) < 1e-6
    assert relative_error(single[4].double(), weight @ (start + 0.125 - 9e3)) < 1e-6
    assert relative_error(single[5].double(), double_sum(weight, start, start + 0.25)) < 1e-6


def test_opaque_samples_have_finite_gradients() -> None:
    sigma = torch.tensor([0.0, 1e30, 3e38, 1.0], requires_grad=True)
    ends = torch.arange(5.0)
    samples = Samples(torch.zeros(4, dtype=torch.int64), ends[:-1], ends[1:])
    segments = integrate(samples, sigma, torch.eye(4, 3), torch.zeros(1))
    assert segments[0, 1:5].tolist() == [0.0, 1.0, 0.0, 1.5]
    segments[:, 1:].sum().backward()
    assert sigma.grad is not None and sigma.grad.isfinite().all()


def test_no_samples() -> None:
    nothing = Samples(torch.zeros(0, dtype=torch.int64), torch.zeros(0), torch.zeros(0))
    sigma = torch.zeros(0, requires_grad=True)
    segments = integrate(nothing, sigma, torch.zeros(0, 3), torch.zeros(5))
    assert torch.equal(segments, torch.zeros(5, 6))
    segments.sum().backward()
