"""What an owner does with its rows, on the CPU: the twin of the kernels, and the layouts they share."""

from __future__ import annotations

import pytest
import torch
from splat_rows_cases import Scene, assert_agrees, assert_subsets_agree

from odin_nerfstudio.comm.splat_block import SplatBlock
from odin_nerfstudio.splat.raster import PinholeCamera, RasterSettings, Rows
from odin_nerfstudio.splat.raster.camera_table import camera_of, camera_table
from odin_nerfstudio.splat.raster.fused import project_rows, pull_back_rows
from odin_nerfstudio.splat.raster.numba import NumbaRasterizer


@pytest.mark.parametrize("mode", ["classic", "antialiased"])
@pytest.mark.parametrize(("degree", "terms"), [(None, 1), (0, 1), (1, 16), (2, 9), (3, 16)])
def test_values_and_gradients(degree, terms, mode) -> None:
    assert_agrees(project_rows, pull_back_rows, Scene(degree=degree, terms=terms, mode=mode, seed=terms), "cpu")


@pytest.mark.parametrize("pairs", [(0,), (1,), (0, 0, 3), (129, 1, 0)])
def test_numbers_of_pairs(pairs) -> None:
    assert_agrees(project_rows, pull_back_rows, Scene(pairs=pairs, rows=130), "cpu")


def test_chosen_pairs_and_sums() -> None:
    assert_subsets_agree(project_rows, pull_back_rows, Scene(seed=3), "cpu")


def test_a_block_is_that_of_each_view() -> None:
    pairs = Scene(pairs=(200, 0, 150)).build()
    block, values = project_rows(pairs.params, pairs.rows, *pairs.views)
    for view in (0, 2):
        part = slice(pairs.offsets[view], pairs.offsets[view + 1])
        rows = Rows(*(field[part] for field in values))
        splats = NumbaRasterizer().project(rows, camera_of(pairs.table[view]), RasterSettings())
        assert 0 < len(splats.ids) < len(rows.ids)
        expected = SplatBlock(**{name: getattr(splats, name) for name in SplatBlock._fields}).pack()
        assert torch.equal(block[part][splats.index].view(torch.int32), expected.view(torch.int32))


def test_gradients_are_those_of_a_graph_over_all_views() -> None:
    pairs = Scene(pairs=(200, 150)).build()
    leaves = Rows(pairs.params.ids, *(field.clone().requires_grad_() for field in pairs.params[1:]))
    loss = torch.zeros(())
    for view in (0, 1):
        part = slice(pairs.offsets[view], pairs.offsets[view + 1])
        rows = Rows(*(field[pairs.rows[part]] for field in leaves))
        splats = NumbaRasterizer().project(rows, camera_of(pairs.table[view]), pairs.settings)
        fields = (splats.means2d, splats.depths[:, None], splats.conics, splats.opacities[:, None], splats.colors)
        loss = loss + (torch.cat(fields, dim=1) * pairs.grads[part][splats.index, :10]).sum()
    loss.backward()
    into, seen = pairs.sums(), pairs.rows.unique()
    values = project_rows(pairs.params, pairs.rows, *pairs.views).values
    pull_back_rows(values, *pairs.views, pairs.grads, None, pairs.rows, into)
    for name, sums in into.values.items():
        torch.testing.assert_close(sums, getattr(leaves, name).grad[seen])


def test_values_outlive_a_publication() -> None:
    pairs = Scene().build()
    values = project_rows(pairs.params, pairs.rows, *pairs.views).values
    before = pull_back_rows(values, *pairs.views, pairs.grads)
    pairs.params.means.add_(1)
    after = pull_back_rows(values, *pairs.views, pairs.grads)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_camera_table() -> None:
    K = torch.tensor([[30.0, 0, 11], [0, 40, 12], [0, 0, 1]])
    viewmats = torch.arange(16.0).view(4, 4), torch.rand(4, 4)
    cameras = [PinholeCamera(viewmats[0], K, 20, 25), PinholeCamera(viewmats[1].requires_grad_(), K + 1, 64, 48)]
    table = camera_table(cameras)
    assert table.shape == (2, 18) and table.is_contiguous() and not table.requires_grad
    assert table[0].tolist() == [*range(12), 30, 40, 11, 12, 20, 25]
    camera = camera_of(camera_table([PinholeCamera(torch.eye(4), K, 20, 25)])[0])
    assert torch.equal(camera.viewmat, torch.eye(4)) and torch.equal(camera.K, K)
    assert (camera.width, camera.height) == (20, 25)
