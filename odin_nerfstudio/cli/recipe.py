"""Recipes: YAML files of dotted flags and values, turned into the arguments of a nerfstudio command line.

odin-train odin-splatfacto --recipe configs/laptop-cpu.yaml --data DIR
ns-train odin-splatfacto $(python -m odin_nerfstudio.cli.recipe configs/laptop-cpu.yaml) --data DIR
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import yaml

from odin_nerfstudio.errors import UserError, exit_with_sentence

_FLAG = re.compile(r"[a-z][a-z0-9_-]*(\.[a-z][a-z0-9_-]*)*")


def recipe_arguments(path: Path) -> list[str]:
    """The recipe's arguments in its order: ``machine.seed: 1`` gives ``--machine.seed 1``.

    ``null`` becomes None, booleans become True and False, the items of a list follow their flag one by one.

    Raises:
        UserError: the file is absent, no YAML, or anything but a mapping of flags to plain values.
    """
    try:
        recipe = yaml.safe_load(path.read_text())
    except OSError as error:
        raise UserError(f"cannot read the recipe {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"the recipe {path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(recipe, dict):
        raise UserError(f"the recipe {path} must map flags to values, such as `max-num-iterations: 1000`")
    arguments = []
    for flag, value in recipe.items():
        if not isinstance(flag, str) or not _FLAG.fullmatch(flag):
            raise UserError(f"the recipe {path} has {flag!r} where a dotted flag is expected, without the dashes")
        values = value if isinstance(value, list) else [value]
        if any(isinstance(item, dict | list) for item in values):
            raise UserError(f"the recipe {path} nests values under {flag}; write every flag in full, with dots")
        arguments += [f"--{flag}", *map(str, values)]
    return arguments


if __name__ == "__main__":
    with exit_with_sentence():
        if len(sys.argv) != 2:
            raise UserError("name one recipe, such as configs/laptop-cpu.yaml")
        print(*recipe_arguments(Path(sys.argv[1])))
