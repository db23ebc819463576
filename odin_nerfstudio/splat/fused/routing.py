"""Rows in the order of parts and views, and in the order of the ranks that they go to or come from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_ranks(parts: Sequence[Tensor], counts: Sequence[Sequence[int]]) -> Tensor:
    """Part after part, each in the order of ranks → rank after rank, each in the order of parts.

    Args:
        parts: (Σ counts[p], ...) for each part p.
        counts: [part][rank] rows.
    """
    pieces = [part.split(list(of_part)) for part, of_part in zip(parts, counts, strict=True)]
    return joined([piece for of_rank in zip(*pieces, strict=True) for piece in of_rank])


def to_parts(rows: Tensor, counts: Sequence[Sequence[int]]) -> list[Tensor]:
    """The inverse of :func:`to_ranks`, with the same ``counts``."""
    pieces = rows.split([count for of_rank in zip(*counts, strict=True) for count in of_rank])
    parts = len(counts)
    return [joined(pieces[part::parts]) for part in range(parts)]


def chosen_first(marks: Tensor) -> Tensor:
    """(M,) uint8 → (M,) int64: numbers of the marked rows, then those of the others, both ascending."""
    return marks.sort(descending=True, stable=True).indices


def joined(pieces: Sequence[Tensor]) -> Tensor:
    """One after the other, without a copy where there is only one."""
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))
