"""Decodes views ahead of their use, in the order of the schedule, within a memory budget."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from rich.progress import track
from torch import Tensor

if TYPE_CHECKING:
    from odin_nerfstudio.data.dataset import UndistortedDataset

View = dict[str, Any]
"""One decoded view: ``image`` ((H, W, C) uint8), ``mask`` where there is one, ``image_idx``."""


class ViewLoader:
    """Hands out decoded views of a dataset; the first ones that fit a budget stay in memory, the rest stream from disk.

    Every epoch visits each view once, in an order that changes: for such a cyclic pattern no replacement policy beats
    keeping a fixed part, so nothing is ever evicted.

    Args:
        dataset: where views come from.
        budget: bytes of decoded views to keep.
    """

    def __init__(self, dataset: UndistortedDataset, budget: int) -> None:
        self.dataset = dataset
        self._budget = budget
        self._kept: dict[int, View] = {}
        self._kept_bytes = 0
        self._coming: dict[int, Future[View]] = {}
        self._pool = ThreadPoolExecutor(min(4, os.cpu_count() or 1), thread_name_prefix="odin-views")

    def fill(self, description: str) -> None:
        """Decodes views into memory until the budget is used, with a progress bar.

        Raises:
            UserError: naming the file, when one cannot be decoded.
        """
        if not len(self.dataset):
            return
        first = self.get(0)
        fitting = min(len(self.dataset), max(1, int(self._budget // max(bytes_of(first), 1))))
        self.prefetch(range(1, fitting))
        for index in track(range(1, fitting), description=description, transient=True):
            self.get(index)

    def prefetch(self, indices: Iterable[int]) -> None:
        """Starts decoding the views that are neither in memory nor on their way."""
        for index in indices:
            if index not in self._kept and index not in self._coming:
                self._coming[index] = self._pool.submit(self.dataset.get_data, index, "uint8")

    def decoding(self, index: int) -> Future[View]:
        """What becomes the view; it is decoded already, or has begun to be. Not to be written to."""
        if index not in self._kept:
            self.prefetch([index])
            return self._coming[index]
        decoded: Future[View] = Future()
        decoded.set_result(self._kept[index])
        return decoded

    def get(self, index: int) -> View:
        """The view, waiting for it if it must; a copy of the dictionary, not of its tensors.

        Raises:
            UserError: naming the file, when it cannot be decoded.
        """
        if index not in self._kept:
            self.prefetch([index])
            view = self._coming.pop(index).result()
            size = bytes_of(view)
            if self._kept_bytes + size > self._budget:
                return view
            self._kept[index], self._kept_bytes = view, self._kept_bytes + size
        return dict(self._kept[index])


def bytes_of(view: View) -> int:
    """Memory of a view's tensors."""
    return sum(value.nbytes for value in view.values() if isinstance(value, Tensor))
