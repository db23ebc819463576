"""Choice of the backend."""

import subprocess
import sys

import pytest

from odin_nerfstudio.errors import UserError
from odin_nerfstudio.splat.raster import select_rasterizer
from odin_nerfstudio.splat.raster.gsplat import GsplatRasterizer
from odin_nerfstudio.splat.raster.numba import NumbaRasterizer


def test_a_device_has_its_backend() -> None:
    assert isinstance(select_rasterizer("cpu"), NumbaRasterizer)
    assert isinstance(select_rasterizer("cuda:1"), GsplatRasterizer)
    with pytest.raises(UserError, match="'meta'"):
        select_rasterizer("meta")


def test_choosing_never_imports_gsplat() -> None:
    code = (
        "import sys; from odin_nerfstudio.splat.raster import select_rasterizer; "
        "select_rasterizer('cpu'); select_rasterizer('cuda'); sys.exit('gsplat' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
