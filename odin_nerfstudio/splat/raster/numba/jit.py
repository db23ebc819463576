"""How the kernels are compiled: on first use, without the GIL, and kept on disk."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import numba
from numba.core.caching import FunctionCache


def _fingerprint() -> str:
    """Hash of all source files of this package."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


class _PackageCache(FunctionCache):
    """Numba's cache on disk, stale as soon as any file of the package changes.

    Numba itself compares only the file of the kernel, not those of the functions that are inlined into it.
    """

    _sources = _fingerprint()

    def _index_key(self, sig, codegen):
        return (*super()._index_key(sig, codegen), self._sources)


def jit(function: Callable) -> Callable:
    """For kernels: compiled once per machine and version of the package."""
    kernel = numba.njit(nogil=True, error_model="numpy")(function)
    kernel._cache = _PackageCache(function)
    return kernel


inlined = numba.njit(nogil=True, error_model="numpy", forceinline=True)
"""For the small functions that kernels are made of."""
