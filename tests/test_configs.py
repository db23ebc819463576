"""Every recipe is held against the command line that users pass it to."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import tyro
import yaml

from odin_nerfstudio.cli.recipe import recipe_arguments
from odin_nerfstudio.errors import UserError

CONFIGS = Path(__file__).parent.parent / "configs"
RECIPES = sorted(CONFIGS.glob("*.yaml"))


def test_there_are_recipes() -> None:
    assert {"laptop-cpu", "one-gpu"} <= {recipe.stem for recipe in RECIPES}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_ns_train_takes_the_recipe(recipe: Path) -> None:
    from nerfstudio.configs.method_configs import AnnotatedBaseConfigUnion

    line = ["odin-splatfacto", *recipe_arguments(recipe), "--data", "somewhere", "nerfstudio-data"]
    config = tyro.cli(AnnotatedBaseConfigUnion, args=line)
    for flag, value in yaml.safe_load(recipe.read_text()).items():
        found = config
        for name in flag.replace("-", "_").split("."):
            found = getattr(found, name)
        assert found == value, flag


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
