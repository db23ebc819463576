"""What every rank of a run does. Ranks import this and their method, but not the commands: that saves them seconds."""

from __future__ import annotations

import random

import numpy as np
import torch
import torch.distributed as dist
from nerfstudio.engine.trainer import TrainerConfig
from nerfstudio.utils import comms, profiler

from odin_nerfstudio.comm.world import World


def train_rank(world: World, config: TrainerConfig) -> None:
    """Trains as ns-train does (``nerfstudio.scripts.train.train_loop``), in the folder that rank 0 names.

    Args:
        world: the ranks; those of a node follow each other.
        config: of any method.
    """
    config.timestamp = world.broadcast_object(config.timestamp)
    if world.size > 1:
        per_node = config.machine.num_devices
        nodes = [list(range(first, first + per_node)) for first in range(0, world.size, per_node)]
        comms.LOCAL_PROCESS_GROUP, _ = dist.new_subgroups_by_enumeration(nodes)
    torch.backends.cudnn.benchmark = True
    seed = config.machine.seed + world.rank
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002, nerfstudio draws from it
    torch.manual_seed(seed)
    try:
        trainer = config.setup(local_rank=world.local_rank, world_size=world.size)
        trainer.setup()
        trainer.train()
    finally:
        profiler.flush_profiler(config.logging)
