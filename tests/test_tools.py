"""nerfstudio's tools on what we train, as a user runs them: from the shell, offline, without environment variables."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

BIN = Path(sys.executable).parent
STEPS = 30


def run(*command: str | Path, cwd: Path, ok: bool = True) -> str:
    """Runs a console script of this environment and returns what it printed."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TORCH_")} | {"COLUMNS": "200"}
    done = subprocess.run(
        [str(BIN / command[0]), *map(str, command[1:])],
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )
    output = done.stdout + done.stderr
    assert (done.returncode == 0) == ok, output[-4000:]
    return output


def train(cwd: Path, *arguments: str | Path, ok: bool = True) -> str:
    """A short run that quits at its end."""
    fixed = ("--vis", "tensorboard", "--viewer.quit-on-train-completion", "True", "--timestamp", "run")
    return run("ns-train", "odin-splatfacto", *fixed, *arguments, cwd=cwd, ok=ok)


def small(*more: str) -> tuple[str, ...]:
    """Flags of a run that takes seconds."""
    model = ("--pipeline.model.num-downscales", "0", "--pipeline.model.warmup-length", "10")
    return ("--max-num-iterations", str(STEPS), *model, "--pipeline.model.refine-every", "10", *more)


def home(trained_run: Path) -> Path:
    """Where the run was started: nerfstudio keeps the output folder as it was typed."""
    return trained_run.parents[3]


