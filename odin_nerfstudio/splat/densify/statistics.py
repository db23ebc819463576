"""What the backward of views says about splats, and how it adds up for rows; on CUDA by one launch a view."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from odin_nerfstudio import kernels
from odin_nerfstudio.splat.densify.rowwise import norm


@dataclass(frozen=True)
class SplatStatistics:
    """What the backward of one view says about its splats."""

    index: Tensor
    """(M,) int64 rows of the shard; one may be seen by several views."""
    grad2d: Tensor
    """(M, 2) gradient with respect to the splats' centres in pixels; summed absolute values for absgrad."""
    radii: Tensor
    """(M,) screen radii in pixels, 0 where a view does not see the row."""
    width: int
    """Image width in pixels."""
    height: int
    """Image height in pixels."""
    views: int = 1
    """Number of views whose losses the gradient is of the mean of."""


def add_up(view: SplatStatistics, lengths: Tensor, counts: Tensor, largest: Tensor | None = None) -> None:
    """Adds what is known of a view's splats to the rows; nothing waits for the device.

    Args:
        view: whose splats.
        lengths: (N,) lengths of the gradients in normalised screen space; changed.
        counts: (N,) views that see the row; changed.
        largest: (N,) largest radius as a share of the image's longer side; changed. None: nobody wants to know.
    """
    if not _has_kernels(lengths):
        return _add_up(view, lengths, counts, largest)
    grads, radii, longer = view.grad2d, view.radii, float(max(view.width, view.height))
    assert grads.stride(1) == 1 and grads.dtype == torch.float32 and radii.dtype == torch.int32
    columns = grads.data_ptr(), grads.stride(0), radii.data_ptr(), radii.stride(0)
    scale = view.width / 2 * view.views, view.height / 2 * view.views
    sums = lengths, counts, largest
    kernels.launch(
        "statistics", "statistics_add", lengths.device, view.index.shape[0], view.index, *columns, *scale, longer, *sums
    )


def _has_kernels(tensor: Tensor) -> bool:
    return tensor.is_cuda and tensor.dtype == torch.float32 and kernels.available("statistics", tensor.device)


def _add_up(view: SplatStatistics, lengths: Tensor, counts: Tensor, largest: Tensor | None = None) -> None:
    length = norm(view.grad2d * _half_size(view.width, view.height, view.views, view.grad2d.device))
    lengths.index_add_(0, view.index, length.to(lengths))
    counts.index_add_(0, view.index, (view.radii > 0).to(counts))
    if largest is not None:
        radii = view.radii / float(max(view.width, view.height))
        largest.scatter_reduce_(0, view.index, radii, "amax")


@lru_cache(maxsize=256)
def _half_size(width: int, height: int, views: int, device: torch.device) -> Tensor:
    """(2,) half an image's size × views; kept, since a GPU has to be waited for to take numbers from the host."""
    return torch.tensor([width, height], dtype=torch.float32, device=device) / 2 * views
