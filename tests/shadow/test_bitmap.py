"""Packed sets behave as Python's sets, and the torch twins pack as NumPy does."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from odin_nerfstudio.shadow.bitmap import (
    Bitmap,
    Index,
    count_all,
    count_bits,
    numpy,
    reference,
    rows_of,
    sets,
    words_of,
)
from odin_nerfstudio.shadow.bitmap.program import LONGEST

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
        assert result.rows().tolist() == result.rows(len(expected)).tolist() == sorted(expected)
        assert result.rows().dtype == torch.int64
        assert result.mask().tolist() == [row in expected for row in range(size)]
        assert result.count() == len(expected)
        assert bool(result) == bool(expected)
        assert result.contains(torch.arange(size)).tolist() == [row in expected for row in range(size)]


@settings(max_examples=100, deadline=None)
@given(data=st.data(), size=sizes)
def test_an_index_is_the_inverse_of_the_rows(data: st.DataObject, size: int) -> None:
    rows = subset(data, size)
    places = Index(bitmap(rows, size)).place(torch.arange(size))
    assert places.tolist() == [sum(other < row for other in rows) for row in range(size)]
    assert places.dtype == torch.int64


@settings(max_examples=100, deadline=None)
@given(data=st.data(), size=sizes, sets=st.integers(0, 4))
def test_rows_of_several_sets_follow_one_another(data: st.DataObject, size: int, sets: int) -> None:
    each = [sorted(subset(data, size)) for _ in range(sets)]
    words = torch.stack([Bitmap.empty(size).words, *(bitmap(set(rows), size).words for rows in each)])[1:]
    rows = rows_of(words, [len(rows) for rows in each])
    assert rows.tolist() == list(chain(*each))
    assert rows.dtype == torch.int64
    wrong = [data.draw(st.integers(0, size)) for _ in each]
    expected = [(rows + [0] * count)[:count] for rows, count in zip(each, wrong, strict=True)]
    assert rows_of(words, wrong).tolist() == list(chain(*expected))


@pytest.mark.parametrize("counts", [[], [1], [1, 2, 3], [-1, 2]])
def test_every_set_needs_a_count(counts: list[int]) -> None:
    with pytest.raises(ValueError, match="2 sets"):
        rows_of(torch.zeros(2, 3, dtype=torch.int64), counts)


def test_every_bit_counts() -> None:
    words = torch.randint(-(2**63), 2**63 - 1, (3, 5, 40), generator=torch.Generator().manual_seed(0))
    words[0, 0], words[0, 1] = -1, 0
    expected = [[sum((int(word) % 2**64).bit_count() for word in row) for row in each] for each in words]
    assert count_bits(words).tolist() == reference.count(words).tolist() == expected
    assert count_bits(words[:, 0, ::2]).tolist() == reference.count(words[:, 0, ::2]).tolist()
    assert count_bits(words[..., :0]).tolist() == [[0] * 5] * 3
    assert int(count_bits(words[0, 0])) == 40 * 64


@settings(max_examples=100, deadline=None)
@given(data=st.data(), size=sizes, sets=st.integers(0, 3))
def test_twins_equal_numpy(data: st.DataObject, size: int, sets: int) -> None:
    mask = torch.zeros(sets, size, dtype=torch.bool)
    for each in mask:
        each[list(subset(data, size))] = True
    words = reference.pack(mask)
    assert torch.equal(words, numpy.pack(mask))
    counts = [data.draw(st.integers(0, size)) for _ in range(sets)]
    assert torch.equal(reference.rows(words, counts), numpy.rows(words, counts))
    rows = torch.tensor(sorted(subset(data, size)), dtype=torch.int64)
    assert torch.equal(reference.insert(rows, size), numpy.insert(rows, size))
    for each in words:
        assert torch.equal(reference.mask(each), numpy.mask(each))
        assert torch.equal(reference.prefix(each), numpy.prefix(each))


def test_every_bit_of_a_word_counts() -> None:
    full = Bitmap.from_rows(torch.arange(64), 64)
    assert full.words.tolist() == [-1]
    assert full.count() == 64
    assert Index(full).place(torch.arange(64)).tolist() == list(range(64))
    for row in range(64):
        assert bitmap({row}, 64).count() == 1


def test_operations_leave_their_operands_alone() -> None:
    a, b = bitmap({1, 70}, 100), bitmap({70, 99}, 100)
    _ = (a & b, a | b, a - b)
    assert (a.rows().tolist(), b.rows().tolist()) == ([1, 70], [70, 99])


@pytest.fixture(scope="module")
def lazy() -> Iterator[None]:
    """Sets on the CPU are computed as late as on a GPU, by the torch twins."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sets, "_waits", lambda device: True)
        yield


