"""Fixtures that several folders of tests share."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from odin_nerfstudio.demo.capture import write_capture

# Makes the helpers in this folder importable: pytest's importlib mode leaves the path alone.
sys.path.append(str(Path(__file__).parent))


@pytest.fixture(scope="session")
def demo_capture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve views of 96×72 of the demo scene: images, sparse/0 with tracks, transforms.json. Not to be changed."""
    directory = tmp_path_factory.mktemp("demo") / "capture"
    write_capture(directory, views=12, width=96, height=72, seed=0)
    return directory


@pytest.fixture(scope="session")
def shared_data() -> Callable[[str], Path]:
    """Gives the folder of a real capture by name, or skips the test where it is not at hand."""

    def find(name: str) -> Path:
        root = Path(os.environ.get("ODIN_TEST_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
        if not (root / name).is_dir():
            pytest.skip(f"the capture {name} is not in {root}; ODIN_TEST_DATA can name another folder")
        return root / name

    return find
