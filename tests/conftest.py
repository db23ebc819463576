"""Fixtures that several folders of tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from odin_nerfstudio.demo.capture import write_capture


@pytest.fixture(scope="session")
def demo_capture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve views of 96×72 of the demo scene: images, sparse/0 with tracks, transforms.json. Not to be changed."""
    directory = tmp_path_factory.mktemp("demo") / "capture"
    write_capture(directory, views=12, width=96, height=72, seed=0)
    return directory