OPERATORS = (operator.and_, operator.or_, operator.sub)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), size=sizes)
def test_expressions_are_sets(lazy: None, data: st.DataObject, size: int) -> None:
    known = [(bitmap(rows, size), rows) for rows in (subset(data, size), subset(data, size))]
    known.append((Bitmap.empty(size), set()))
    picks = st.tuples(st.sampled_from(OPERATORS), st.integers(0, 100), st.integers(0, 100), st.booleans())
    for combine, left, right, ask in data.draw(st.lists(picks, max_size=40)):
        # Mostly of what was made last, so that expressions become long.
        (a, of_a), (b, of_b) = known[-1 - left % 4 % len(known)], known[-1 - right % len(known)]
        result, expected = combine(a, b), combine(of_a, of_b)
        assert (result.size, result.device) == (size, torch.device("cpu"))
        if ask:
            assert result.rows().tolist() == sorted(expected)
        known.append((result, expected))
    counts = count_all([each for each, _ in known], 7, -1).tolist()
    assert counts == [*(len(expected) for _, expected in known), 7, -1]
    words = words_of([each for each, _ in known])
    for each, of_words, (_, expected) in zip([each for each, _ in known], words, known, strict=True):
        assert torch.equal(each.words, of_words)
        assert each.rows().tolist() == sorted(expected)
        assert bool(each) == bool(expected)


def test_nothing_is_computed_before_somebody_asks(lazy: None, monkeypatch: pytest.MonkeyPatch) -> None:
    computed = []
    evaluate = numpy.evaluate
    monkeypatch.setattr(
        numpy, "evaluate", lambda programs, *others: computed.append(programs) or evaluate(programs, *others)
    )
    a, b = bitmap({1, 70}, 100), bitmap({70, 99}, 100)
    result = (a | b) - (a & b)
    assert not computed
    assert result.words is result.words
    assert len(computed) == 1
    assert (result | a).rows().tolist() == [1, 70, 99]
    assert [len(program) for program in computed[1]] == [3]  # the result is known


def test_nothing_costs_nothing() -> None:
    a, nothing = bitmap({1, 70}, 100), Bitmap.empty(100)
    assert (a | nothing) is (nothing | a) is (a - nothing) is a
    assert not (a & nothing) and not (nothing & a) and not (nothing - a)
    assert nothing.words.tolist() == [0, 0]
    assert (a | nothing) is a  # also when its words are known


@pytest.mark.parametrize("grow", ["left", "right", "both"])
def test_programs_stay_short_and_stacks_low(lazy: None, monkeypatch: pytest.MonkeyPatch, grow: str) -> None:
    heights = []

    def measured(programs, *others):
        for program in programs:
            assert len(program) <= LONGEST
            height = [0]
            for step in program:
                height.append(height[-1] + (1 if isinstance(step, torch.Tensor) else -1))
            heights.append(max(height))
        return reference.evaluate(programs, *others)

    monkeypatch.setattr(numpy, "evaluate", measured)
    result = bitmap({0}, 2000)
    for row in range(1, 200):
        other = bitmap({row}, 2000)
        result = {"left": result | other, "right": other | result, "both": (result - other) | (other - result)}[grow]
    assert result.rows().tolist() == list(range(200))

    def tree(first: int, end: int) -> Bitmap:
        middle = (first + end) // 2
        return bitmap({first}, 2000) if end - first == 1 else tree(first, middle) | tree(middle, end)

    for end in (31, 32, 33, 1000):
        assert tree(0, end).rows().tolist() == list(range(end))
    assert max(heights) == 6


def test_sets_that_do_not_match_are_refused() -> None:
    with pytest.raises(ValueError, match="65 rows on cpu do not match 64"):
        _ = bitmap({1}, 65) | bitmap({1}, 64)
    with pytest.raises(ValueError, match="one size"):
        count_all([bitmap({1}, 65), bitmap({1}, 64)])
    with pytest.raises(ValueError, match="2 words do not hold 64 rows"):
        Bitmap(torch.zeros(2, dtype=torch.int64), 64)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), size=st.integers(1, 300))
def test_only_chosen_rows_are_meant(data: st.DataObject, size: int) -> None:
    pairs = data.draw(st.lists(st.tuples(st.integers(0, size - 1), st.booleans())))
    rows = torch.tensor([row for row, _ in pairs], dtype=torch.int64)
    chosen = torch.tensor([is_chosen for _, is_chosen in pairs], dtype=torch.bool)
    expected = sorted({row for row, is_chosen in pairs if is_chosen})
    assert Bitmap.from_rows(rows, size, chosen).rows().tolist() == expected
    assert torch.equal(reference.insert(rows, size, chosen), numpy.insert(rows, size, chosen))
