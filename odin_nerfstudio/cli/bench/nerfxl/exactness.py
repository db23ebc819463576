"""A field cut into tiles against the same field in one piece, over many random scenes."""

from __future__ import annotations

from rich.console import Console
from rich.progress import track

from odin_nerfstudio.nerfxl.reference import Exchange, cut_errors, single_errors

COUNTS = range(1, 9)
"""Numbers of tiles."""
EXCHANGES: tuple[Exchange, ...] = ("tile", "sample")
FAR = 1e4
"""Distance from which single precision is tried, besides from within."""


def largest_errors(trials: int) -> dict[int, dict[str, float]]:
    """Tries ``trials`` random trees, fields and bundles of rays for every number of tiles, with both exchanges.

    Returns:
        By number of tiles the largest relative errors: ``forward`` of colour, accumulation, depth, distortion and
        weights of tiles, and ``grad`` of every tile's parameters, both in float64; ``float32`` of the outputs at
        coordinates of 10⁴.
    """
    largest = {count: dict.fromkeys(("forward", "grad", "float32"), 0.0) for count in COUNTS}
    work = [(count, trial) for trial in range(trials) for count in COUNTS]
    for count, trial in track(work, "Cutting fields", console=Console(stderr=True), transient=True):
        errors = largest[count]
        for exchange in EXCHANGES:
            found = cut_errors(trial, count, exchange)
            errors["grad"] = max(errors["grad"], found.pop("gradient"))
            errors["forward"] = max(errors["forward"], *found.values())
        for away in (0.0, FAR):
            errors["float32"] = max(errors["float32"], *single_errors(trial, count, away).values())
    return largest
