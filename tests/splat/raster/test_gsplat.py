"""The CUDA backend against the float64 reference and the golden values; needs a GPU."""

from pathlib import Path

import numpy as np
import pytest
import torch
from raster_scenes import GOLDEN, Scene, evaluate, relative_error

from odin_nerfstudio.splat.raster.gsplat import GsplatRasterizer
from odin_nerfstudio.splat.raster.reference import ReferenceRasterizer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="gsplat's kernels need a CUDA device")


@pytest.mark.parametrize("name", GOLDEN)
def test_agrees_with_the_reference(name: str) -> None:
    values = evaluate(GsplatRasterizer(), GOLDEN[name], device="cuda")
    truth = evaluate(ReferenceRasterizer(), GOLDEN[name], torch.float64)
    assert torch.equal(values["ids"], truth["ids"])
    assert torch.equal(values["radii"], truth["radii"])
    errors = {key: relative_error(values[key], truth[key]) for key in truth if key not in ("ids", "radii")}
    assert max(errors.values()) < 1e-4, errors


@pytest.mark.parametrize("name", GOLDEN)
def test_agrees_with_gsplat_called_whole(name: str) -> None:
    values = evaluate(GsplatRasterizer(), GOLDEN[name], device="cuda")
    with np.load(Path(__file__).parent / "golden" / f"{name}.npz") as golden:
        errors = {key: relative_error(values[key], torch.from_numpy(golden[key])) for key in golden}
    assert max(errors.values()) < 1e-5, errors


def test_nothing_visible() -> None:
    values = evaluate(GsplatRasterizer(), Scene(0, 20, 10), device="cuda")
    assert not values["rgb"].any() and not values["alpha"].any() and not values["depth"].any()
