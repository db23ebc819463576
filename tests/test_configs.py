"""Every recipe is held against the command line that users pass it to."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tyro
import yaml

from odin_nerfstudio.cli.recipe import recipe_arguments
from odin_nerfstudio.cli.train import parse
from odin_nerfstudio.errors import UserError

CONFIGS = Path(__file__).parent.parent / "configs"
RECIPES = sorted(CONFIGS.glob("*.yaml"))


def method_of(recipe: Path) -> str:
    """The method that a recipe is for, by its name."""
    return "nerfxl" if recipe.stem.startswith("nerfxl-") else "odin-splatfacto"


def test_there_are_recipes() -> None:
    assert {"laptop-cpu", "one-gpu", "two-gpus", "eight-gpus", "several-nodes"} <= {recipe.stem for recipe in RECIPES}


def assert_follows(config: Any, recipe: Path) -> None:
    """Every flag of the recipe has reached the field that it names."""
    for flag, value in yaml.safe_load(recipe.read_text()).items():
        found = config
        for name in flag.replace("-", "_").split("."):
            found = found[name] if isinstance(found, dict) else getattr(found, name)
        assert found == value, flag


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_ns_train_takes_the_recipe(recipe: Path) -> None:
    from nerfstudio.configs.method_configs import AnnotatedBaseConfigUnion

    line = [method_of(recipe), *recipe_arguments(recipe), "--data", "somewhere", "nerfstudio-data"]
    config: Any = tyro.cli(AnnotatedBaseConfigUnion, args=line)
    assert_follows(config, recipe)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_odin_train_takes_the_recipe(recipe: Path) -> None:
    line = [method_of(recipe), "--recipe", str(recipe), "--data", "somewhere"]
    config, _ = parse([*line, "colmap", "--colmap-path", "sparse/0"])
    assert_follows(config, recipe)
    nodes = ["--nnodes", "2", "--node-rank", "1", "--rdzv-endpoint", "first:29500"]
    config, layout = parse([*line, *nodes])
    assert (layout.ranks_per_node, layout.nodes, layout.node) == (config.machine.num_devices, 2, 1)


def test_recipes_take_the_policy_that_their_comments_propose() -> None:
    line = ["odin-splatfacto", "--recipe", str(CONFIGS / "two-gpus.yaml"), "--pipeline.policy", "throughput"]
    assert parse([*line, "--data", "somewhere"])[0].pipeline.policy == "throughput"


def test_two_gpus_keep_the_schedule_of_one_in_views() -> None:
    from odin_nerfstudio.cli.bench.train import scaled_schedule
    from odin_nerfstudio.methods import odin_splatfacto

    two = yaml.safe_load((CONFIGS / "two-gpus.yaml").read_text())
    assert scaled_schedule(2).items() <= two.items()
    assert 2 * two["max-num-iterations"] == odin_splatfacto.config.max_num_iterations


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_a_recipe_begins_with_its_situation(recipe: Path) -> None:
    assert recipe.read_text().startswith("# ")


def test_values_are_written_as_tyro_reads_them(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("a.b-c: 1\nd: null\ne: true\nf: [1, 2.5]\ng: 1.0e-3\n")
    expected = ["--a.b-c", "1", "--d", "None", "--e", "True", "--f", "1", "2.5", "--g", "0.001"]
    assert recipe_arguments(recipe) == expected


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "must map flags to values"),
        ("- a\n- b\n", "must map flags to values"),
        ("a: [1\n", "is not YAML"),
        ("--a: 1\n", "without the dashes"),
        ("1: 2\n", "a dotted flag is expected"),
        ("pipeline:\n  model: 1\n", "nests values under pipeline"),
    ],
)
def test_a_malformed_recipe_gets_a_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text)
    with pytest.raises(UserError, match=sentence) as error:
        recipe_arguments(recipe)
    assert str(recipe) in str(error.value)


def test_from_the_shell(tmp_path: Path) -> None:
    module = [sys.executable, "-m", "odin_nerfstudio.cli.recipe"]
    printed = subprocess.run([*module, str(RECIPES[0])], capture_output=True, text=True, check=True).stdout
    assert printed.split() == recipe_arguments(RECIPES[0])
    absent = subprocess.run([*module, str(tmp_path / "none.yaml")], capture_output=True, text=True)
    assert absent.returncode == 1
    assert absent.stderr.startswith("error: cannot read the recipe")
