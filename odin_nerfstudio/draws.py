"""Random draws that depend on what they are for, not on when or where they are made."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF
_Words = tuple[Tensor, Tensor, Tensor, Tensor]


def keyed_generator(seed: int, *key: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator for one purpose: the same (seed, key) gives the same draws in any process and after a resume, on
    devices of one kind."""
    return torch.Generator(device).manual_seed(_digest(seed, *key) >> 1)


def uniform(seed: int, purpose: str, step: int, ids: Tensor, n: int) -> Tensor:
    """Draws from [0, 1) that belong to primitives: each is a function of (seed, purpose, step, id, column) alone.

    Args:
        seed: of the run.
        purpose: draws for different purposes are independent.
        step: of the run.
        ids: (R,) int64 global ids, in any order.
        n: columns.

    Returns:
        (R, n) float64 multiples of 2⁻⁵³, the same to the last bit on every device.
    """
    a, b, c, d = _words(seed, purpose, step, ids, blocks=-(-n // 2))
    pairs = torch.stack([(a >> 5) * 2**26 + (b >> 6), (c >> 5) * 2**26 + (d >> 6)], dim=-1)
    return pairs.flatten(1)[:, :n].double() * 2.0**-53


def normal(seed: int, purpose: str, step: int, ids: Tensor, n: int) -> Tensor:
    """Standard normal draws that belong to primitives (Box & Muller 1958); arguments as for :func:`uniform`.

    Returns:
        (R, n) float64 of magnitude below 6.8. Devices differ by the rounding of their float64 logarithm and cosine.
    """
    a, b, c, d = ((word.double() + 0.5) * 2.0**-32 for word in _words(seed, purpose, step, ids, blocks=-(-n // 4)))
    columns = []
    for first, second in ((a, b), (c, d)):
        radius, angle = torch.sqrt(-2 * torch.log(first)), 2 * math.pi * second
        columns += [radius * torch.cos(angle), radius * torch.sin(angle)]
    return torch.stack(columns, dim=-1).flatten(1)[:, :n]


def _words(seed: int, purpose: str, step: int, ids: Tensor, blocks: int) -> _Words:
    """Four (R, ``blocks``) int64 tensors of 32 random bits each."""
    key = _digest(seed, purpose)
    block = torch.arange(blocks, device=ids.device)
    low, high, step_word = (ids & _LOW)[:, None], (ids >> 32)[:, None], torch.full_like(block, step & _LOW)
    low, high, step_word, block = torch.broadcast_tensors(low, high, step_word, block)
    return _philox((low, high, step_word, block), key & _LOW, key >> 32)


def _philox(counter: _Words, key0: int, key1: int) -> _Words:
    """Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") on 32-bit words in int64."""
    c0, c1, c2, c3 = counter
    for _ in range(10):
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # modulo 2⁶⁴; their upper halves are right as bits
        c0, c1 = (product1 >> 32) & _LOW ^ c1 ^ key0, product1 & _LOW
        c2, c3 = (product0 >> 32) & _LOW ^ c3 ^ key1, product0 & _LOW
        key0, key1 = (key0 + 0x9E3779B9) & _LOW, (key1 + 0xBB67AE85) & _LOW
    return c0, c1, c2, c3


def _digest(*key: int | str) -> int:
    """64 bits that stand for ``key``."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little")
