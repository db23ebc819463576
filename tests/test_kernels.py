"""CUDA kernels are compiled once, by one process, and never half. A script stands in for the compiler."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

from odin_nerfstudio import kernels
from odin_nerfstudio.kernels import KernelUnavailable, build

_COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then echo "fake, $FAKE_VERSION"; exit; fi
echo started >> "$FAKE_LOG"
if [ -n "$FAKE_ERROR" ]; then echo "$FAKE_ERROR" >&2; exit 1; fi
while [ $# -gt 0 ]; do if [ "$1" = -o ]; then out=$2; fi; shift; done
printf half > "$out"
sleep "$FAKE_DELAY"
printf ' whole' >> "$out"
"""
_BUILD = "from odin_nerfstudio.kernels import build; print(build('hash_grid', (9, 0)))"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache and a compiler that takes no time; returns where libraries will be."""
    compiler = tmp_path / "toolkit" / "bin" / "nvcc"
    compiler.parent.mkdir(parents=True)
    compiler.write_text(_COMPILER)
    compiler.chmod(0o755)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    variables = {
        "CUDA_HOME": str(tmp_path / "toolkit"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "FAKE_LOG": str(tmp_path / "log"),
        "FAKE_DELAY": "0",
        "FAKE_ERROR": "",
        "FAKE_VERSION": "1",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    kernels._own_temporary_folder.cache_clear()
    yield tmp_path / "cache" / "odin_nerfstudio" / "kernels"
    kernels._own_temporary_folder.cache_clear()


def compilations() -> int:
    log = Path(os.environ["FAKE_LOG"])
    return len(log.read_text().splitlines()) if log.exists() else 0


def start_build() -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", _BUILD], stdout=subprocess.PIPE, text=True, start_new_session=True)


def test_sources_are_found() -> None:
    assert (kernels.sources() / "hash_grid.cu").is_file()


def test_a_kernel_is_compiled_once(cache: Path) -> None:
    library = build("hash_grid", (9, 0))
    assert library.parent == cache
    assert library.read_text() == "half whole"
    assert build("hash_grid", (9, 0)) == library
    assert compilations() == 1


def test_another_device_or_compiler_has_a_library_of_its_own(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    libraries = {build("hash_grid", (9, 0)), build("hash_grid", (8, 0))}
    monkeypatch.setenv("FAKE_VERSION", "2")
    libraries.add(build("hash_grid", (9, 0)))
    assert len(libraries) == 3


def test_two_processes_at_once_compile_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_DELAY", "1")
    processes = [start_build() for _ in range(2)]
    paths = {process.communicate()[0].strip() for process in processes}
    assert len(paths) == 1
    assert Path(paths.pop()).read_text() == "half whole"
    assert compilations() == 1


def test_an_interrupted_build_leaves_nothing_that_looks_whole(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_DELAY", "600")
    process = start_build()
    deadline = time.monotonic() + 60
    while not list(cache.glob("*/*.so")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert not list(cache.glob("*.so"))
    monkeypatch.setenv("FAKE_DELAY", "0")
    assert build("hash_grid", (9, 0)).read_text() == "half whole"


def test_a_compilers_complaint_is_passed_on(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_ERROR", "unsupported architecture")
    with pytest.raises(KernelUnavailable, match="unsupported architecture"):
        build("hash_grid", (9, 0))
    assert not list(cache.glob("*.so"))


def test_without_a_compiler(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "elsewhere"))
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(kernels, "_USUAL_COMPILER_FOLDER", str(tmp_path))
    with pytest.raises(KernelUnavailable, match="no CUDA compiler"):
        build("hash_grid", (9, 0))


@pytest.fixture
def no_cache(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cache that cannot be written, whoever runs the test: a file is in its place."""
    (tmp_path / "cache").write_text("")


def test_a_cache_that_cannot_be_written_is_replaced_by_a_temporary_folder(no_cache: None, tmp_path: Path) -> None:
    library = build("hash_grid", (9, 0))
    assert library.parent == tmp_path / "tmp" / f"odin_nerfstudio-{os.getuid()}"
    assert build("hash_grid", (9, 0)) == library
    assert compilations() == 1


def test_a_temporary_folder_that_others_can_write_is_not_used(no_cache: None, tmp_path: Path) -> None:
    shared = tmp_path / "tmp" / f"odin_nerfstudio-{os.getuid()}"
    shared.mkdir()
    shared.chmod(0o777)
    library = build("hash_grid", (9, 0))
    assert library.parent.parent == tmp_path / "tmp" and library.parent != shared
    assert library.parent.stat().st_mode & 0o077 == 0


def test_a_library_that_cannot_be_loaded_is_named(cache: Path) -> None:
    with pytest.raises(KernelUnavailable, match=r"hash_grid-.*\.so cannot be loaded"):
        kernels.load.__wrapped__("hash_grid", (9, 0))


class Entry:
    """Stands in for a function of a library."""

    def __init__(self) -> None:
        self.argtypes, self.calls, self.status = None, [], 0

    def __call__(self, *arguments: float) -> int:
        self.calls.append(arguments)
        return self.status


def test_arguments_are_numbers_and_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pair(ctypes.Structure):
        _fields_ = (("first", ctypes.c_int64), ("second", ctypes.c_int64))

    entry, pair, values = Entry(), Pair(1, 2), torch.zeros(3)
    monkeypatch.setattr(kernels, "_entry", lambda name, function, index: entry)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 100 + index, raising=False)
    device = torch.device("cuda", 1)
    kernels.launch("any", "f", device, 2**40, 0.5, values, None, pair, ctypes.c_void_p(9), ctypes.c_void_p())
    assert entry.calls == [(1, 101, 2**40, 0.5, values.data_ptr(), 0, ctypes.addressof(pair), 9, 0)]
    whole = ctypes.c_int64
    assert entry.argtypes == (ctypes.c_int, ctypes.c_void_p, whole, ctypes.c_double, *[whole] * 5)
    entry.status = 700
    with pytest.raises(RuntimeError, match="f failed with CUDA error 700"):
        kernels.launch("any", "f", device)
    with pytest.raises(AssertionError):
        kernels.launch("any", "f", device, torch.zeros(2, 2).T)
