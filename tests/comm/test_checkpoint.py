"""Checkpoints: whole or absent, loadable with torch's safe loader, and named when damaged."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch

from odin_nerfstudio.comm.checkpoint import checkpoint_path, checkpoint_steps, read_checkpoint, write_checkpoint
from odin_nerfstudio.errors import UserError


def _state() -> dict:
    return {
        "step": 7,
        "pipeline": OrderedDict(weight=torch.arange(3.0)),
        "optimizers": {"means": {"param_groups": [{"lr": np.float64(0.1), "betas": (0.9, np.float32(0.5))}]}},
        "schedulers": {"means": {"_last_lr": [np.float64(0.25)], "table": np.arange(2)}},
    }


def test_numpy_scalars_do_not_reach_the_file(tmp_path: Path) -> None:
    path = tmp_path / "step-000000007.ckpt"
    write_checkpoint(path, _state())
    state = torch.load(path, weights_only=True)
    assert state["optimizers"]["means"]["param_groups"][0]["lr"] == 0.1
    assert state["schedulers"]["means"]["table"].tolist() == [0, 1]
    assert torch.equal(read_checkpoint(path)["pipeline"]["weight"], torch.arange(3.0))
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_failed_write_keeps_the_earlier_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "step-000000007.ckpt"
    write_checkpoint(path, _state())
    before = path.read_bytes()

    def full_disk(state: object, file: Path) -> None:
        Path(file).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(UserError, match=r"step-000000007\.ckpt: could not be written .*No space left"):
        write_checkpoint(path, _state())
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_folder_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in ("file", "file/below"):
        with pytest.raises(UserError, match=r"step-000000007\.ckpt: could not be written"):
            write_checkpoint(tmp_path / folder / "step-000000007.ckpt", _state())


@pytest.mark.parametrize("keep", [0, 10, 500])
def test_cut_off_file_is_named(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "step-000000007.ckpt"
    write_checkpoint(path, _state())
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UserError, match=r"step-000000007\.ckpt: is damaged"):
        read_checkpoint(path)


def test_other_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    torch.save({"weight": torch.zeros(1)}, path)
    with pytest.raises(UserError, match="is not a nerfstudio checkpoint"):
        read_checkpoint(path)
    with pytest.raises(UserError, match="there is no such checkpoint"):
        read_checkpoint(tmp_path / "absent.ckpt")


def test_latest_of_a_folder(tmp_path: Path) -> None:
    for name in ("step-000000009.ckpt", "step-000000100.ckpt", "step-000000100.7.partial", "notes.txt"):
        (tmp_path / name).touch()
    assert checkpoint_steps(tmp_path) == [9, 100]
    assert checkpoint_path(tmp_path).name == "step-000000100.ckpt"
    assert checkpoint_path(tmp_path, 9).name == "step-000000009.ckpt"
    with pytest.raises(UserError, match="no checkpoint of step 10; there are 9, 100"):
        checkpoint_path(tmp_path, 10)
    with pytest.raises(UserError, match="holds no checkpoint"):
        checkpoint_path(tmp_path / "none")
