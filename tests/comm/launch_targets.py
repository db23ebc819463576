"""What the launcher's tests run on their ranks."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from odin_nerfstudio.comm.exchange import Exchange
from odin_nerfstudio.comm.launch import Layout, launch
from odin_nerfstudio.comm.world import World
from odin_nerfstudio.errors import UserError, exit_with_sentence


def report(world: World, folder: str, text: str) -> None:
    """Every rank prints, and writes down what it was given."""
    print(f"rank {world.rank} of {world.size} prints {text}")
    print(f"rank {world.rank} warns", file=sys.stderr)
    threads = torch.get_num_threads()
    same = world.broadcast_object(os.getpid())
    Path(folder, f"rank-{world.rank}").write_text(f"{text} {world.local_rank} {world.device} {threads} {same}")


def fail(world: World, folder: str, how: str) -> None:
    """Rank 1 fails while the others wait for it."""
    Path(folder, f"pid-{world.rank}").write_text(str(os.getpid()))
    exchange = Exchange(world)
    exchange.wait(exchange.all_to_all([torch.ones(1, 1)] * world.size, "splats", 0))
    if world.rank == 1:
        print("about to fail", file=sys.stderr, flush=True)
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "aborted":
            os._exit(3)
        elif how == "mistake":
            with exit_with_sentence():
                raise UserError("--data nowhere: does not exist.")
        raise ValueError("no such thing")
    if how == "killed":
        dist.barrier()
    exchange.wait(exchange.all_to_all([torch.ones(1, 1)] * world.size, "splats", 1))


def train(world: World, folder: str) -> None:
    """Waits until interrupted, then takes a while to save."""
    Path(folder, f"started-{world.rank}").write_text(str(os.getpid()))
    try:
        while True:
            time.sleep(0.05)
    except KeyboardInterrupt:
        time.sleep(0.5)
        Path(folder, f"saved-{world.rank}").touch()
        raise


def interrupt(world: World, folder: str, when: str) -> None:
    """Rank 1 is interrupted while the other one waits for it, or both have agreed to stop."""
    if world.rank == 1 and when == "early":
        signal.raise_signal(signal.SIGINT)
    dist.barrier()
    raise KeyboardInterrupt


if __name__ == "__main__":
    name, layout, *args = sys.argv[1:]
    with exit_with_sentence():
        launch(f"launch_targets:{name}", tuple(args), Layout(**json.loads(layout)))
