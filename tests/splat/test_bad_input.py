"""Mistakes in captures and flags: one sentence that names the culprit, nothing written; odd but good captures work."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pycolmap
import pytest
from nerfstudio.data.dataparsers.blender_dataparser import BlenderDataParserConfig
from nerfstudio.data.dataparsers.nerfstudio_dataparser import NerfstudioDataParserConfig
from PIL import Image
from training import make_config

from odin_nerfstudio.splat.trainer import OdinTrainer, OdinTrainerConfig


@pytest.fixture
def capture(demo_capture: Path, tmp_path: Path) -> Path:
    """A copy of the demo capture that a test may spoil."""
    return Path(shutil.copytree(demo_capture, tmp_path / "capture"))


def nerfstudio_config(data: Path, output_dir: Path) -> OdinTrainerConfig:
    config = make_config(data, output_dir)
    config.pipeline.datamanager.dataparser = NerfstudioDataParserConfig(load_3D_points=True, downscale_factor=1)
    return config


def set_up(config: OdinTrainerConfig) -> OdinTrainer:
    """What ns-train does before the first step."""
    config.save_config()
    trainer = config.setup(local_rank=0, world_size=1)
    trainer.setup()
    return trainer


def refusal(config: OdinTrainerConfig) -> str:
    """The sentence with which a run is refused, having written nothing."""
    with pytest.raises(SystemExit) as refused:
        set_up(config)
    assert isinstance(refused.value.code, str)  # Python prints it and exits with 1
    assert not config.output_dir.exists()
    return refused.value.code


def edit_json(capture: Path, change: Callable[[dict[str, Any]], None]) -> None:
    file = capture / "transforms.json"
    meta = json.loads(file.read_text())
    change(meta)
    file.write_text(json.dumps(meta))


def edit_model(capture: Path, change: Callable[[pycolmap.Reconstruction], None]) -> None:
    folder = capture / "sparse" / "0"
    model = pycolmap.Reconstruction(folder)
    change(model)
    model.write(folder)


def first_image(capture: Path) -> Path:
    return sorted((capture / "images").iterdir())[0]


# ------------------------------------------------------------------------------------------------------- refused


def test_missing_and_empty_folder(tmp_path: Path) -> None:
    assert "nowhere: does not exist" in refusal(make_config(tmp_path / "nowhere", tmp_path / "out"))
    (tmp_path / "empty").mkdir()
    assert "empty: is empty" in refusal(make_config(tmp_path / "empty", tmp_path / "out"))


def test_missing_image(capture: Path, tmp_path: Path) -> None:
    image = first_image(capture)
    image.unlink()
    assert f"{image.name}: is listed in the capture but does not exist" in refusal(make_config(capture, tmp_path / "o"))


def test_truncated_image(capture: Path, tmp_path: Path) -> None:
    image = sorted((capture / "images").iterdir())[1]  # the first is kept for evaluation
    image.write_bytes(image.read_bytes()[: image.stat().st_size // 2])
    assert f"{image.name}: cannot be decoded" in refusal(make_config(capture, tmp_path / "o"))


def test_truncated_model(capture: Path, tmp_path: Path) -> None:
    file = capture / "sparse" / "0" / "points3D.bin"
    file.write_bytes(file.read_bytes()[:-100])
    assert "points3D.bin" in refusal(make_config(capture, tmp_path / "o"))


def test_model_in_another_place_is_pointed_out(capture: Path, tmp_path: Path) -> None:
    config = make_config(capture, tmp_path / "o")
    config.pipeline.datamanager.dataparser.colmap_path = Path("colmap/sparse/0")  # the parser's default
    assert "--colmap-path sparse/0" in refusal(config)


def test_nan_pose(capture: Path, tmp_path: Path) -> None:
    edit_json(capture, lambda meta: meta["frames"][3]["transform_matrix"][0].__setitem__(3, float("nan")))
    sentence = refusal(nerfstudio_config(capture, tmp_path / "o"))
    assert "0004" in sentence
    assert "NaN" in sentence


def test_non_rigid_pose(capture: Path, tmp_path: Path) -> None:
    edit_json(capture, lambda meta: meta["frames"][3]["transform_matrix"][0].__setitem__(0, 7.0))
    sentence = refusal(nerfstudio_config(capture, tmp_path / "o"))
    assert "not rigid" in sentence


def test_malformed_json(capture: Path, tmp_path: Path) -> None:
    (capture / "transforms.json").write_text('{"frames": [')
    assert "transforms.json" in refusal(nerfstudio_config(capture, tmp_path / "o"))


def test_mask_of_the_wrong_size(capture: Path, tmp_path: Path) -> None:
    (capture / "masks").mkdir()
    for image in (capture / "images").iterdir():
        Image.new("L", (10, 10), 255).save(capture / "masks" / f"{image.stem}.png")
    config = make_config(capture, tmp_path / "o")
    config.pipeline.datamanager.dataparser.masks_path = Path("masks")
    assert "is 10×10 pixels, but image" in refusal(config)


def test_more_views_in_a_step_than_there_are(capture: Path, tmp_path: Path) -> None:
    config = make_config(capture, tmp_path / "o")
    config.pipeline.datamanager.batch_per_rank = 100
    sentence = refusal(config)
    assert "100" in sentence
    assert "training view" in sentence


def test_cuda_without_a_gpu(capture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    config = make_config(capture, tmp_path / "o")
    config.machine.device_type = "cuda"
    assert "--machine.device-type cuda" in refusal(config)


def test_several_processes_of_ns_train(capture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(capture, tmp_path / "o")
    config.machine.num_devices = 2
    assert "On CPUs use odin-train odin-splatfacto --nproc-per-node 2" in refusal(config)
    config.machine.num_devices, config.machine.num_machines = 1, 3
    assert "--machine.num-machines 3: ns-train starts" in refusal(config)
    config.machine.num_devices = 0
    assert "--machine.num-devices 0: at least one" in refusal(config)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    config.machine.device_type, config.machine.num_devices = "cuda", 4
    assert "--machine.num-devices 4: torch sees 3 GPUs here" in refusal(config)


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("mixed_precision", True, "--mixed-precision True: odin-splatfacto trains in float32 only"),
        ("use_grad_scaler", True, "--use-grad-scaler True: odin-splatfacto trains in float32 only"),
        ("gradient_accumulation_steps", {"means": 2}, "raise --pipeline.datamanager.batch-per-rank"),
        ("log_gradients", True, "--log-gradients True: "),
    ],
)
def test_flags_that_cannot_be_followed(capture: Path, tmp_path: Path, field: str, value: Any, sentence: str) -> None:
    assert sentence in refusal(make_config(capture, tmp_path / "o", **{field: value}))


def test_checkpoint_to_resume_from(capture: Path, tmp_path: Path) -> None:
    config = make_config(capture, tmp_path / "o")
    config.load_dir = tmp_path / "nothing"
    assert "nothing: holds no checkpoint" in refusal(config)
    config.load_dir, config.load_checkpoint = None, tmp_path / "step-000000001.ckpt"
    config.load_checkpoint.write_bytes(b"PK")
    assert "step-000000001.ckpt: is damaged" in refusal(config)


# --------------------------------------------------------------------------------------------------- odd but good


def train_a_step(config: OdinTrainerConfig) -> OdinTrainer:
    config.max_num_iterations = 3
    trainer = set_up(config)
    trainer.train()
    return trainer


def test_model_without_points(capture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def remove_points(model: pycolmap.Reconstruction) -> None:
        for point in list(model.points3D):
            model.delete_point3D(point)

    edit_model(capture, remove_points)
    config = make_config(capture, tmp_path / "o")
    config.pipeline.model.num_random = 200
    trainer = train_a_step(config)
    printed = " ".join(capsys.readouterr().out.split())
    assert "holds no points" in printed
    assert "Frusta sampled on a grid" in printed
    assert trainer.pipeline.model.num_points == 200


def test_model_without_tracks(capture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Points whose tracks were dropped: COLMAP's text format, with empty tracks."""
    folder = capture / "sparse" / "0"
    pycolmap.Reconstruction(folder).write_text(folder)
    for file in folder.glob("*.bin"):
        file.unlink()
    points = folder / "points3D.txt"
    lines = [line for line in points.read_text().splitlines() if not line.startswith("#")]
    points.write_text("\n".join(" ".join(line.split()[:8]) for line in lines) + "\n")
    train_a_step(make_config(capture, tmp_path / "o"))
    assert "Seed points projected into the cameras" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("place", ["sparse/0", "colmap/sparse/0"])
