"""What counts when, and for which views."""

from __future__ import annotations

import numpy as np

from odin_nerfstudio.plan.costs import ViewCosts


def test_what_is_heard_counts_after_what_is_planned() -> None:
    costs = ViewCosts(4)
    assert costs.at(10) is None
    costs.hear([{}, {}], 5)
    assert costs.at(10) is None  # nothing was measured
    costs.hear([{0: 3.0}, {2: 5.0}], 6, ahead=3)
    costs.hear([{1: 10.0}, {0: 6.0}], 8, ahead=3)
    assert costs.at(9) is None
    for step in (10, 11):  # as they were planned before the second time
        np.testing.assert_array_equal(costs.at(step), [3, 4, 5, 4])
    np.testing.assert_array_equal(costs.at(12), [6, 10, 5, 7])
    costs.hear([{3: 1.0}, {}], 11)
    np.testing.assert_array_equal(costs.at(12), [6, 10, 5, 1])


def test_each_measurement_is_told_once() -> None:
    costs = ViewCosts(2)
    costs.measure(1, 7)
    costs.measure(1, 8)
    assert costs.take() == {1: 8}
    assert costs.take() == {}
