"""The kernels for packed sets against their torch twins, and numbers on their way to the host."""

from __future__ import annotations

import operator
import random
import shutil

import pytest
import torch
from torch import Tensor

from odin_nerfstudio import kernels
from odin_nerfstudio.shadow.bitmap import Bitmap, Index, count_all, count_bits, reference, rows_of, words_of
from odin_nerfstudio.shadow.bitmap.backend import select_backend
from odin_nerfstudio.shadow.bitmap.program import LONGEST
from odin_nerfstudio.shadow.readback import counts_to_host
from odin_nerfstudio.shadow.rules import Rules

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
WIDTHS = [0, 1, 2, 511, 512, 513, 1500, 70_001]  # words; the last is counted by several blocks


def random_words(sets: int, width: int, density: float = 0.3) -> Tensor:
    generator = torch.Generator().manual_seed(sets * 100_003 + width)
    mask = torch.rand(sets, 64 * width, generator=generator) < density
    mask[:, : 64 * (width // 3)] &= torch.rand(sets, 1, generator=generator) < 0.5  # whole words without a row
    return reference.pack(mask).cuda()


def random_rows(count: int, size: int) -> Tensor:
    """In any order, some of them twice."""
    return torch.randint(0, size, (count,), generator=torch.Generator().manual_seed(count)).cuda()


@needs_cuda
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 3), (0,)])
def test_counts_are_the_twins(shape: tuple[int, ...], width: int) -> None:
    words = random_words(max(1, torch.Size(shape).numel()), width)[: torch.Size(shape).numel()].reshape(*shape, width)
    counts = count_bits(words)
    assert torch.equal(counts, reference.count(words))
    assert counts.dtype == torch.int64
    assert torch.equal(count_bits(words[..., ::2]), reference.count(words[..., ::2]))


@needs_cuda
def test_every_bit_counts() -> None:
    words = torch.full((2, 70_001), -1, device="cuda")
    assert count_bits(words).tolist() == [64 * 70_001] * 2


@needs_cuda
@pytest.mark.parametrize("size", [1, 63, 64, 65, 5000, 200_001])
@pytest.mark.parametrize("count", [0, 1, 33, 4097])
def test_a_set_of_rows_is_the_twins(count: int, size: int) -> None:
    rows = random_rows(count, size)
    bitmap = Bitmap.from_rows(rows, size)
    expected = reference.insert(rows, size)
    assert torch.equal(bitmap.words, expected)
    assert torch.equal(bitmap.mask(), reference.mask(expected)[:size])
    ascending = rows.unique()
    assert torch.equal(bitmap.rows(), ascending)
    assert torch.equal(bitmap.rows(len(ascending)), ascending)
    asked = random_rows(1000, size)
    assert torch.equal(bitmap.contains(asked), torch.isin(asked, ascending))
    assert bitmap.count() == len(ascending)


@needs_cuda
@pytest.mark.parametrize("size", [1, 64, 5000])
@pytest.mark.parametrize("count", [0, 1, 33, 4097])
def test_chosen_rows_are_the_twins(count: int, size: int) -> None:
    rows = random_rows(count, size)
    chosen = (torch.rand(2 * count, generator=torch.Generator().manual_seed(size)) < 0.3).cuda()[::2]
    bitmap = Bitmap.from_rows(rows, size, chosen)
    assert torch.equal(bitmap.words, reference.insert(rows, size, chosen))
    assert torch.equal(bitmap.rows(), rows[chosen].unique())


OPERATORS = (operator.and_, operator.or_, operator.sub)


def expressions(width: int, count: int, seed: int) -> tuple[list[Bitmap], list[Tensor]]:
    """Sets made of those made before, mostly of the last ones, and their words as torch computes them."""
    draw = random.Random(seed)
    expected = [*random_words(3, width), torch.zeros(width, dtype=torch.int64, device="cuda")]
    bitmaps = [Bitmap(words, 64 * width) for words in expected[:3]] + [Bitmap.empty(64 * width, "cuda")]
    for _ in range(count):
        combine, left, right = draw.choice(OPERATORS), -1 - draw.randrange(4), draw.randrange(len(bitmaps))
        a, b = expected[left], expected[right]
        bitmaps.append(combine(bitmaps[left], bitmaps[right]))
        expected.append(a & ~b if combine is operator.sub else combine(a, b))
    return bitmaps, expected