def test_seed_points_come_from_the_model_where_no_point_cloud_is_named(
    capture: Path, tmp_path: Path, place: str
) -> None:
    """Without asking on the terminal, and where the point cloud would have put them."""
    expected = train_a_step(nerfstudio_config(capture, tmp_path / "a")).pipeline.datamanager
    if place != "sparse/0":
        (capture / "colmap").mkdir()
        (capture / "sparse").rename(capture / "colmap" / "sparse")
    edit_json(capture, lambda meta: meta.pop("ply_file_path"))
    found = train_a_step(nerfstudio_config(capture, tmp_path / "b")).pipeline.datamanager
    ours, theirs = (
        {
            tuple(point): tuple(color)
            for point, color in zip(
                np.round(manager.train_dataset.metadata["points3D_xyz"].numpy(), 3).tolist(),
                manager.train_dataset.metadata["points3D_rgb"].tolist(),
                strict=True,
            )
        }
        for manager in (found, expected)
    )
    assert len(ours) > 100
    shared = ours.keys() & theirs.keys()
    assert len(shared) > 0.9 * len(ours)  # the rest lies on a rounding edge
    assert all(ours[point] == theirs[point] for point in shared)


def test_one_image(capture: Path, tmp_path: Path) -> None:
    edit_json(capture, lambda meta: meta.update(frames=meta["frames"][:1]))
    trainer = train_a_step(nerfstudio_config(capture, tmp_path / "o"))
    assert len(trainer.pipeline.datamanager.train_dataset) == 1


