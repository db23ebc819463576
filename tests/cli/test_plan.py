from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image


def odin_plan(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "odin_nerfstudio.cli.plan", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)


def test_plans_a_capture(demo_capture: Path, tmp_path: Path) -> None:
    done = odin_plan("--data", demo_capture, "--world-size", 3, "--batch-per-rank", 2, "--window", 2, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["views"] == 12 and figures["visibility"] == "tracks"
    assert figures["world_size"] == 3 and figures["batch_per_rank"] == 2 and figures["window"] == 2
    assert 0 <= figures["predicted_conflict"] <= figures["predicted_conflict_random"] <= 1

    folder = tmp_path / "outputs/plan" / demo_capture.name
    assert sorted(file.name for file in folder.iterdir()) == ["plan.json", "plan.png"]
    written = json.loads((folder / "plan.json").read_text())
    assert written["figures"] == figures
    assert len(written["cells"]) == 3 and len(written["groups"]) == 2
    assert sorted(view for group in written["groups"] for view in group["views"]) == list(range(12))
    with Image.open(folder / "plan.png") as picture:
        assert picture.size == (1760, 1100)


@pytest.mark.parametrize("order", ["locality-only", "random"])
def test_plans_from_a_pose_file_alone(demo_capture: Path, tmp_path: Path, order: str) -> None:
    content = json.loads((demo_capture / "transforms.json").read_text())
    content.pop("ply_file_path", None)
    (tmp_path / "transforms.json").write_text(json.dumps(content))
    done = odin_plan("--data", tmp_path, "--order", order, "--output-dir", tmp_path / "plan", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["visibility"] == "frusta" and "no COLMAP model" in figures["visibility_reason"]
    assert figures["order"] == order


def test_conflict_on_an_aerial_survey_is_a_tenth_of_random(shared_data, tmp_path: Path) -> None:
    done = odin_plan("--data", shared_data("seneca"), "--output-dir", tmp_path / "plan", cwd=tmp_path)
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["predicted_conflict"] <= 0.1 * figures["predicted_conflict_random"]


def cut_off(capture: Path) -> None:
    (capture / "transforms.json").unlink()
    file = capture / "sparse/0/images.bin"
    file.write_bytes(file.read_bytes()[:-1000])


def break_json(capture: Path) -> None:
    (capture / "transforms.json").write_text("{")


def break_pose(capture: Path) -> None:
    content = json.loads((capture / "transforms.json").read_text())
    content["frames"][3]["transform_matrix"][1][1] = float("nan")
    (capture / "transforms.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("spoil", "arguments", "said"),
    [
        (shutil.rmtree, [], "there is no such folder"),
        (lambda capture: (shutil.rmtree(capture), capture.mkdir()), [], "nor a COLMAP model"),
        (cut_off, [], "images.bin: the file is cut off"),
        (break_json, [], "transforms.json: this is not valid JSON"),
        (break_pose, [], "holds NaN"),
        (lambda capture: None, ["--world-size", "13"], "world size 13 x batch per rank 1 needs 13 views"),
        (lambda capture: None, ["--window", "0"], "window must be at least 1"),
    ],
)
def test_bad_input_gets_one_sentence_and_no_files(demo_capture, tmp_path: Path, spoil, arguments, said: str) -> None:
    capture = tmp_path / "capture"
    shutil.copytree(demo_capture, capture, ignore=shutil.ignore_patterns("*.png", "*.jpg"))
    spoil(capture)
    done = odin_plan("--data", capture, "--output-dir", tmp_path / "plan", *arguments, cwd=tmp_path)
    assert done.returncode != 0
    assert done.stderr.startswith("error: ") and said in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "plan").exists() and done.stdout == ""


def test_an_output_folder_that_cannot_be_made_is_named(demo_capture: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = odin_plan("--data", demo_capture, "--output-dir", tmp_path / "file/plan", cwd=tmp_path)
    assert done.returncode != 0
    assert done.stderr.startswith("error: --output-dir") and done.stderr.count("\n") == 1