@needs_cuda
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("seed", range(5))
def test_expressions_are_what_torch_computes(width: int, seed: int) -> None:
    bitmaps, expected = expressions(width, 40, seed)
    programs = [bitmap._program([]) for bitmap in bitmaps]
    counts = count_all(bitmaps, 5, -(2**40))
    together = words_of(bitmaps)
    assert together.shape == (len(bitmaps), width)
    assert torch.equal(together, torch.stack(expected))
    assert torch.equal(together, reference.evaluate(programs, width, together.device))
    assert torch.equal(counts, reference.count_all(programs, width, together.device, (5, -(2**40))))
    assert counts.tolist() == [*reference.count(torch.stack(expected)).tolist(), 5, -(2**40)]
    for bitmap, words in zip(bitmaps, expected, strict=True):
        assert torch.equal(bitmap.words, words)
    assert torch.equal(count_all(bitmaps), counts[:-2])  # now that they are known


@needs_cuda
@pytest.mark.parametrize("sets", [1, 128, 129, 300])
def test_more_programs_than_one_launch_takes(sets: int) -> None:
    words = random_words(sets, 70)
    other = Bitmap(words[0], 64 * 70)
    bitmaps = [Bitmap(each, 64 * 70) & other for each in words]
    assert torch.equal(words_of(bitmaps), words & words[0])
    assert torch.equal(count_all(bitmaps, 3)[:-1], count_bits(words & words[0]))


@needs_cuda
@pytest.mark.parametrize("balanced", [False, True])
def test_the_longest_programs(balanced: bool) -> None:
    words = random_words((LONGEST + 1) // 2, 600, density=0.02)

    def joined(first: int, end: int) -> Bitmap:
        if end - first == 1:
            return Bitmap(words[first], 64 * 600)
        middle = (first + end) // 2 if balanced else first + 1
        return joined(first, middle) | joined(middle, end)

    results = [joined(0, len(words)) for _ in range(20)]  # several launches
    assert len(results[0]._program([])) == LONGEST
    expected = words[0]
    for each in words[1:]:
        expected = expected | each
    assert torch.equal(count_all(results), count_bits(expected).expand(20))
    assert torch.equal(words_of(results), expected.expand(20, -1))
    more = results[0] - (results[1] & Bitmap(words[0], 64 * 600))
    assert torch.equal(more.words, expected & ~words[0])


@needs_cuda
def test_a_set_that_is_not_contiguous() -> None:
    words = random_words(2, 10)
    apart = Bitmap(words.T.contiguous().T[0], 640)
    assert torch.equal((apart | Bitmap(words[1], 640)).words, words[0] | words[1])


@needs_cuda
def test_a_broken_rule_is_raised_by_a_later_look() -> None:
    words = random_words(1, 600)[0]
    some = Bitmap(words, 600 * 64)
    rules = Rules(words.device)
    rules.none(some - some, lambda row: ValueError("nothing"))
    rules.none(some - (some | some), lambda row: ValueError("no row"))
    rules.look(wait=True)
    rules.none(some - Bitmap.empty(some.size, "cuda"), lambda row: ValueError(f"row {row}"))
    rules.look()
    with pytest.raises(ValueError, match=f"row {int(some.rows()[0])}"):
        rules.look()


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
@pytest.mark.parametrize("shape", [(0,), (1,), (31,), (64,), (65,), (513,), (5001,), (3, 100), (0, 70), (2, 3, 33)])
def test_a_mask_is_packed_as_by_the_twin(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    mask = (torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape))) < 0.5).to(dtype).cuda()
    assert torch.equal(select_backend(mask.device).pack(mask), reference.pack(mask))


@needs_cuda
def test_no_row_of_none() -> None:
    nothing = Bitmap.from_rows(torch.zeros(0, dtype=torch.int64, device="cuda"), 0)
    assert len(nothing.words) == len(nothing.mask()) == len(nothing.rows()) == nothing.count() == 0
    assert len(Index(nothing).place(nothing.rows())) == len(nothing.contains(nothing.rows())) == 0


@needs_cuda
@pytest.mark.parametrize("density", [0.001, 0.5, 1.0])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("sets", [0, 1, 3])
def test_rows_of_several_sets_are_the_twins(sets: int, width: int, density: float) -> None:
    words = random_words(sets, width, density)
    counts = reference.count(words).tolist()
    rows = rows_of(words, counts)
    assert rows.dtype == torch.int64
    assert torch.equal(rows, reference.rows(words, counts))
    assert torch.equal(rows_of(words[:, ::2], [0] * sets), rows[:0])


