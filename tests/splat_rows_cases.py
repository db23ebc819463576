"""Random rows seen in several views, and how well a backend's splats and gradients agree with float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from odin_nerfstudio.comm.splat_block import GRADIENTS, SplatBlock
from odin_nerfstudio.shadow.bitmap import Bitmap, Index
from odin_nerfstudio.splat.raster.camera_table import camera_table
from odin_nerfstudio.splat.raster.fused import Sums, reference
from odin_nerfstudio.splat.raster.protocol import PinholeCamera, RasterizeMode, RasterSettings, Rows
from odin_nerfstudio.splat.raster.reference import ReferenceRasterizer

FIELDS = ("means2d", "depths", "conics", "opacities", "colors")
SIZES = ((64, 48), (50, 80), (33, 33), (120, 40))


@dataclass(frozen=True)
class Scene:
    """Cameras amid rows: some of these lie behind a view, on its edges or all over it."""

    rows: int = 500
    pairs: tuple[int, ...] = (301, 0, 200, 77)
    """Rows that each view wants."""
    degree: int | None = 3
    terms: int = 16
    """Coefficients in memory, for each channel."""
    mode: RasterizeMode = "classic"
    seed: int = 0

    @property
    def settings(self) -> RasterSettings:
        return RasterSettings(sh_degree=self.degree, mode=self.mode)

    def build(self) -> Pairs:
        random = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=random)

        def uniform(*shape: int) -> Tensor:
            return torch.rand(*shape, generator=random)

        n = self.rows
        params = Rows(
            ids=torch.randperm(n, generator=random) * 3 + 2**33,
            means=4 * uniform(n, 3) - 2,
            scales=-1 - 2.5 * uniform(n, 3),
            quats=normal(n, 4) * (0.5 + uniform(n, 1)),
            features_dc=normal(n, 3),
            features_rest=0.3 * normal(n, self.terms - 1, 3),
            opacities=normal(n, 1),
        )
        cameras = [self._camera(view, *normal(2, 3), uniform(4)) for view in range(len(self.pairs))]
        rows = [torch.randperm(n, generator=random)[:count].sort().values for count in self.pairs]
        offsets = torch.tensor([0, *self.pairs]).cumsum(0).tolist()
        grads = normal(offsets[-1], 12)
        grads[uniform(len(grads)) < 0.3, :10] = 0
        return Pairs(params, torch.cat(rows), offsets, camera_table(cameras), self.settings, grads)

    @staticmethod
    def _camera(view: int, eye: Tensor, up: Tensor, lens: Tensor) -> PinholeCamera:
        width, height = SIZES[view % len(SIZES)]
        eye = torch.nn.functional.normalize(eye, dim=0) * 2
        forward = -eye / eye.norm()
        right = torch.nn.functional.normalize(torch.linalg.cross(forward, up), dim=0)
        viewmat = torch.eye(4)
        viewmat[:3, :3] = torch.stack([right, torch.linalg.cross(forward, right), forward])
        viewmat[:3, 3] = -viewmat[:3, :3] @ eye
        K = torch.eye(3)
        K[0, 0], K[1, 1] = width * (0.6 + lens[0]), width * (0.6 + lens[1])
        K[0, 2], K[1, 2] = width * (0.4 + 0.2 * lens[2]), height * (0.4 + 0.2 * lens[3])
        return PinholeCamera(viewmat, K, width, height)


@dataclass(frozen=True)
class Pairs:
    """The arguments of ``project_rows``, and gradients of its splats."""

    params: Rows
    rows: Tensor
    offsets: list[int]
    table: Tensor
    settings: RasterSettings
    grads: Tensor

    def to(self, device: str) -> Pairs:
        moved = {name: getattr(self, name).to(device) for name in ("rows", "table", "grads")}
        return replace(self, params=Rows(*(field.to(device) for field in self.params)), **moved)

    def double(self) -> Pairs:
        params = Rows(self.params.ids, *(field.double() for field in self.params[1:]))
        return replace(self, params=params, table=self.table.double(), grads=self.grads.double())

    @property
    def values(self) -> Rows:
        """The row of each pair."""
        return Rows(*(field[self.rows] for field in self.params))

    @property
    def views(self) -> tuple[list[int], Tensor, RasterSettings]:
        return self.offsets, self.table, self.settings

    def sums(self, start: float = 0.0) -> Sums:
        """Room for the gradients of all rows of the pairs, from ``start``."""
        some = Bitmap.from_rows(self.rows, len(self.params.ids))
        fields = {name: getattr(self.params, name)[some.rows()] for name in reference.PARAMETERS}
        values = {name: torch.full_like(field, start) for name, field in fields.items()}
        return Sums(values, torch.zeros(some.count(), dtype=torch.bool, device=self.rows.device), Index(some))


def exact_splats(pairs: Pairs) -> dict[str, Tensor]:
    """Fields (P, ...) and ``radii`` of all pairs in float64, 0 where they are not seen."""
    exact = pairs.double()
    size = len(pairs.rows)
    shapes = {"means2d": (size, 2), "conics": (size, 3), "colors": (size, 3)}
    fields = {name: torch.zeros(shapes.get(name, (size,)), dtype=torch.float64) for name in (*FIELDS, "radii")}
    with torch.no_grad():
        for first, _, splats in reference.project_views(exact.values, *exact.views, ReferenceRasterizer()):
            for name, field in fields.items():
                field[first + splats.index] = getattr(splats, name).double()
    return fields


def exact_gradients(pairs: Pairs) -> dict[str, Tensor]:
    """(P, ...) gradients in float64 by autograd."""
    exact = pairs.double()
    nothing = None, None, None
    return reference.pull_back_rows(exact.values, *exact.views, exact.grads, *nothing, ReferenceRasterizer())


def assert_splats_agree(block: Tensor, values: Rows, pairs: Pairs, tolerance: float = 1e-4) -> Tensor:
    """A block and the copies of the rows against float64.

    Returns:
        (P,) bool: pairs that both see or both do not. A row may be on the edge of a view by rounding only.
    """
    block, values = block.cpu(), Rows(*(field.cpu() for field in values))
    for found, expected in zip(values, pairs.values, strict=True):
        assert found.is_contiguous() and found.shape == expected.shape and torch.equal(found, expected)
    splats, truth = SplatBlock.unpack(block), exact_splats(pairs)
    assert block.shape == (len(pairs.rows), 13) and torch.equal(splats.ids, pairs.values.ids)
    hidden = splats.radii == 0
    assert not block[hidden, 2:].any()
    agreed = hidden == (truth["radii"] == 0)
    few = len(agreed) // 500 + 1
    assert (~agreed).sum() <= few
    radii = (splats.radii.double() - truth["radii"])[agreed].abs()
    assert (radii > 0).sum() <= few and not (radii > 1).any()
    for name in FIELDS:
        assert_close(getattr(splats, name)[agreed], truth[name][agreed], tolerance, name)
    return agreed


def assert_close(found: Tensor, expected: Tensor, tolerance: float, name: str) -> None:
    """Within a tolerance of the largest magnitude of each row, and of a thousandth of the largest of all."""
    assert found.shape == expected.shape, name
    if not found.numel():
        return
    found, expected = found.detach().cpu().double(), expected.cpu().double()
    error, size = ((t.abs().flatten(1) if t.dim() > 1 else t.abs()[:, None]) for t in (found - expected, expected))
    allowed = tolerance * (size.amax(1) + 1e-3 * size.max())
    worst = (error.amax(1) / allowed.clamp(min=1e-30)).max()
    assert worst <= 1, f"{name}: {float(worst)} times what is allowed"


def assert_agrees(project: Callable, pull_back: Callable, scene: Scene, device: str, tolerance: float = 1e-4) -> None:
    """A backend's splats, and its gradients of all pairs, against float64.

    Args:
        project, pull_back: ``project_rows`` and ``pull_back_rows``.
        scene: to compare them on.
        device: for the backend.
        tolerance: relative, for each row.
    """
    pairs = scene.build()
    moved = pairs.to(device)
    block, values = project(moved.params, moved.rows, *moved.views)
    agreed = assert_splats_agree(block, values, pairs, tolerance)
    gradients, truth = pull_back(values, *moved.views, moved.grads), exact_gradients(pairs)
    hidden = (SplatBlock.unpack(block).radii == 0).cpu() | ~pairs.grads[:, :10].any(1)
    for name in reference.PARAMETERS:
        found = gradients[name].cpu()
        assert found.is_contiguous() and not found[hidden].any()
        assert_close(found[agreed], truth[name][agreed], tolerance, f"gradient of {name}")


def assert_subsets_agree(project: Callable, pull_back: Callable, scene: Scene, device: str) -> None:
    """Gradients of chosen pairs, written and added up by row of the model, against those of all pairs."""
    pairs = scene.build().to(device)
    _, values = project(pairs.params, pairs.rows, *pairs.views)
    every = pull_back(values, *pairs.views, pairs.grads)
    random = torch.Generator().manual_seed(scene.seed + 1)
    size = len(pairs.rows)
    chosen = torch.nonzero(torch.rand(size, generator=random) < 0.6)[:, 0].to(device)
    for subset in (None, chosen, chosen[:0], chosen[-1:]):
        grads = pairs.grads if subset is None else pairs.grads[subset]
        written = pull_back(values, *pairs.views, grads, subset)
        before, into = pairs.sums(1.0), pairs.sums(1.0)
        places = into.places.place(pairs.rows if subset is None else pairs.rows[subset])
        assert pull_back(values, *pairs.views, grads, subset, pairs.rows, into) is into.values
        for name in reference.PARAMETERS:
            expected = every[name] if subset is None else every[name][subset]
            assert torch.equal(written[name], expected)
            sums = before.values[name].double().index_add(0, places, expected.double())
            assert_close(into.values[name], sums, 1e-5, f"sum of {name}")
        touched = (grads[:, :GRADIENTS] != 0).any(1)  # whether or not the view sees the row
        assert into.active.nonzero()[:, 0].tolist() == places[touched].unique().tolist()
