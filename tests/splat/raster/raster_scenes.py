"""Small random scenes, the same on every machine, and what is compared on them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from odin_nerfstudio.splat.raster.protocol import PinholeCamera, RasterizeMode, Rasterizer, RasterSettings, Rows

FIELDS = ("means2d", "depths", "conics", "opacities", "colors")
PARAMETERS = ("means", "scales", "quats", "features_dc", "features_rest", "opacities")


@dataclass(frozen=True)
class Scene:
    """What to draw: ranges are log-uniform for standard deviations, uniform for opacities before the logit."""

    rows: int
    width: int
    height: int
    sh_degree: int | None = 3
    mode: RasterizeMode = "classic"
    deviations: tuple[float, float] = (0.03, 0.3)
    opacities: tuple[float, float] = (0.05, 0.95)
    spread: float = 1.5
    distance: float = 4.0
    seed: int = 0

    @property
    def settings(self) -> RasterSettings:
        return RasterSettings(sh_degree=self.sh_degree, mode=self.mode)

    def build(self) -> tuple[Rows, PinholeCamera]:
        """Rows around the origin and a camera that looks at it; NumPy's frozen legacy stream makes them portable."""
        random = np.random.RandomState(self.seed)
        terms = (3 if self.sh_degree is None else self.sh_degree) + 1

        def tensor(array: np.ndarray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32))

        n = self.rows
        low, high = np.log(self.deviations)
        chance = self.opacities[0] + (self.opacities[1] - self.opacities[0]) * random.rand(n, 1)
        rows = Rows(
            ids=torch.arange(n) * 3 + 5,
            means=tensor((random.rand(n, 3) - 0.5) * 2 * self.spread),
            scales=tensor(low + (high - low) * random.rand(n, 3)),
            quats=tensor(random.randn(n, 4)),
            features_dc=tensor(random.randn(n, 3) * 0.5),
            features_rest=tensor(random.randn(n, terms**2 - 1, 3) * 0.3),
            opacities=tensor(np.log(chance / (1 - chance))),
        )
        eye = self.distance * np.array([0.12, -0.2, -0.97])
        forward = -eye / np.linalg.norm(eye)
        right = np.cross(forward, [0.1, -1.0, 0.0])
        right /= np.linalg.norm(right)
        viewmat = np.eye(4)
        viewmat[:3, :3] = right, np.cross(forward, right), forward
        viewmat[:3, 3] = -viewmat[:3, :3] @ eye
        K = np.array(
            [[0.9 * self.width, 0, self.width / 2 - 1.3], [0, 0.92 * self.width, self.height / 2 + 0.7], [0, 0, 1]]
        )
        return rows, PinholeCamera(tensor(viewmat), tensor(K), self.width, self.height)

    def upstream(self) -> tuple[Tensor, Tensor, Tensor]:
        """Weights of rgb, alpha and depth in the loss that is differentiated."""
        random = np.random.RandomState(self.seed + 1)
        shape = (self.height, self.width)
        weights = random.randn(*shape, 3), random.randn(*shape, 1), random.randn(*shape, 1) * 0.1
        return tuple(torch.from_numpy(w.astype(np.float32)) for w in weights)  # type: ignore[return-value]


# The scenes of the golden values. Seeds are such that no test (alpha against 1/255, transmittance against 1e-4, radius
# against an integer) is closer to its threshold than float32 can tell. No picture is saturated everywhere: gsplat takes
# the last transmittance from 1 − alpha, which costs its gradients three digits where little light is left.
GOLDEN = {
    "harmonics": Scene(120, 48, 36, seed=24),
    "antialiased": Scene(100, 50, 35, sh_degree=2, mode="antialiased", deviations=(0.01, 0.15), seed=44),
    "big_splats": Scene(20, 45, 31, sh_degree=None, deviations=(0.2, 1.2), opacities=(0.1, 0.6), seed=7),
    "behind_and_edges": Scene(150, 47, 33, sh_degree=1, deviations=(0.02, 0.4), spread=4.0, distance=1.0, seed=28),
    "opaque_wall": Scene(150, 40, 40, sh_degree=1, deviations=(0.05, 0.2), opacities=(0.95, 0.999), seed=14),
    "picture": Scene(600, 80, 64, sh_degree=0, deviations=(0.01, 0.15), opacities=(0.05, 0.99), seed=37),
}


