"""Checkpoints: merged, resumed on any number of ranks, refused where they do not fit; nerfstudio's tools on them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from nerfstudio.utils import eval_utils
from PIL import Image
from ranks import run_ranks
from training import assert_equal, run
from xl_runs import make_config

from odin_nerfstudio.comm.checkpoint import checkpoint_path, checkpoint_steps, read_checkpoint
from odin_nerfstudio.comm.world import World
from odin_nerfstudio.errors import UserError
from odin_nerfstudio.methods import nerfxl
from odin_nerfstudio.nerfxl.datamanager import NerfXLDataManager
from odin_nerfstudio.nerfxl.trainer import NerfXLTrainerConfig

STEPS, HALF = 20, 10


def train(
    world: World, capture: Path, output: Path, tiles: int | None = None, load: Path | None = None, steps: int = STEPS
) -> Path:
    """One rank of a run; the folder of checkpoints."""
    config = make_config(capture, output, tiles, max_num_iterations=steps, steps_per_save=HALF)
    config.steps_per_eval_image = 15
    if load is not None:
        config.load_dir, config.load_step, config.max_num_iterations = load, HALF, STEPS - HALF - 1
    return run(config, world)


def last(folder: Path) -> dict:
    return read_checkpoint(checkpoint_path(folder))


def assert_near(a: dict, b: dict) -> None:
    """The same entries, as near as runs on different numbers of ranks are."""
    assert a.keys() == b.keys()
    for name, value in a.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            torch.testing.assert_close(value, b[name], rtol=1e-2, atol=1e-3, msg=name)


@pytest.fixture(scope="module")
def alone(demo_capture: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three tiles in one process."""
    return train(World.current(), demo_capture, tmp_path_factory.mktemp("alone"), tiles=3)


@pytest.fixture(scope="module")
def two_ranks(demo_capture: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three tiles on two ranks."""
    return run_ranks(2, train, demo_capture, tmp_path_factory.mktemp("two"), 3, timeout=240)[0]


def test_checkpoint_of_ranks_is_that_of_one_process(alone: Path, two_ranks: Path) -> None:
    one, merged = last(alone), last(two_ranks)
    assert one["step"] == merged["step"] == STEPS - 1
    assert_near(one["pipeline"], merged["pipeline"])
    fields = [state["optimizers"]["fields"] for state in (one, merged)]
    assert fields[0]["state"].keys() == fields[1]["state"].keys()
    assert fields[0]["param_groups"] == fields[1]["param_groups"]
    torch.load(checkpoint_path(two_ranks), weights_only=True)


@pytest.mark.parametrize("ranks", [1, 2])
def test_resumed_run_equals_an_unbroken_one(
    alone: Path, two_ranks: Path, demo_capture: Path, tmp_path: Path, ranks: int
) -> None:
    """Bit by bit on the same number of ranks. The number of tiles comes from the checkpoint."""
    whole, arguments = (alone, two_ranks)[ranks - 1], (demo_capture, tmp_path, None)
    if ranks == 1:
        resumed = train(World.current(), *arguments, whole)
    else:
        resumed = run_ranks(ranks, train, *arguments, whole, timeout=240)[0]
    assert_equal(last(whole), last(resumed))


def test_checkpoint_resumes_on_more_ranks_than_tiles(alone: Path, demo_capture: Path, tmp_path: Path) -> None:
    resumed = run_ranks(4, train, demo_capture, tmp_path, None, alone, timeout=240)[0]
    assert_near(last(alone)["pipeline"], last(resumed)["pipeline"])


def refusal(config: NerfXLTrainerConfig) -> str:
    """The sentence with which a run ends before it has begun."""
    with pytest.raises(SystemExit) as error:
        run(config)
    assert not config.get_base_dir().exists()
    return str(error.value)


def test_checkpoints_that_do_not_fit(alone: Path, demo_capture: Path, tmp_path: Path) -> None:
    config = make_config(demo_capture, tmp_path, tiles=2, load_dir=alone)
    with pytest.raises(SystemExit, match="the checkpoint has 3 tiles, not 2"):
        run(config)
    other = tmp_path / "garden"
    shutil.copytree(demo_capture, other)
    images = other / "images"
    model = other / "sparse" / "0" / "images.bin"
    for path in sorted(images.iterdir()):
        renamed = path.with_name("x" + path.name[1:])
        path.rename(renamed)
        model.write_bytes(model.read_bytes().replace(path.name.encode(), renamed.name.encode()))
    with pytest.raises(SystemExit, match="those of the capture capture; this is garden"):
        run(make_config(other, tmp_path / "other", load_dir=alone))


def test_flags_that_cannot_be_followed(demo_capture: Path, tmp_path: Path) -> None:
    config = make_config(demo_capture, tmp_path, mixed_precision=True)
    with pytest.raises(UserError, match="nerfxl trains in float32 only"):
        config.check()
    assert "nowhere: does not exist" in refusal(make_config(tmp_path / "nowhere", tmp_path))


def test_interruption_saves_what_was_learned(
    demo_capture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = NerfXLDataManager.next_train

    def interrupted(self: NerfXLDataManager, step: int) -> object:
        if step == 7:
            raise KeyboardInterrupt
        return original(self, step)

    monkeypatch.setattr(NerfXLDataManager, "next_train", interrupted)
    config = make_config(demo_capture, tmp_path, max_num_iterations=20)
    with pytest.raises(KeyboardInterrupt):
        run(config)
    assert checkpoint_steps(config.get_checkpoint_dir()) == [6]


@pytest.fixture
def config_file(two_ranks: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a run of two ranks, as the tools take it."""
    monkeypatch.setitem(eval_utils.all_methods, "nerfxl", nerfxl.config)
    return two_ranks.parent / "config.yml"


def test_ns_eval(config_file: Path, tmp_path: Path) -> None:
    from nerfstudio.scripts.eval import ComputePSNR

    ComputePSNR(config_file, output_path=tmp_path / "eval.json").main()
    results = json.loads((tmp_path / "eval.json").read_text())["results"]
    assert results["psnr"] > 5
    assert 0 < results["ssim"] <= 1


def test_ns_render(config_file: Path, tmp_path: Path) -> None:
    from nerfstudio.scripts.render import DatasetRender

    names = ["rgb", "depth", "accumulation", "tile"]
    DatasetRender(config_file, output_path=tmp_path, rendered_output_names=names, split="test").main()
    for name in names:
        pictures = list((tmp_path / "test" / name).iterdir())
        assert pictures
        assert np.asarray(Image.open(pictures[0])).shape[:2] == (72, 96)


def test_ns_export_pointcloud(config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import open3d as o3d
    from nerfstudio.scripts.exporter import ExportPointCloud

    # After so few steps nothing is opaque yet.
    monkeypatch.setattr("odin_nerfstudio.nerfxl.model.NerfXLModel.get_rgba_image", lambda _, out, __: _opaque(out))
    ExportPointCloud(
        config_file, tmp_path, num_points=500, num_rays_per_batch=256, normal_method="open3d", remove_outliers=False
    ).main()
    points = np.asarray(o3d.io.read_point_cloud(str(tmp_path / "point_cloud.ply")).points)
    assert len(points) >= 500
    assert len(np.unique(points, axis=0)) > 0.9 * len(points)


def _opaque(outputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([outputs["rgb"], torch.ones_like(outputs["accumulation"])], dim=-1)
