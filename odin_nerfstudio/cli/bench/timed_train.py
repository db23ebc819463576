"""``python -m odin_nerfstudio.cli.bench.timed_train``: ``odin-train`` that leaves the times of its steps."""

from __future__ import annotations

import json
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from nerfstudio.engine.trainer import Trainer, TrainerConfig

from odin_nerfstudio.comm.world import World
from odin_nerfstudio.errors import exit_with_sentence
from odin_nerfstudio.runs import rank

FILE_NAME = "step_seconds.json"


def train_rank(world: World, config: TrainerConfig) -> None:
    """What every rank does. The process is for this run only, so its trainer stays as it is made here."""
    ends: list[float] = []
    trainer: type[Trainer] = config._target
    train_iteration = trainer.train_iteration

    def timed(self: Trainer, step: int) -> Any:
        result = train_iteration(self, step)
        ends.append(time.monotonic())
        return result

    trainer.train_iteration = timed
    rank.train_rank(world, config)
    if world.rank == 0:
        seconds = [end - begin for begin, end in pairwise(ends)]
        (config.get_base_dir() / FILE_NAME).write_text(json.dumps(seconds))


def read_step_seconds(run: Path) -> list[float]:
    """Of every step of rank 0 but the first, from the end of the one before it to its own.

    A GPU may still be at work when a step ends; the next one then waits for it.

    Args:
        run: the folder of the run, which has come to its end.
    """
    return json.loads((run / FILE_NAME).read_text())


if __name__ == "__main__":
    from odin_nerfstudio.cli import train  # not on every rank

    with exit_with_sentence():
        train.main(sys.argv[1:], f"{__spec__.name}:train_rank")
