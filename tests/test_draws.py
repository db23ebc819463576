"""Draws that belong to primitives: their distribution, and that nothing but the key decides them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import stats

from odin_nerfstudio.draws import _philox, normal, uniform

IDS = torch.arange(20_000)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_known_answers_of_random123(
    counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    assert tuple(int(word) for word in _philox((c0, c1, c2, c3), *key)) == expected


def test_distributions() -> None:
    flat = uniform(3, "test", 100, IDS, 3)
    bell = normal(3, "test", 100, IDS, 5)
    assert flat.shape == (len(IDS), 3) and bell.shape == (len(IDS), 5)
    assert flat.min() >= 0 and flat.max() < 1
    for column in flat.T:
        assert stats.kstest(column.numpy(), "uniform").pvalue > 1e-3
    for column in bell.T:
        assert stats.kstest(column.numpy(), "norm").pvalue > 1e-3
        assert abs(column.mean()) < 4 / len(IDS) ** 0.5
        assert abs(column.var() - 1) < 4 * (2 / len(IDS)) ** 0.5


def test_ids_columns_steps_seeds_and_purposes_are_independent() -> None:
    draws = [
        normal(0, "a", 7, IDS, 4),
        normal(0, "a", 8, IDS, 4),
        normal(0, "a", 7 + 2**20, IDS, 4),
        normal(1, "a", 7, IDS, 4),
        normal(0, "b", 7, IDS, 4),
        normal(0, "a", 7, IDS + 1, 4).roll(5, 0),
        normal(0, "a", 7, IDS + 2**32, 4),
    ]
    table = torch.cat(draws, dim=1).numpy()
    correlation = np.corrcoef(table, rowvar=False) - np.eye(table.shape[1])
    assert np.abs(correlation).max() < 5 / len(IDS) ** 0.5
    assert np.abs(np.corrcoef(table**2, rowvar=False) - np.eye(table.shape[1])).max() < 6 / len(IDS) ** 0.5


@pytest.mark.parametrize("draw", [uniform, normal])
def test_a_draw_depends_on_its_key_alone(draw: Callable[..., torch.Tensor]) -> None:
    generator = torch.Generator().manual_seed(0)
    full = draw(5, "test", 2, IDS, 3)
    for count in (0, 1, 2, 7, 63, 1000, 9999):
        some = torch.randperm(len(IDS), generator=generator)[:count]
        assert torch.equal(draw(5, "test", 2, some, 3), full[some])
    assert torch.equal(draw(5, "test", 2, IDS, 2), full[:, :2])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_devices_draw_alike() -> None:
    assert torch.equal(uniform(5, "test", 2, IDS.cuda(), 3).cpu(), uniform(5, "test", 2, IDS, 3))
    torch.testing.assert_close(normal(5, "test", 2, IDS.cuda(), 3).cpu(), normal(5, "test", 2, IDS, 3))
