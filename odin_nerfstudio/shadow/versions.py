"""Versions of rows: which one a reader got, and whether it was still the newest when the row was published.

Tables are (N,) int32, the step that published each row last. They are changed in place; on CUDA by one launch a call,
and nothing waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from odin_nerfstudio import kernels
from odin_nerfstudio.shadow.bitmap import Bitmap


def hand_out(rows: Bitmap, versions: Tensor, read: Tensor) -> None:
    """A reader gets some rows: ``read[row] = versions[row]``.

    Args:
        rows: out of N.
        versions: (N,) int32 contiguous, those of now.
        read: (N,) int32 contiguous, those that the reader got; changed.
    """
    if not _has_kernels(versions):
        _hand_out(rows, versions, read)
    elif rows.size:
        kernels.launch("versions", "versions_hand_out", versions.device, rows.size, rows.words, versions, read)


def publish(rows: Bitmap, stale: Bitmap, read: Tensor, versions: Tensor, step: int) -> Bitmap:
    """A reader publishes some rows: ``versions[row] = step``.

    Args:
        rows: out of N.
        stale: those that it has read before their publication on purpose.
        read: (N,) int32 contiguous, the versions that it got.
        versions: (N,) int32 contiguous, those of now; changed.
        step: of the reader.

    Returns:
        The rows that somebody else published since they were read, without the stale ones.
    """
    if not _has_kernels(versions):
        return _publish(rows, stale, read, versions, step)
    broken = torch.empty_like(rows.words)
    if rows.size:
        tables = rows.size, rows.words, stale.words, read, versions
        kernels.launch("versions", "versions_publish", versions.device, *tables, step, broken)
    return Bitmap(broken, rows.size)


def _has_kernels(tensor: Tensor) -> bool:
    return tensor.is_cuda and kernels.available("versions", tensor.device)


def _hand_out(rows: Bitmap, versions: Tensor, read: Tensor) -> None:
    torch.where(rows.mask().bool(), versions, read, out=read)


def _publish(rows: Bitmap, stale: Bitmap, read: Tensor, versions: Tensor, step: int) -> Bitmap:
    broken = Bitmap.from_mask(read != versions) & rows - stale
    versions.masked_fill_(rows.mask().bool(), step)
    return broken
