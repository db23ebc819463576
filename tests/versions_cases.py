"""Tables of versions, and what handing out and publishing rows has to make of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from odin_nerfstudio.shadow.bitmap import Bitmap

SIZES = [0, 1, 31, 32, 63, 64, 65, 511, 513, 10_001]


def random_tables(size: int, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Two random masks and two tables that differ here and there."""
    random = torch.Generator().manual_seed(size)
    masks = (torch.rand(2, size, generator=random) < 0.5).to(device)
    tables = torch.randint(-1, 2, (2, size), generator=random, dtype=torch.int32).to(device)
    return masks[0].clone(), masks[1].clone(), tables[0].clone(), tables[1].clone()


def assert_hands_out(hand_out: Callable, size: int, device: str = "cpu") -> None:
    """Rows of the set get the newest version, others keep theirs."""
    chosen, _, read, versions = random_tables(size, device)
    expected, before = torch.where(chosen, versions, read), versions.clone()
    hand_out(Bitmap.from_mask(chosen), versions, read)
    assert torch.equal(read, expected) and torch.equal(versions, before)


def assert_publishes(publish: Callable, size: int, device: str = "cpu") -> None:
    """Rows of the set get the step, and those that were read before somebody else's publication are found."""
    chosen, stale, read, versions = random_tables(size, device)
    broken = chosen & (read != versions) & ~stale
    expected, before = torch.where(chosen, 7, versions), read.clone()
    found = publish(Bitmap.from_mask(chosen), Bitmap.from_mask(stale), read, versions, 7)
    assert found.size == size and torch.equal(found.words, Bitmap.from_mask(broken).words)
    assert torch.equal(versions, expected) and torch.equal(read, before)
