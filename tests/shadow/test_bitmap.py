"""Packed sets behave as Python's sets, and the torch twins pack as NumPy does."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from odin_nerfstudio.shadow.bitmap import Bitmap, _count_bits, _pack, _unpack, count_bits

sizes = st.integers(0, 300)


def subset(draw: st.DataObject, size: int) -> set[int]:
    return draw.draw(st.sets(st.integers(0, size - 1))) if size else set()


def bitmap(rows: set[int], size: int) -> Bitmap:
    return Bitmap.from_rows(torch.tensor(list(rows), dtype=torch.int64), size)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), size=sizes)
def test_is_a_set(data: st.DataObject, size: int) -> None:
    a, b = subset(data, size), subset(data, size)
    A, B = bitmap(a, size), bitmap(b, size)
    for result, expected in ((A, a), (A & B, a & b), (A | B, a | b), (A - B, a - b), (A - A, set())):
        assert result.rows().tolist() == sorted(expected)
        assert result.rows().dtype == torch.int64
        assert result.count() == len(expected)
        assert bool(result) == bool(expected)
        assert result.contains(torch.arange(size)).tolist() == [row in expected for row in range(size)]


def test_every_bit_counts() -> None:
    words = torch.randint(-(2**63), 2**63 - 1, (3, 5, 40), generator=torch.Generator().manual_seed(0))
    words[0, 0], words[0, 1] = -1, 0
    expected = [[sum((int(word) % 2**64).bit_count() for word in row) for row in each] for each in words]
    assert count_bits(words).tolist() == _count_bits(words).tolist() == expected
    assert count_bits(words[:, 0, ::2]).tolist() == _count_bits(words[:, 0, ::2]).tolist()
    assert count_bits(words[..., :0]).tolist() == [[0] * 5] * 3
    assert int(count_bits(words[0, 0])) == 40 * 64


@settings(max_examples=100, deadline=None)
@given(data=st.data(), size=sizes)
def test_twins_equal_numpy(data: st.DataObject, size: int) -> None:
    words = bitmap(subset(data, size), size).words
    bits = _unpack(words)
    assert bits.nonzero()[:, 0].tolist() == Bitmap(words, size).rows().tolist()
    assert torch.equal(_pack(bits), words)


def test_every_bit_of_a_word_counts() -> None:
    full = Bitmap.from_rows(torch.arange(64), 64)
    assert full.words.tolist() == [-1]
    assert full.count() == 64
    for row in range(64):
        assert bitmap({row}, 64).count() == 1


def test_operations_leave_their_operands_alone() -> None:
    a, b = bitmap({1, 70}, 100), bitmap({70, 99}, 100)
    _ = (a & b, a | b, a - b)
    assert (a.rows().tolist(), b.rows().tolist()) == ([1, 70], [70, 99])
