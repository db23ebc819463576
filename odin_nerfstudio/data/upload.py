"""Views on a CUDA device before their turn."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from odin_nerfstudio.data.loader import View, ViewLoader, bytes_of


class DeviceViews:
    """Copies the views of a loader to a device while others are used; the first ones that fit a budget stay there.

    Copies go through page-locked memory on a stream of their own, one after the other in the order in which they were
    asked for. A stream that uses a view waits for its copy; the host waits for decoding only.

    Args:
        views: decodes them, and keeps some in host memory.
        device: a CUDA device.
        budget: bytes of views to keep on it. Those that are prefetched come on top.
    """

    def __init__(self, views: ViewLoader, device: torch.device, budget: int) -> None:
        self._views = views
        self._device = device
        self._budget = budget
        self._kept: dict[int, _Uploaded] = {}
        self._kept_bytes = 0
        self._coming: dict[int, Future[_Uploaded]] = {}
        self._stream = torch.cuda.Stream(device)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="odin-upload")

    def fill(self, description: str) -> None:
        """Decodes views into host memory; see :meth:`ViewLoader.fill`."""
        self._views.fill(description)

    def prefetch(self, indices: Iterable[int]) -> None:
        """Starts decoding and copying the views that are neither on the device nor on their way."""
        for index in indices:
            if index not in self._kept and index not in self._coming:
                self._coming[index] = self._thread.submit(self._upload, self._views.decoding(index))

    def get(self, index: int) -> View:
        """The view, its tensors ready for what is queued on the current stream from now on.

        Raises:
            UserError: naming the file, when it cannot be decoded.
        """
        if index in self._kept:
            return self._ready(self._kept[index])
        self.prefetch([index])
        uploaded = self._coming.pop(index).result()
        self._views.get(index)  # it may keep what it decoded
        size = bytes_of(uploaded.view)
        if self._kept_bytes + size <= self._budget:
            self._kept[index], self._kept_bytes = uploaded, self._kept_bytes + size
        return self._ready(uploaded)

    def _ready(self, uploaded: _Uploaded) -> View:
        """The view for the current stream, with a dictionary of its own."""
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(uploaded.done)
        for value in uploaded.view.values():
            if isinstance(value, Tensor):
                value.record_stream(stream)  # its memory belongs to the copying stream
        return dict(uploaded.view)

    def _upload(self, decoding: Future[View]) -> _Uploaded:
        view = decoding.result()
        with torch.cuda.stream(self._stream):
            copies = {name: self._copy(value) if isinstance(value, Tensor) else value for name, value in view.items()}
            return _Uploaded(copies, self._stream.record_event())

    def _copy(self, tensor: Tensor) -> Tensor:
        # torch reuses page-locked memory only after the copies from it.
        return tensor.pin_memory().to(self._device, non_blocking=True)


@dataclass(frozen=True)
class _Uploaded:
    """A view whose copy was queued."""

    view: View
    done: torch.cuda.Event
