"""Numbers arrive as they were when they were asked for. On a CUDA device: tests/cuda/test_bitmap.py."""

from __future__ import annotations

import torch

from odin_nerfstudio.shadow.readback import counts_to_host


def test_numbers_arrive_as_they_were() -> None:
    counts = torch.tensor([3, 1, 4])
    on_their_way = counts_to_host(counts)
    counts.zero_()
    assert on_their_way.get() == on_their_way.get() == [3, 1, 4]
    assert counts_to_host(counts[:0]).get() == []
