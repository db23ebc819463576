"""Outputs that are made when somebody looks."""

from __future__ import annotations

from odin_nerfstudio.splat.outputs import Outputs


def test_a_value_is_made_once_and_only_if_it_is_asked_for() -> None:
    made = []
    outputs = Outputs(rgb=1, heat=lambda: made.append("heat") or 2, other=lambda: made.append("other") or 3)
    assert list(outputs) == ["rgb", "heat", "other"] and "heat" in outputs and not made
    assert (outputs["rgb"], outputs["heat"], outputs["heat"], outputs.get("absent", 5)) == (1, 2, 2, 5)
    assert made == ["heat"]
    assert outputs.get("other") == 3
    outputs["late"] = lambda: 4
    assert list(outputs.values()) == [1, 2, 3, 4] and dict(outputs.items())["late"] == 4
