"""Front-to-back order of splats: by depth, equal depths by id."""

from __future__ import annotations

import numpy as np

from odin_nerfstudio.cpu.jit import jit

_DIGIT_BITS = 11


@jit
def _radix_pass(keys, items, shift, keys_out, items_out):
    """One stable counting sort on the digit of ``keys`` that starts at bit ``shift``."""
    starts = np.zeros((1 << _DIGIT_BITS) + 1, dtype=np.int64)
    for i in range(keys.shape[0]):
        starts[((keys[i] >> shift) & ((1 << _DIGIT_BITS) - 1)) + 1] += 1
    for digit in range(1 << _DIGIT_BITS):
        starts[digit + 1] += starts[digit]
    for i in range(keys.shape[0]):
        digit = (keys[i] >> shift) & ((1 << _DIGIT_BITS) - 1)
        keys_out[starts[digit]] = keys[i]
        items_out[starts[digit]] = items[i]
        starts[digit] += 1


def front_to_back(depths: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """The permutation that sorts splats by (depth, id).

    Args:
        depths: (M,) float32, positive.
        ids: (M,) int64, all different.

    Returns:
        (M,) int64 indices, nearest splat first.
    """
    ascending = bool(np.all(ids[1:] > ids[:-1]))
    order = np.arange(len(ids)) if ascending else np.argsort(ids)
    # Positive floats sort like their bits.
    keys = depths[order].view(np.int32).astype(np.int64)
    for shift in range(0, 32, _DIGIT_BITS):
        keys_out, order_out = np.empty_like(keys), np.empty_like(order)
        _radix_pass(keys, order, shift, keys_out, order_out)
        keys, order = keys_out, order_out
    return order
