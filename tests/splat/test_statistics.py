"""What densification knows of rows, on the CPU: the twin of the kernel."""

from __future__ import annotations

import pytest
from statistics_cases import SIZES, assert_adds_up

from odin_nerfstudio.splat.densify.statistics import add_up


@pytest.mark.parametrize(("splats", "rows"), SIZES)
def test_statistics_add_up(splats: int, rows: int) -> None:
    assert_adds_up(add_up, splats, rows)
