"""CUDA kernels: found beside the package, compiled at first use, kept on disk.

A source is one file of ``cuda/`` with a C interface (pointers, sizes, a stream), so it needs no headers but CUDA's own:
nvcc takes a few seconds, and the result depends on neither the version of torch nor that of Python.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor

_FLAGS = ("-O3", "-std=c++17", "-shared", "-Xcompiler", "-fPIC")
_PACKAGE = Path(__file__).parent
_USUAL_COMPILER_FOLDER = "/usr/local/cuda/bin"


class KernelUnavailable(Exception):
    """A kernel cannot be had on this machine; the message is one sentence that says why."""


@cache
def load(name: str, capability: tuple[int, int]) -> ctypes.PyDLL:
    """The library of a kernel, compiled first where this machine does not have it yet.

    Args:
        name: of a file of ``cuda/``, without ``.cu``.
        capability: compute capability of the device it is for.

    Raises:
        KernelUnavailable: without a CUDA compiler, or where it fails.
    """
    path = build(name, capability)
    try:
        # PyDLL keeps Python's lock: given up at every launch, a viewer's thread would take it for milliseconds.
        return ctypes.PyDLL(str(path))
    except OSError as error:
        raise KernelUnavailable(f"The compiled kernel {path} cannot be loaded ({error}); delete it.") from error


@cache
def available(name: str, device: torch.device) -> bool:
    """Whether a kernel can be had for a CUDA device, compiled if need be; warns once where it cannot.

    Args:
        name: of a file of ``cuda/``, without ``.cu``.
        device: where it would run.
    """
    try:
        load(name, torch.cuda.get_device_capability(device))
    except KernelUnavailable as reason:
        warnings.warn(f"{name} on {device} uses plain torch, which is several times slower. {reason}", stacklevel=2)
        return False
    return True


Argument = Tensor | int | float | ctypes.Structure | ctypes.c_void_p | None
"""What a kernel's function can be given."""


def launch(name: str, function: str, device: torch.device, *args: Argument) -> None:
    """Queues work of a kernel on the current stream of a CUDA device.

    Args:
        name: of a file of ``cuda/``, without ``.cu``.
        function: of its C interface: ``int function(int device, cudaStream_t stream, ...)``, which returns a
            ``cudaError_t``.
        device: where the tensors are.
        args: the other arguments. A contiguous tensor becomes the pointer to its memory, None a null pointer, an int an
            ``int64_t``, a float a ``double``, a structure a pointer to it in host memory, a pointer itself.

    Raises:
        KernelUnavailable: see :func:`load`.
        RuntimeError: when CUDA refuses.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    entry = _entry(name, function, index)
    if entry.argtypes is None:  # addresses travel as the integers they are, so only the places of floats matter
        kinds = (ctypes.c_double if isinstance(value, float) else ctypes.c_int64 for value in args)
        entry.argtypes = (ctypes.c_int, ctypes.c_void_p, *kinds)
    # A step launches dozens, and calls of functions are what that costs the host: hence the usual types in line.
    numbers = [
        value
        if (kind := type(value)) is int or kind is float
        else value.data_ptr()  # type: ignore[union-attr]
        if kind is Tensor and value.is_contiguous()  # type: ignore[union-attr]
        else _as_number(value)
        for value in args
    ]
    # What torch.cuda.current_stream() asks; an object for the answer would take longer than the launch.
    status = entry(index, torch._C._cuda_getCurrentRawStream(index), *numbers)
    if status != 0:
        raise RuntimeError(f"{function} failed with CUDA error {status}.")


@cache
def _entry(name: str, function: str, index: int) -> Any:
    """The function of a kernel's library for a device."""
    return load(name, torch.cuda.get_device_capability(index))[function]


def _as_number(value: Argument) -> int | float:
    """A number as it is, the address of anything else."""
    if isinstance(value, (int, float)):
        return value
    if isinstance(value, Tensor):
        assert value.is_contiguous()
        return value.data_ptr()
    if isinstance(value, ctypes.Structure):
        return ctypes.addressof(value)
    return 0 if value is None else value.value or 0


def build(name: str, capability: tuple[int, int]) -> Path:
    """Compiles a kernel once per machine and version; arguments and errors as for :func:`load`.

    Processes that want the same kernel wait for the first of them. A library appears under its name only when it is
    complete, so an interrupted build leaves nothing that could be mistaken for one.

    Returns:
        The shared library.
    """
    if sys.platform == "win32":
        raise KernelUnavailable("CUDA kernels are compiled on Linux only.")
    source = sources() / f"{name}.cu"
    compiler = _compiler()
    architecture = f"-arch=sm_{capability[0]}{capability[1]}"
    key = hashlib.sha256()
    for part in (_version(compiler), " ".join((architecture, *_FLAGS)), platform.machine(), source.read_text("utf-8")):
        key.update(part.encode() + b"\0")
    file_name = f"{name}-{key.hexdigest()[:16]}.so"

    for folder in _cache_folders():
        library = folder / file_name
        try:
            if library.exists():
                return library
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with FileLock(folder / f"{file_name}.lock"), tempfile.TemporaryDirectory(dir=folder) as scratch:
                if not library.exists():
                    _compile([compiler, architecture, *_FLAGS], source, Path(scratch) / file_name)
                    os.replace(Path(scratch) / file_name, library)
                return library
        except OSError:  # read-only or full: the next folder
            continue
    raise KernelUnavailable(f"The kernel {name} was not compiled, because no folder can be written to keep it.")


def sources() -> Path:
    """The folder of the ``.cu`` files: ``cuda/`` of a checkout, or its copy in an installed package."""
    installed = _PACKAGE / "_cuda"
    return installed if installed.is_dir() else _PACKAGE.parent / "cuda"


def _cache_folders() -> Iterator[Path]:
    """Where libraries are kept: the user's cache, else the folder for temporary files, else one for this process."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if os.path.isabs(home):  # not where there is no home
        yield Path(home) / "odin_nerfstudio" / "kernels"
    if shared := _shared_temporary_folder():
        yield shared
    yield _own_temporary_folder()


def _shared_temporary_folder() -> Path | None:
    folder = Path(tempfile.gettempdir()) / f"odin_nerfstudio-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError:
        return None
    # Everybody may write where temporary files are kept, and what lies in this folder is run.
    private = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022
    return folder if private else None


@cache
def _own_temporary_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="odin_nerfstudio-"))


def _compiler() -> str:
    """nvcc of ``CUDA_HOME``, of the path, or of the usual place."""
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    for home in homes:
        if found := shutil.which("nvcc", path=str(Path(home) / "bin")):
            return found
    found = shutil.which("nvcc") or shutil.which("nvcc", path=_USUAL_COMPILER_FOLDER)
    if not found:
        raise KernelUnavailable("There is no CUDA compiler: nvcc is neither in CUDA_HOME nor on the path.")
    return found


def _version(compiler: str) -> str:
    try:
        return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise KernelUnavailable(f"The CUDA compiler {compiler} cannot be run ({error}).") from error


def _compile(command: list[str], source: Path, target: Path) -> None:
    result = subprocess.run([*command, str(source), "-o", str(target)], capture_output=True, text=True)
    if result.returncode != 0 or not target.exists():
        message = (result.stderr or result.stdout).strip()[-2000:]
        raise KernelUnavailable(f"{command[0]} could not compile {source} (status {result.returncode}): {message}")
