"""What a rank does, against nerfstudio's own loop."""

from __future__ import annotations

import random

import numpy as np
import torch
from nerfstudio.engine.trainer import TrainerConfig
from nerfstudio.scripts.train import train_loop

from odin_nerfstudio.comm.world import World
from odin_nerfstudio.runs.rank import train_rank


class Draws:
    """A trainer that draws numbers, in the order of its calls."""

    drawn: tuple[float, ...] = ()

    def __init__(self, config: TrainerConfig, local_rank: int, world_size: int) -> None:
        Draws.drawn = (local_rank, world_size, random.random())

    def setup(self) -> None:
        Draws.drawn += (float(np.random.rand()),)  # noqa: NPY002

    def train(self) -> None:
        Draws.drawn += (float(torch.rand(())),)


def test_a_rank_does_what_ns_train_does() -> None:
    """Among others it seeds what nerfstudio's own methods draw from."""
    config = TrainerConfig(_target=Draws)
    config.machine.seed = 5
    train_loop(0, 1, config, 0)
    expected = Draws.drawn
    random.seed(0), np.random.seed(0), torch.manual_seed(0)  # noqa: NPY002
    train_rank(World.current(), config)
    assert Draws.drawn == expected and len(expected) == 5
