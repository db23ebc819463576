"""Random draws that depend on what they are for, not on when or where they are made."""

from __future__ import annotations

import hashlib

import torch


def keyed_generator(seed: int, *key: int | str) -> torch.Generator:
    """A CPU generator for one purpose: the same (seed, key) gives the same draws in any process and after a resume."""
    digest = hashlib.blake2b(repr((seed, *key)).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
