"""Rules about sets of rows: when a breach is raised, and which one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from odin_nerfstudio.shadow.bitmap import Bitmap
from odin_nerfstudio.shadow.rules import Rules

SIZE = 100
NOTHING, SOME, MORE = (
    Bitmap.from_rows(torch.tensor(rows, dtype=torch.int64), SIZE) for rows in ([], [71, 70, 99], [3])
)


def named(rule: str) -> Callable[[int], Exception]:
    return lambda row: LookupError(f"{rule}: row {row}")


def not_asked(row: int) -> Exception:
    raise AssertionError(f"nothing is wrong with row {row}")


@pytest.fixture
def later() -> Rules:
    """As on a device that nobody waits for."""
    return Rules(torch.device("meta"))


def test_a_cpu_says_so_at_once() -> None:
    rules = Rules(torch.device("cpu"))
    rules.none(NOTHING, not_asked)
    with pytest.raises(LookupError, match="first: row 70"):
        rules.none(SOME, named("first"))
    rules.look()
    rules.look(wait=True)  # it was raised already


def test_others_say_so_one_look_later(later: Rules) -> None:
    later.none(NOTHING, not_asked)
    later.none(SOME, named("first"))
    later.look()
    later.none(NOTHING, not_asked)
    with pytest.raises(LookupError, match="first: row 70"):
        later.look()
    later.look(wait=True)  # once


def test_who_waits_is_told_at_once(later: Rules) -> None:
    later.none(SOME, named("first"))
    with pytest.raises(LookupError, match="first: row 70"):
        later.look(wait=True)
    later.look(wait=True)


def test_of_several_the_first_is_raised(later: Rules) -> None:
    later.none(NOTHING, not_asked)
    later.none(MORE, named("first"))
    later.none(SOME, named("second"))
    with pytest.raises(LookupError, match="first: row 3"):
        later.look(wait=True)


def test_a_breach_does_not_hide_those_of_the_next_look(later: Rules) -> None:
    later.none(SOME, named("first"))
    later.look()
    later.none(MORE, named("second"))
    with pytest.raises(LookupError, match="first: row 70"):
        later.look()
    later.look()
    with pytest.raises(LookupError, match="second: row 3"):
        later.look()


def test_rules_that_hold_are_forgotten(later: Rules) -> None:
    for _ in range(5):
        later.none(NOTHING, not_asked)
        later.none(Bitmap.empty(SIZE), not_asked)
        later.look()
    later.look(wait=True)
    assert later._asked == [] and later._coming is None


def test_nothing_is_read_of_a_device_that_nobody_waits_for(later: Rules, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        for name in ("__bool__", "item", "tolist", "__int__"):
            patched.setattr(torch.Tensor, name, lambda _: pytest.fail("the device was waited for"))
        later.none(SOME, named("first"))
        later.look()
    with pytest.raises(LookupError, match="first: row 70"):
        later.look(wait=True)
