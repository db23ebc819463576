"""Rules that hold for sets of rows: checked at once on a CPU, without waiting on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

from odin_nerfstudio.shadow.bitmap import Bitmap, count_all
from odin_nerfstudio.shadow.readback import HostCounts, counts_to_host

Refusal = Callable[[int], Exception]
"""The error for a rule that the row given breaks."""


class Rules:
    """What must not happen to any row.

    A CPU says so at once. What a GPU finds is raised by :meth:`look`, once the numbers are here.

    Args:
        device: where the sets are.
    """

    def __init__(self, device: torch.device) -> None:
        self._at_once = device.type == "cpu"
        self._asked: list[tuple[Bitmap, Refusal]] = []
        self._coming: tuple[HostCounts, list[tuple[Bitmap, Refusal]]] | None = None

    def none(self, rows: Bitmap, refusal: Refusal) -> None:
        """There must be no row in a set.

        Raises:
            Exception: the refusal, on a CPU.
        """
        if not self._at_once:
            self._asked.append((rows, refusal))
        elif rows:
            raise refusal(int(rows.rows()[0]))

    def look(self, wait: bool = False) -> None:
        """Raises what was found about the rules before the last look, or with ``wait`` about all.

        Raises:
            Exception: the refusal of the first rule that was broken.
        """
        self._raise()
        if self._asked:
            counts = count_all([rows for rows, _ in self._asked])
            self._coming, self._asked = (counts_to_host(counts), self._asked), []
        if wait:
            self._raise()

    def _raise(self) -> None:
        if self._coming is None:
            return
        (numbers, asked), self._coming = self._coming, None
        for broken, (rows, refusal) in zip(numbers.get(), asked, strict=True):
            if broken:
                raise refusal(int(rows.rows()[0]))
