"""How the kernels are compiled: on first use, without the GIL, and kept on disk."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numba
from numba.core.caching import FunctionCache


@cache
def _fingerprint(folder: Path) -> str:
    """Hash of the source files of a folder and of this one."""
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("*.py"), *Path(__file__).parent.glob("*.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()


class _FolderCache(FunctionCache):
    """Numba's cache on disk, stale as soon as any file beside the kernel's changes.

    Numba itself compares only the file of the kernel, not those of the functions that are inlined into it.
    """

    def __init__(self, function: Callable) -> None:
        super().__init__(function)
        self._sources = _fingerprint(Path(inspect.getfile(function)).parent)

    def _index_key(self, sig, codegen):
        return (*super()._index_key(sig, codegen), self._sources)


def jit(function: Callable) -> Callable:
    """For kernels: compiled once per machine and version of the folder they live in."""
    kernel = numba.njit(nogil=True, error_model="numpy")(function)
    kernel._cache = _FolderCache(function)
    return kernel


inlined = numba.njit(nogil=True, error_model="numpy", forceinline=True)
"""For the small functions that kernels are made of."""
