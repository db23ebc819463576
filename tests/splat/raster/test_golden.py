"""Both CPU renderers against values that gsplat 1.4.0 computed on a GPU (see make_golden.py)."""

from pathlib import Path

import numpy as np
import pytest
import torch
from raster_scenes import GOLDEN, evaluate, margin, relative_error

from odin_nerfstudio.splat.raster.numba import NumbaRasterizer
from odin_nerfstudio.splat.raster.reference import ReferenceRasterizer

BACKENDS = {"numba": (NumbaRasterizer(), torch.float32), "reference": (ReferenceRasterizer(), torch.float64)}


@pytest.mark.parametrize("name", GOLDEN)
@pytest.mark.parametrize("backend", BACKENDS)
def test_image_and_gradients_are_gsplats(backend: str, name: str) -> None:
    rasterizer, dtype = BACKENDS[backend]
    values = evaluate(rasterizer, GOLDEN[name], dtype)
    with np.load(Path(__file__).parent / "golden" / f"{name}.npz") as golden:
        assert np.array_equal(values["ids"].numpy(), golden["ids"])
        errors = {key: relative_error(values[key], torch.from_numpy(golden[key])) for key in golden if key != "ids"}
    assert max(errors.values()) < 1e-4, errors


@pytest.mark.parametrize("name", GOLDEN)
def test_no_decision_hangs_on_rounding(name: str) -> None:
    assert margin(GOLDEN[name]) > 1e-4