@needs_cuda
def test_more_sets_than_one_launch_takes() -> None:
    words = random_words(600, 7)
    counts = count_bits(words).tolist()
    assert torch.equal(rows_of(words, counts), reference.rows(words, counts))


@needs_cuda
@pytest.mark.parametrize("width", [0, 1, 600])
def test_wrong_counts_give_rows_that_exist(width: int) -> None:
    words = random_words(4, width)
    counts = [count + wrong for count, wrong in zip(count_bits(words).tolist(), (700, 0, 3, 1), strict=True)]
    assert torch.equal(rows_of(words, counts), reference.rows(words, counts))
    counts = [count // divisor for count, divisor in zip(counts, (2, 1, 10**9, 3), strict=True)]
    assert torch.equal(rows_of(words, counts), reference.rows(words, counts))


@needs_cuda
@pytest.mark.parametrize("width", WIDTHS[1:])
def test_places_are_the_twins(width: int) -> None:
    bitmap = Bitmap(random_words(1, width)[0], 64 * width)
    prefix = reference.prefix(bitmap.words)
    asked = random_rows(5000, bitmap.size)
    index = Index(bitmap)
    assert torch.equal(index.place(asked), reference.place(bitmap.words, prefix, asked))
    rows = bitmap.rows()
    assert torch.equal(index.place(rows), torch.arange(len(rows), device="cuda"))


@needs_cuda
def test_nothing_waits_for_the_device() -> None:
    words, asked = random_words(2, 600), random_rows(100, 600 * 64)
    counts = count_bits(words).tolist()
    bitmap = Bitmap(words[0], 600 * 64)
    torch.cuda.set_sync_debug_mode("error")
    try:
        rows_of(words, counts)
        some = Bitmap.from_rows(asked, bitmap.size)
        other = Bitmap.from_rows(asked, bitmap.size, asked > 5) | Bitmap.empty(bitmap.size, "cuda")
        counts_to_host(count_all([some - other, some & bitmap, Bitmap.empty(bitmap.size, "cuda")], 1, 2))
        words_of([some | bitmap, other])
        (some - other).mask()
        Bitmap.from_mask(some.mask() > 0)
        Index(bitmap).place(bitmap.rows(counts[0]))
        bitmap.contains(asked)
        bitmap.mask()
        counts_to_host(count_bits(words))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_cuda
def test_twins_do_not_wait_either() -> None:
    words, asked = random_words(2, 600), random_rows(100, 600 * 64)
    counts = reference.count(words).tolist()
    torch.cuda.set_sync_debug_mode("error")
    try:
        reference.rows(words, counts)
        reference.insert(asked, 600 * 64)
        reference.insert(asked, 600 * 64, asked > 5)
        reference.count_all([[words[0], words[1], 0], []], 600, words.device, (1, 2))
        reference.place(words[0], reference.prefix(words[0]), asked)
        reference.contains(words[0], asked)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_cuda
def test_operators_keep_torchs_rules() -> None:
    words, rows = random_words(2, 5), random_rows(10, 5 * 64)
    count_bits(words)  # declares them
    each = words[0]
    for name, arguments in (
        ("count", (words,)),
        ("pack", (torch.ones(2, 70, dtype=torch.bool, device="cuda"),)),
        ("insert", (rows, 5 * 64)),
        ("insert", (rows, 5 * 64, rows > 7)),
        ("mask", (each,)),
        ("rows", (words, [3, 4])),
        ("contains", (each, rows)),
        ("prefix", (each,)),
        ("place", (each, reference.prefix(each), rows)),
    ):
        operator = getattr(torch.ops.odin_nerfstudio, f"bitmap_{name}").default
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


@needs_cuda
def test_numbers_arrive_as_they_were() -> None:
    expected, on_their_way = [], []
    for i in range(50):
        counts = torch.arange(i, 2 * i, device="cuda")
        torch.cuda._sleep(100_000)
        on_their_way.append(counts_to_host(counts))
        counts_to_host(counts + 1)  # that nobody waits for
        counts.zero_()
        expected.append(list(range(i, 2 * i)))
    assert [counts.get() for counts in on_their_way] == expected
    assert on_their_way[-1].get() == expected[-1]


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_the_source_compiles_and_exports_its_functions(capability, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    library = kernels.load.__wrapped__("bitmap", capability)
    for name in ("count", "pack", "insert", "mask", "rows", "contains", "prefix", "place", "evaluate", "count_all"):
        assert hasattr(library, f"bitmap_{name}")
