"""A method that any number of ranks can train: it says what it was given."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nerfstudio.engine.trainer import TrainerConfig
from nerfstudio.plugins.types import MethodSpecification
from nerfstudio.utils import comms


class ToyTrainer:
    def __init__(self, config: ToyConfig, local_rank: int, world_size: int) -> None:
        self.config = config
        self.given = {"local_rank": local_rank, "world_size": world_size}

    def setup(self) -> None:
        comms.synchronize()

    def train(self) -> None:
        config = self.config
        print(f"rank {comms.get_rank()} trains {config.max_num_iterations} steps")
        written: dict[str, Any] = {
            **self.given,
            "local": [comms.get_local_rank(), comms.get_local_size()],
            "steps": [config.max_num_iterations, config.steps_per_save],
            "data": str(config.pipeline.datamanager.data),
            "machine": [config.machine.num_devices, config.machine.num_machines, config.machine.machine_rank],
            "folder": str(config.get_base_dir()),
        }
        (config.output_dir / f"rank-{comms.get_rank()}.json").write_text(json.dumps(written))


@dataclass
class ToyConfig(TrainerConfig):
    _target: type = field(default_factory=lambda: ToyTrainer)
    output_dir: Path = Path("outputs")


toy = MethodSpecification(ToyConfig(method_name="toy"), description="For the tests of odin-train.")
