"""The bench of nerfxl on a small field: its figures, never its times."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from odin_nerfstudio.cli.bench.nerfxl import NerfXLBench
from odin_nerfstudio.errors import UserError
from odin_nerfstudio.nerfxl.exchange import EXCHANGES, share_samples, share_tiles
from odin_nerfstudio.nerfxl.model import NerfXLModelConfig

RAYS, STEPS, WARMUP, SAMPLES = 64, 8, 4, 32


def small(capture: Path | None = None, **changes: Any) -> NerfXLBench:
    """A bench whose steps take milliseconds."""
    model = NerfXLModelConfig(
        samples_per_ray=SAMPLES,
        log2_table_size=10,
        levels=4,
        max_resolution=64,
        hidden_dim=16,
        occupancy_resolution=8,
        occupancy_warmup_steps=4,
    )
    sizes: dict[str, Any] = {"steps": STEPS, "warmup": WARMUP, "rays": RAYS, "trials": 1, "scale": 0.5}
    return NerfXLBench(capture=capture, model=model, **{**sizes, **changes})


def test_exactness() -> None:
    figures = small(parts=("exactness",)).run()
    assert json.loads(json.dumps(figures)) == figures
    assert 0 < figures["max_rel_err_forward"] < 1e-12
    assert 0 < figures["max_rel_err_grad"] < 1e-12
    assert 1e-9 < figures["max_rel_err_float32"] < 1e-4


def test_exchanges_and_tiles(demo_capture: Path) -> None:
    figures = small(demo_capture, parts=("exchange", "tiles"), tiles=(1, 3), timeout_s=300).run()
    assert json.loads(json.dumps(figures)) == figures
    tile, sample, independent = (figures["exchanges"][name] for name in ("tile", "sample", "independent"))
    # Six numbers of 4 bytes for every ray and tile; six and an index for every sample, of which some are skipped.
    assert tile["bytes"] == RAYS * 6 * 4
    assert 0 < sample["bytes"] <= RAYS * SAMPLES * 28 / 2
    assert independent["bytes"] == 0
    assert figures["exchange_bytes_ratio"] == tile["bytes"] / sample["bytes"]
    assert figures["exchange_cost_ratio"] == tile["exchange_s"] / sample["exchange_s"]
    assert figures["step_ratio_independent"] == tile["step_s"] / independent["step_s"]
    assert all(row["step_s"] > 0 for row in (tile, sample, independent))
    assert {"tile": share_tiles, "sample": share_samples} == EXCHANGES  # as before

    one, three = (figures["tiles"][count] for count in "13")
    assert all(row["psnr"] > 3 and row["step_s"] > 0 for row in (one, three))
    assert one["parameters"] < three["parameters"] < 3 * one["parameters"]  # the colour network is shared


def test_peers_train_beside_one_tile(demo_capture: Path) -> None:
    figures = small(demo_capture, parts=("peers",), timeout_s=300).run()
    ours, peer = (figures["peers"][name] for name in ("nerfxl", "nerfacto torch"))
    assert figures["step_ratio_nerfacto"] == ours["step_s"] / peer["step_s"]
    assert ours["psnr"] > 3 and peer["psnr"] > 3
    assert peer["parameters"] > 1e7


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"parts": ()}, "--parts"),
        ({"steps": 5}, "--steps 5: must be at least 6"),
        ({"rays": 0}, "--rays 0"),
        ({"trials": 0}, "--trials 0"),
        ({"world_size": 1}, "--world-size 1"),
        ({"tiles": (2, 2)}, "--tiles 2 2"),
        ({"tiles": (0, 1)}, "--tiles 0 1"),
        ({"scale": 0.0}, "--scale"),
        ({"device": "cuda", "world_size": 99}, "--device cuda: 99 GPUs"),
        ({"model": NerfXLModelConfig(tiles=2)}, "--model.tiles 2"),
        ({"model": NerfXLModelConfig(exchange="sample")}, "--model.exchange sample"),
    ],
)
def test_mistakes_name_the_flag(changes: dict[str, Any], flag: str) -> None:
    with pytest.raises(UserError, match=flag):
        replace(small(), **changes).run()


def test_failed_run_is_named(tmp_path: Path) -> None:
    with pytest.raises((UserError, SystemExit), match="nothing-here"):
        small(tmp_path / "nothing-here", parts=("tiles",), tiles=(1,)).run()
