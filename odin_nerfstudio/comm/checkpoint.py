"""Checkpoint files: whole or not there, and readable without running code from them."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from odin_nerfstudio.errors import UserError

_NAME = re.compile(r"step-(\d+)\.ckpt")


def write_checkpoint(path: Path, state: Mapping[str, Any]) -> None:
    """Writes ``state`` so that ``path`` is at any moment absent, the old file or the whole new one.

    NumPy scalars (nerfstudio's schedulers leave them in optimizer states) become Python numbers, so that
    ``torch.load(weights_only=True)``, the default since torch 2.6, reads the file.

    Raises:
        UserError: when the folder cannot be written to or the disk is full; what was there before stays.
    """
    partial = path.with_suffix(f".{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(_plain(state), partial)
        os.replace(partial, path)
    except (OSError, RuntimeError) as error:
        raise UserError(f"{path}: could not be written ({error}). Earlier checkpoints were kept.") from error
    finally:
        with suppress(OSError):  # as where a folder on the way is none
            partial.unlink()


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Reads what :func:`write_checkpoint` wrote, onto the CPU.

    Raises:
        UserError: when the file is absent, cut off or not a checkpoint.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise UserError(f"{path}: there is no such checkpoint.") from error
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise UserError(f"{path}: is damaged or not a checkpoint of this method ({reason}).") from error
    if not isinstance(state, dict) or not {"step", "pipeline"} <= state.keys():
        raise UserError(f"{path}: is not a nerfstudio checkpoint; it lacks the entries 'step' and 'pipeline'.")
    return state


def checkpoint_steps(folder: Path) -> list[int]:
    """Steps of the checkpoints in ``folder``, ascending; other files are ignored."""
    names = (_NAME.fullmatch(path.name) for path in folder.iterdir())
    return sorted(int(name.group(1)) for name in names if name)


def checkpoint_path(folder: Path, step: int | None = None) -> Path:
    """Where nerfstudio keeps the checkpoint of ``step`` (None: the latest) of a run.

    Raises:
        UserError: when the folder or the checkpoint does not exist.
    """
    steps = checkpoint_steps(folder) if folder.is_dir() else []
    if not steps:
        raise UserError(f"{folder}: holds no checkpoint (step-*.ckpt).")
    if step is not None and step not in steps:
        raise UserError(f"{folder}: holds no checkpoint of step {step}; there are {', '.join(map(str, steps))}.")
    return folder / f"step-{steps[-1] if step is None else step:09d}.ckpt"


def _plain(value: Any) -> Any:
    """``value`` with NumPy scalars and arrays replaced by Python numbers and tensors, at any depth."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, Mapping):
        return type(value)({key: _plain(item) for key, item in value.items()})  # type: ignore[call-arg]
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(item) for item in value)
    return value
