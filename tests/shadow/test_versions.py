"""Versions that readers get, and those that were raised in the meantime."""

from __future__ import annotations

import pytest
from versions_cases import SIZES, assert_hands_out, assert_publishes

from odin_nerfstudio.shadow.versions import hand_out, publish


@pytest.mark.parametrize("size", SIZES)
def test_a_reader_gets_the_newest_versions(size: int) -> None:
    assert_hands_out(hand_out, size)


@pytest.mark.parametrize("size", SIZES)
def test_rows_that_others_published_are_told(size: int) -> None:
    assert_publishes(publish, size)
