"""Where rows stand in the list of a set's rows."""

from __future__ import annotations

from torch import Tensor

from odin_nerfstudio.shadow.bitmap.backend import select_backend
from odin_nerfstudio.shadow.bitmap.sets import Bitmap


class Index:
    """The inverse of :meth:`Bitmap.rows`; nothing waits for the device.

    Args:
        bitmap: whose rows are looked up, any number of times.
    """

    def __init__(self, bitmap: Bitmap) -> None:
        self.words = bitmap.words
        """(W,) int64 of the set."""
        self._backend = select_backend(self.words.device)
        self.prefix = self._backend.prefix(self.words)
        """(W,) int32 rows of the set below each word."""

    def place(self, rows: Tensor) -> Tensor:
        """How many rows of the set are below each of ``rows``.

        Args:
            rows: (R,) int64 in [0, size), in any order. For a row of the set the answer is its place in
                ``bitmap.rows()``; for another, the place it would be inserted at.

        Returns:
            (R,) int64.
        """
        return self._backend.place(self.words, self.prefix, rows)
