"""``odin-train``: ns-train's arguments, on any number of processes and machines."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import tyro
import yaml
from nerfstudio.configs.method_configs import AnnotatedBaseConfigUnion
from nerfstudio.engine.trainer import TrainerConfig

from odin_nerfstudio.cli.recipe import recipe_arguments
from odin_nerfstudio.comm.launch import INTERRUPTED, Layout, launch
from odin_nerfstudio.errors import UserError, exit_with_sentence
from odin_nerfstudio.runs.trainer import RankTrainerConfig

DESCRIPTION = """Trains as ns-train does, with one process for each GPU, or for each share of the CPU cores:

  odin-train METHOD [--nproc-per-node N] [--recipe FILE] [arguments of ns-train]

--nproc-per-node N: processes on this machine; --machine.num-devices if left out.
--recipe FILE: flags for a situation, such as configs/one-gpu.yaml; those on the command line win over it.
--nnodes N --node-rank R --rdzv-endpoint HOST:PORT: the same command on each of N machines, R = 0 … N − 1;
  HOST:PORT is a free port of machine 0.

Only the first process prints and writes. When one fails, all end, and the last line says which and why."""


def main(arguments: list[str], target: str = "odin_nerfstudio.runs.rank:train_rank") -> None:
    """Trains what the arguments describe, up to the end on every rank.

    Args:
        arguments: without the program's name.
        target: what every rank does, as of :func:`~odin_nerfstudio.comm.launch.launch`.

    Raises:
        UserError: for a mistake in them, or when a rank failed.
    """
    config, layout = parse(arguments)
    layout.check()
    if isinstance(config, RankTrainerConfig):
        config.check()
    if layout.node == 0:
        config.print_to_terminal()
        if not isinstance(config, RankTrainerConfig):  # which saves itself, once the run stands
            config.save_config()
    launch(target, (config,), layout)


def parse(arguments: list[str]) -> tuple[TrainerConfig, Layout]:
    """The config that ns-train would have made, its ``machine`` set to the ranks of the layout."""
    flags, rest = _launcher_flags(arguments)
    if flags.recipe is not None:
        if not rest or rest[0].startswith("-"):
            raise UserError("name the method first, such as odin-train odin-splatfacto --recipe FILE")
        rest[1:1] = recipe_arguments(flags.recipe)
    union: Any = AnnotatedBaseConfigUnion
    config: TrainerConfig = tyro.cli(union, args=rest, prog="odin-train", description=DESCRIPTION)
    if config.data:
        config.pipeline.datamanager.data = config.data
    if config.prompt:
        config.pipeline.model.prompt = config.prompt
    if config.load_config:
        config = _read_config(config.load_config)
    config.set_timestamp()
    machine = config.machine
    for name in ("num_devices", "num_machines", "machine_rank"):
        if (value := getattr(flags, name)) is not None:
            setattr(machine, name, value)
    return config, Layout(
        ranks_per_node=machine.num_devices,
        nodes=machine.num_machines,
        node=machine.machine_rank,
        endpoint=flags.rdzv_endpoint,
        device_type="cuda" if machine.device_type == "cuda" else "cpu",
    )


def _launcher_flags(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The flags that are ours, wherever they stand, and the rest in its order."""
    parser = argparse.ArgumentParser("odin-train", usage=argparse.SUPPRESS, add_help=False, allow_abbrev=False)
    parser.add_argument("--nproc-per-node", "--nproc_per_node", type=int, dest="num_devices")
    parser.add_argument("--nnodes", type=int, dest="num_machines")
    parser.add_argument("--node-rank", "--node_rank", type=int, dest="machine_rank")
    parser.add_argument("--rdzv-endpoint", "--rdzv_endpoint", default="")
    parser.add_argument("--recipe", type=Path)
    return parser.parse_known_args(arguments)


def _read_config(path: Path) -> TrainerConfig:
    try:
        return yaml.load(path.read_text(), Loader=yaml.Loader)
    except OSError as error:
        raise UserError(f"--load-config {path}: cannot be read ({error.strerror}).") from error


def entrypoint() -> None:
    """The console script."""
    with exit_with_sentence():
        try:
            main(sys.argv[1:])
        except KeyboardInterrupt:  # what there was to save was saved on its way here
            print("interrupted.", file=sys.stderr)
            raise SystemExit(INTERRUPTED) from None


if __name__ == "__main__":
    entrypoint()
