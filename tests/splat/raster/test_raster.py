"""Choice of the backend."""

import subprocess
import sys

import pytest
import torch
from raster_scenes import GOLDEN

from odin_nerfstudio.errors import UserError
from odin_nerfstudio.splat.raster import select_rasterizer
from odin_nerfstudio.splat.raster.gsplat import GsplatRasterizer
from odin_nerfstudio.splat.raster.numba import NumbaRasterizer
from odin_nerfstudio.splat.raster.protocol import PinholeCamera, Rasterizer, Rows
from odin_nerfstudio.splat.raster.reference import ReferenceRasterizer


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


@pytest.mark.parametrize(
    ("rasterizer", "device"),
    [
        (NumbaRasterizer(), "cpu"),
        (ReferenceRasterizer(), "cpu"),
        pytest.param(
            GsplatRasterizer(), "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
        ),
    ],
)
def test_an_image_without_depth_is_the_same(rasterizer: Rasterizer, device: str) -> None:
    scene = GOLDEN["harmonics"]
    rows, camera = scene.build()
    rows = Rows(*(field.to(device) for field in rows))
    camera = PinholeCamera(camera.viewmat.to(device), camera.K.to(device), camera.width, camera.height)
    splats = rasterizer.project(rows, camera, scene.settings)
    for name in ("means2d", "colors"):
        getattr(splats, name).requires_grad_()
    images, gradients = [], []
    for depth in (True, False):
        image = rasterizer.rasterize(splats, camera.width, camera.height, absgrad=True, depth=depth)
        gradients.append(torch.autograd.grad(image.rgb.square().sum(), [splats.means2d, splats.colors]))
        images.append(image)
        assert splats.absgrad is not None and splats.absgrad.shape == splats.means2d.shape
    assert images[1].depth is None
    assert torch.equal(images[0].rgb, images[1].rgb) and torch.equal(images[0].alpha, images[1].alpha)
    for with_depth, without in zip(*gradients, strict=True):
        torch.testing.assert_close(without, with_depth)  # atomics on CUDA
