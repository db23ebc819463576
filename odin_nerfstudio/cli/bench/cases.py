"""Measurements one after the other, for as long as there is time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import torch
from rich.console import Console

from odin_nerfstudio.errors import UserError

MARGIN = 1.2
"""How much longer than the one before it a case may take."""
Case = TypeVar("Case")


@dataclass(frozen=True)
class Outcome(Generic[Case]):
    """What became of the cases."""

    done: dict[Case, dict[str, Any]]
    """Figures of those that ended well."""
    failed: dict[str, str]
    """Case → why it did not."""
    left_out: list[str]
    """Those that there was no time for."""


def possible_sizes(world_sizes: Sequence[int], device: Literal["cpu", "cuda"]) -> list[int]:
    """Those numbers of ranks for which there are enough devices here.

    Raises:
        UserError: where there are not enough for any.
    """
    gpus = torch.cuda.device_count()
    sizes = [size for size in world_sizes if device == "cpu" or size <= gpus]
    if not sizes:
        raise UserError(f"--device cuda: torch sees {gpus} GPUs here; --device cpu needs none.")
    return sizes


def run_cases(
    cases: Iterable[Case], measure: Callable[[Case, float], dict[str, Any]], budget_s: float
) -> Outcome[Case]:
    """Measures one case after the other, and tells on stderr how it went. One that fails does not end the others.

    Args:
        cases: in their order.
        measure: gives the figures of a case within so many seconds, or raises a UserError.
        budget_s: seconds for all of them; none is begun in less time than the one before it took.

    Raises:
        UserError: when no case ended well.
    """
    begin, last = time.monotonic(), 0.0
    outcome = Outcome[Case]({}, {}, [])
    for case in cases:
        started = time.monotonic()
        left = budget_s - (started - begin)
        if left < MARGIN * last:
            outcome.left_out.append(str(case))
            continue
        try:
            outcome.done[case] = measure(case, left)
        except UserError as error:
            outcome.failed[str(case)] = str(error)
        last = time.monotonic() - started
        Console(stderr=True).print(f"[dim]{case}: {outcome.failed.get(str(case)) or f'{last:.0f} s'}")
    if not outcome.done:
        raise UserError(f"No case ended well: {outcome.failed or outcome.left_out}")
    return outcome
