"""odin-train: its arguments, and real ranks of a toy method and of the real one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from odin_nerfstudio.cli.train import main, parse
from odin_nerfstudio.comm.launch import Layout
from odin_nerfstudio.errors import UserError


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text("machine.num-devices: 3\nmachine.device-type: cpu\nmax-num-iterations: 7\nsteps-per-save: 5\n")
    return path


def test_command_line_wins_over_recipe(recipe: Path) -> None:
    line = ["odin-splatfacto", "--max-num-iterations", "9", "--recipe", str(recipe), "--data", "somewhere"]
    config, layout = parse([*line, "nerfstudio-data", "--eval-mode", "all"])
    assert (config.max_num_iterations, config.steps_per_save) == (9, 5)
    assert config.pipeline.datamanager.data == Path("somewhere")
    assert config.pipeline.datamanager.dataparser.eval_mode == "all"
    assert layout == Layout(3)
    assert config.timestamp != "{timestamp}"
    config, layout = parse([*line, "--nproc-per-node=2"])
    assert layout == Layout(2) and config.machine.num_devices == 2


def test_several_nodes() -> None:
    nodes = ["--nnodes", "4", "--node-rank", "2", "--rdzv-endpoint", "first:29500"]
    config, layout = parse([*nodes, "odin-splatfacto", "--machine.device-type", "cpu", "--nproc_per_node", "8"])
    assert layout == Layout(8, 4, 2, "first:29500")
    machine = config.machine
    assert (machine.num_devices, machine.num_machines, machine.machine_rank) == (8, 4, 2)


def test_a_saved_config_is_read(tmp_path: Path) -> None:
    config, _ = parse(["odin-splatfacto", "--max-num-iterations", "9", "--machine.device-type", "cpu"])
    (tmp_path / "config.yml").write_text(yaml.dump(config))
    again, layout = parse(["odin-splatfacto", "--load-config", str(tmp_path / "config.yml"), "--nproc-per-node", "2"])
    assert again.max_num_iterations == 9 and again.timestamp == config.timestamp
    assert layout == Layout(2) and again.machine.num_devices == 2


def test_mistakes_get_a_sentence(recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="name the method first"):
        parse(["--recipe", str(recipe)])
    with pytest.raises(UserError, match="cannot read the recipe"):
        parse(["odin-splatfacto", "--recipe", str(tmp_path / "none.yaml")])
    with pytest.raises(UserError, match=r"--load-config .*none\.yml: cannot be read"):
        parse(["odin-splatfacto", "--load-config", str(tmp_path / "none.yml")])


def test_arguments_reach_all_ranks(recipe: Path, tmp_path: Path) -> None:
    here = Path(__file__).parent
    environment = {
        **os.environ,
        "PYTHONPATH": f"{here}:{here.parents[1]}",
        "NERFSTUDIO_METHOD_CONFIGS": "toy=toy_method:toy",
    }
    line = "-m odin_nerfstudio.cli.train toy --nproc-per-node 2 --max-num-iterations 9 --data somewhere"
    command = [sys.executable, *line.split(), "--recipe", str(recipe), "--output-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("rank")] == ["rank 0 trains 9 steps"]
    ranks = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]
    for local_rank, rank in enumerate(ranks):
        assert rank["local_rank"] == local_rank and rank["world_size"] == 2 and rank["local"] == [local_rank, 2]
        assert rank["steps"] == [9, 5] and rank["data"] == "somewhere" and rank["machine"] == [2, 1, 0]
        assert rank["folder"] == ranks[0]["folder"]
    assert (Path(ranks[0]["folder"]) / "config.yml").is_file()


def test_one_process_trains_the_real_method(demo_capture: Path, tmp_path: Path) -> None:
    line = "odin-splatfacto --nproc-per-node 1 --max-num-iterations 3 --machine.device-type cpu --vis tensorboard"
    main([*line.split(), "--output-dir", str(tmp_path), "--data", str(demo_capture)])
    assert len(list(tmp_path.glob("*/odin-splatfacto/*/nerfstudio_models/step-*.ckpt"))) == 1
    with pytest.raises(UserError, match="--mixed-precision True"):
        main([*line.split(), "--output-dir", str(tmp_path / "o"), "--mixed-precision", "True"])
    assert not (tmp_path / "o").exists()
    with pytest.raises(SystemExit, match=r"^error: --data .*nowhere: does not exist\.$"):
        main([*line.split(), "--output-dir", str(tmp_path), "--data", str(tmp_path / "nowhere")])
