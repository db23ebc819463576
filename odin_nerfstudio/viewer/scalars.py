"""The numbers of units as scalars under ``Odin/``, for TensorBoard, wandb and comet."""

from __future__ import annotations

from collections.abc import Iterable

import nerfstudio.configs.base_config  # noqa: F401  # writer and this import each other; only this order works
from nerfstudio.utils import writer

from odin_nerfstudio.viewer.recording import Recording

GIB = 2**30


def unit_scalars(recording: Recording, step: int) -> dict[str, float]:
    """The numbers of one unit by the name of their scalar; the names stay as they are from version to version.

    Shares are of the primitives in scope. ``raw``, ``waw`` and ``delayed`` are primitives summed over pairs of ranks:
    read by one after the other wrote them in the unit before, written by both in this unit, and read as they had been
    before.

    Args:
        recording: that knows the unit.
        step: of the unit.
    """
    unit, conflicts = recording.unit(step), recording.conflicts(step)
    scalars: dict[str, float] = {
        "hidden_fraction": unit.hidden,
        "exposed_wait_ms": sum(unit.wait) / len(unit.wait) * 1e3,
        "bytes": unit.bytes,
    }
    if conflicts is not None:
        scope = max(1, unit.scope)
        scalars |= {
            "early_share": unit.early_share,
            "late_share": unit.late / scope,
            "delayed_share": unit.delayed / scope,
            "fallback_share": unit.fallback / scope,
            "raw": sum(map(sum, conflicts.ranks["raw"])),
            "waw": sum(map(sum, conflicts.ranks["waw"])) / 2,  # the matrix has every pair twice
            "delayed": sum(map(sum, conflicts.ranks["delayed"])),
        }
    for rank, (primitives, memory) in enumerate(zip(unit.primitives, unit.memory, strict=True)):
        scalars[f"memory_gib/rank {rank}"] = memory / GIB
        if primitives:
            scalars[f"primitives/rank {rank}"] = primitives
    return {f"Odin/{name}": float(value) for name, value in scalars.items()}


def put_scalars(recording: Recording, steps: Iterable[int]) -> None:
    """Hands the numbers of some units to nerfstudio's writers, which :func:`unit_scalars` describes.

    Args:
        recording: that knows the units.
        steps: of the units.
    """
    for step in steps:
        for name, value in unit_scalars(recording, step).items():
            writer.put_scalar(name, value, step)