@pytest.fixture(scope="module")
def trained(demo_capture: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on the demo capture through the ``colmap`` parser; its folder."""
    cwd = tmp_path_factory.mktemp("trained")
    parser = ("colmap", "--data", demo_capture, "--colmap-path", "sparse/0", "--downscale-factor", "1")
    output = train(cwd, *small(), "--experiment-name", "demo", *parser)
    assert "COLMAP tracks" in output
    return cwd / "outputs" / "demo" / "odin-splatfacto" / "run"


def test_checkpoint_needs_no_environment_variable(trained: Path) -> None:
    (path,) = (trained / "nerfstudio_models").iterdir()
    assert path.name == f"step-{STEPS - 1:09d}.ckpt"
    state = torch.load(path, map_location="cpu", weights_only=True)
    assert not any("lpips" in key for key in state["pipeline"])


def test_ns_eval_reports_metrics_offline(trained: Path, tmp_path: Path) -> None:
    output = tmp_path / "eval.json"
    run("ns-eval", "--load-config", trained / "config.yml", "--output-path", output, cwd=home(trained))
    results = json.loads(output.read_text())["results"]
    assert results["psnr"] > 12
    assert 0 < results["ssim"] <= 1
    assert "lpips" not in results or np.isfinite(results["lpips"])


def test_ns_render_dataset(trained: Path, tmp_path: Path) -> None:
    output = tmp_path / "renders"
    names = ("--rendered-output-names", "rgb", "depth", "gt-rgb", "conflict", "staleness", "version", "owner")
    split = ("--split", "train+test", "--output-path", output, *names)
    run("ns-render", "dataset", "--load-config", trained / "config.yml", *split, cwd=home(trained))
    for part in ("train", "test"):
        (rgb, depth, truth) = (sorted((output / part / name).iterdir()) for name in ("rgb", "depth", "gt-rgb"))
        assert len(rgb) == len(depth) == len(truth) > 0
        first, expected = (np.asarray(Image.open(paths[0]).convert("RGB"), float) for paths in (rgb, truth))
        assert first.shape == expected.shape
        assert np.abs(first - expected).mean() < 60
        heatmaps = [sorted((output / part / name).iterdir()) for name in ("conflict", "staleness", "version", "owner")]
        assert all(len(pictures) == len(rgb) for pictures in heatmaps)
        painted = [np.asarray(Image.open(pictures[0]).convert("RGB"), float) for pictures in heatmaps]
        assert all(np.abs(a - b).mean() > 1 for a, b in combinations([first, *painted], 2))


def test_ns_render_interpolate(trained: Path, tmp_path: Path) -> None:
    output = tmp_path / "frames"
    flags = ("--interpolation-steps", "2", "--output-format", "images", "--output-path", output)
    run("ns-render", "interpolate", "--load-config", trained / "config.yml", *flags, cwd=home(trained))
    frames = sorted(output.iterdir())
    assert len(frames) >= 2
    assert np.asarray(Image.open(frames[0])).std() > 5


def test_ns_render_camera_path(trained: Path, tmp_path: Path) -> None:
    matrix = np.eye(4)
    matrix[2, 3] = 1.0
    camera = {"camera_to_world": matrix.ravel().tolist(), "fov": 60, "aspect": 1.5}
    path = {
        "camera_type": "perspective",
        "render_height": 40,
        "render_width": 60,
        "fps": 2,
        "seconds": 1,
        "is_cycle": False,
        "smoothness_value": 0,
        "camera_path": [camera, camera],
        "keyframes": [],
    }
    (tmp_path / "path.json").write_text(json.dumps(path))
    output = tmp_path / "frames"
    flags = ("--camera-path-filename", tmp_path / "path.json", "--output-format", "images", "--output-path", output)
    run("ns-render", "camera-path", "--load-config", trained / "config.yml", *flags, cwd=home(trained))
    assert [Image.open(frame).size for frame in sorted(output.iterdir())] == [(60, 40), (60, 40)]


def test_ns_export_ply_opens_elsewhere(trained: Path, tmp_path: Path) -> None:
    from plyfile import PlyData

    run(
        "ns-export",
        "gaussian-splat",
        "--load-config",
        trained / "config.yml",
        "--output-dir",
        tmp_path,
        cwd=home(trained),
    )
    vertices = PlyData.read(tmp_path / "splat.ply")["vertex"]
    names = {prop.name for prop in vertices.properties}
    wanted = {"x", "y", "z", "opacity", *(f"scale_{i}" for i in range(3)), *(f"rot_{i}" for i in range(4))}
    wanted |= {f"f_dc_{i}" for i in range(3)} | {f"f_rest_{i}" for i in range(45)}
    assert wanted <= names
    (checkpoint,) = (trained / "nerfstudio_models").iterdir()
    means = torch.load(checkpoint, map_location="cpu")["pipeline"]["_model.gauss_params.means"]
    assert 0 < vertices.count <= len(means)
    exported = np.stack([vertices[axis] for axis in "xyz"], axis=1)
    assert np.isin(exported[:, 0], means[:, 0].numpy()).all()


def test_mcmc_camera_optimizer_and_bilateral_grid_train(demo_capture: Path, tmp_path: Path) -> None:
    """Options that take other paths through the model, with the nerfstudio-data parser and two views a step."""
    model = ("--pipeline.model.strategy", "mcmc", "--pipeline.model.camera-optimizer.mode", "SO3xR3")
    more = ("--pipeline.model.use-bilateral-grid", "True", "--pipeline.model.rasterize-mode", "antialiased")
    other = ("--pipeline.datamanager.batch-per-rank", "2", "--adam", "selective")
    parser = ("--experiment-name", "mcmc", "nerfstudio-data", "--data", demo_capture, "--downscale-factor", "1")
    output = train(tmp_path, *small(), *model, *more, *other, *parser)
    assert "GSs relocated" in output
    (checkpoint,) = (tmp_path / "outputs" / "mcmc" / "odin-splatfacto" / "run" / "nerfstudio_models").iterdir()
    state = torch.load(checkpoint, map_location="cpu")
    assert state["pipeline"]["_model.camera_optimizer.pose_adjustment"].abs().max() > 0
    assert all(torch.isfinite(v).all() for v in state["pipeline"].values())


def test_damaged_checkpoint_is_named(trained: Path, tmp_path: Path) -> None:
    copy = tmp_path / "outputs" / "demo" / "odin-splatfacto" / "run"
    shutil.copytree(trained, copy)
    (checkpoint,) = (copy / "nerfstudio_models").iterdir()
    checkpoint.write_bytes(checkpoint.read_bytes()[:5000])
    flags = ("--load-config", copy / "config.yml", "--output-path", tmp_path / "eval.json")
    output = run("ns-eval", *flags, cwd=tmp_path, ok=False)
    assert f"{checkpoint.name}: is cut off or not a checkpoint" in output
    assert "Traceback" not in output
    assert not (tmp_path / "eval.json").exists()


def test_mistakes_leave_nothing_behind(tmp_path: Path) -> None:
    output = train(tmp_path, *small(), "--data", tmp_path / "nowhere", ok=False)
    assert "nowhere: does not exist" in output
    assert "Traceback" not in output
    assert not list(tmp_path.iterdir())