def test_no_image_left_for_training(capture: Path, tmp_path: Path) -> None:
    edit_json(capture, lambda meta: meta.update(frames=meta["frames"][:1]))
    config = nerfstudio_config(capture, tmp_path / "o")
    config.pipeline.datamanager.dataparser.eval_mode = "interval"
    assert "no image is left for training" in refusal(config)


def test_mixed_sizes_grey_and_16_bit(capture: Path, tmp_path: Path) -> None:
    images = sorted((capture / "images").iterdir())
    Image.open(images[1]).convert("L").save(images[1])
    deep = np.asarray(Image.open(images[2]).convert("L")).astype(np.uint16) * 257
    Image.fromarray(deep).save(images[2])
    with Image.open(images[3]) as image:
        small = image.resize((image.width // 2, image.height // 2))
    small.save(images[3])

    def halve(meta: dict[str, Any]) -> None:
        whole = {key: meta.pop(key) for key in ("w", "h", "fl_x", "fl_y", "cx", "cy")}  # from all to each frame
        for frame in meta["frames"]:
            half = Path(frame["file_path"]).name == images[3].name
            frame.update({k: type(v)(v / 2) if half else v for k, v in whole.items()})

    edit_json(capture, halve)
    config = nerfstudio_config(capture, tmp_path / "o")
    config.pipeline.datamanager.batch_per_rank = 4
    trainer = train_a_step(config)
    assert len(set(trainer.pipeline.datamanager.train_dataset.cameras.width.reshape(-1).tolist())) == 2


def test_blender_capture_with_alpha(tmp_path: Path) -> None:
    """Synthetic-NeRF's layout: transforms_train.json and RGBA images, no points at all."""
    data = tmp_path / "blender"
    rng = np.random.default_rng(0)
    for split, count in (("train", 6), ("test", 2), ("val", 2)):
        (data / split).mkdir(parents=True)
        frames = []
        for i in range(count):
            Image.fromarray(rng.integers(0, 255, (40, 40, 4), dtype=np.uint8)).save(data / split / f"r_{i}.png")
            pose = np.eye(4)
            pose[:3, 3] = [0.3 * i, 0, 4]
            frames.append({"file_path": f"./{split}/r_{i}", "transform_matrix": pose.tolist()})
        meta = {"camera_angle_x": 0.7, "frames": frames}
        (data / f"transforms_{split}.json").write_text(json.dumps(meta))
    config = make_config(data, tmp_path / "o")
    config.pipeline.datamanager.dataparser = BlenderDataParserConfig()
    config.pipeline.model.num_random, config.pipeline.model.background_color = 300, "white"
    train_a_step(config)