def evaluate(
    rasterizer: Rasterizer,
    scene: Scene,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    permutation: Tensor | None = None,
) -> dict[str, Tensor]:
    """Image, splats and every gradient of the weighted sum of the image, on the CPU; rows in ascending order of id."""
    rows, camera = scene.build()
    if permutation is not None:
        rows = Rows(*(t[permutation] for t in rows))
    rows = Rows(rows.ids.to(device), *(t.to(device, dtype).requires_grad_() for t in rows[1:]))
    viewmat = camera.viewmat.to(device, dtype).requires_grad_()
    camera = replace(camera, viewmat=viewmat, K=camera.K.to(device, dtype))
    splats = rasterizer.project(rows, camera, scene.settings)
    fields = {name: getattr(splats, name) for name in FIELDS}
    for field in fields.values():
        field.retain_grad()
    image = rasterizer.rasterize(splats, camera.width, camera.height, absgrad=True)
    loss = sum((value * weight.to(device, dtype)).sum() for value, weight in zip(image, scene.upstream(), strict=True))
    loss.backward()

    by_id = torch.argsort(rows.ids)
    values = {"radii": splats.radii, "ids": splats.ids, **image._asdict(), **fields, "absgrad": splats.absgrad}
    values |= {f"grad2d_{name}": field.grad for name, field in fields.items()}
    for name in PARAMETERS:
        row = getattr(rows, name)
        gradient = torch.zeros_like(row) if row.grad is None else row.grad
        values[f"grad_{name}"] = gradient[by_id]
    values["grad_viewmat"] = viewmat.grad[:3]
    return {name: value.detach().cpu() for name, value in values.items()}


def relative_error(value: Tensor, truth: Tensor) -> float:
    """Largest difference over the largest magnitude of the truth."""
    assert value.shape == truth.shape
    if not truth.numel() or not truth.abs().max():
        return float(value.abs().max()) if value.numel() else 0.0
    return float((value.double() - truth.double()).abs().max() / truth.double().abs().max())


def margin(scene: Scene) -> float:
    """How close, relatively, the scene comes to a decision that rounding could turn."""
    from odin_nerfstudio.splat.raster.reference import ReferenceRasterizer, _touched

    rows, camera = scene.build()
    rows = Rows(rows.ids, *(t.double() for t in rows[1:]))
    camera = replace(camera, viewmat=camera.viewmat.double(), K=camera.K.double())
    splats = ReferenceRasterizer().project(rows, camera, scene.settings)
    order = torch.argsort(splats.depths)
    y, x = torch.meshgrid(torch.arange(scene.height) + 0.5, torch.arange(scene.width) + 0.5, indexing="ij")
    dx, dy = splats.means2d[:, 0, None, None] - x, splats.means2d[:, 1, None, None] - y
    a, b, c = (t[:, None, None] for t in splats.conics.unbind(-1))
    alphas = splats.opacities[:, None, None] * torch.exp(-0.5 * (a * dx**2 + c * dy**2) - b * dx * dy)
    touched = _touched(splats, scene.width, scene.height)
    alphas = torch.where(touched, alphas, 0)[order]
    drawn = torch.where(alphas >= 1 / 255, alphas.clamp(max=0.999), 0)
    left = torch.cumprod(1 - drawn, dim=0)
    middle = 0.5 * (a + c) / (a * c - b * b)
    exact_radii = 3 * torch.sqrt(middle + torch.sqrt((middle**2 - 1 / (a * c - b * b)).clamp(min=0.1)))
    # Only splats whose alpha can still matter at three deviations depend on the radius.
    radii = exact_radii[255 * splats.opacities[:, None, None] * np.exp(-4.5) > 1]
    candidates = [
        (255 * alphas - 1).abs(),
        (alphas / 0.999 - 1).abs(),
        (1e4 * left - 1).abs(),
        (radii / radii.round() - 1).abs(),
    ]
    return min(float(t.min()) for t in candidates)
