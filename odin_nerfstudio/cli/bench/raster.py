"""``odin-bench raster``: time of one image, forward and backward, and its error against the float64 reference."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from odin_nerfstudio.cpu import threads
from odin_nerfstudio.errors import UserError
from odin_nerfstudio.splat.raster import PinholeCamera, Rasterizer, RasterSettings, Rows, select_rasterizer
from odin_nerfstudio.splat.raster.numba import NumbaRasterizer
from odin_nerfstudio.splat.raster.reference import ReferenceRasterizer


@dataclass
class RasterBench:
    """Renders a room of Gaussians like those of a trained scene, forward and backward."""

    width: int = 960
    """Image width in pixels."""
    height: int = 540
    """Image height in pixels."""
    num_primitives: int = 150_000
    """Gaussians in the room; the camera sees more than half of them."""
    sh_degree: int = 3
    """Degree of the spherical harmonics."""
    repeats: int = 9
    """Timed repetitions, after one that compiles and warms up."""
    seed: int = 0
    """Seed of the room."""
    device: str = "cpu"
    """``cpu`` (numba) or ``cuda`` (gsplat)."""

    def run(self) -> dict[str, float | int | str]:
        """Prints a table and returns the figures; a pair is one alpha test that the CPU rasterizer makes.

        Raises:
            UserError: for a device that there is no renderer for, or no hardware.
        """
        rasterizer = select_rasterizer(self.device)
        if self.device != "cpu" and not torch.cuda.is_available():
            raise UserError(f"--device {self.device}: torch finds no CUDA device here; use --device cpu.")
        settings = RasterSettings(sh_degree=self.sh_degree)
        rows, camera = _room(self.num_primitives, self.width, self.height, self.sh_degree, self.seed)
        splats = NumbaRasterizer().project(rows, camera, settings)
        pairs = NumbaRasterizer().count_tests(splats, self.width, self.height)

        start = time.perf_counter()
        _render(rasterizer, rows, camera, settings, torch.float32, self.device)
        first = time.perf_counter() - start
        times = np.array(
            [_render(rasterizer, rows, camera, settings, torch.float32, self.device)[1] for _ in range(self.repeats)]
        )
        forward, backward = 1e3 * times.T
        total = forward + backward
        image_error, gradient_error = _errors(rasterizer, self.device)
        figures: dict[str, float | int | str] = {
            "mpairs_per_s": pairs / np.median(total) / 1e3,
            "max_rel_err_image": image_error,
            "max_rel_err_grad": gradient_error,
            "forward_ms": float(np.median(forward)),
            "backward_ms": float(np.median(backward)),
            "total_ms": float(np.median(total)),
            "total_ms_min": float(total.min()),
            "total_ms_max": float(total.max()),
            "first_s": first,
            "pairs": pairs,
            "visible": len(splats.ids),
            "threads": threads.count(),
            "device": self.device,
        }

        table = Table(title=f"{len(splats.ids):,} visible Gaussians, {self.width}×{self.height}, {self.device}")
        table.add_column("")
        table.add_column("median", justify="right")
        table.add_column("min … max", justify="right")
        for name, values in (("forward", forward), ("backward", backward), ("both", total)):
            table.add_row(f"{name}, ms", f"{np.median(values):.1f}", f"{values.min():.1f} … {values.max():.1f}")
        table.add_row("pairs", f"{pairs / 1e6:.1f} M", f"{pairs / (self.width * self.height):.0f} a pixel")
        table.add_row("pairs per second", f"{figures['mpairs_per_s']:.0f} M", f"{threads.count()} threads")
        table.add_row("error of the image", f"{image_error:.1e}", "of its maximum, against float64")
        table.add_row("error of the gradients", f"{gradient_error:.1e}", "of each one's maximum")
        Console().print(table)
        return figures


def _room(count: int, width: int, height: int, degree: int, seed: int) -> tuple[Rows, PinholeCamera]:
    """Flat Gaussians on the walls of a room and on balls in it: most are small, many nearly opaque or clear."""
    random = np.random.default_rng(seed)
    in_ball = random.random(count) < 0.4
    directions = random.normal(size=(count, 3))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    centres = random.uniform((-3, -0.5, 1), (3, 1.5, 4), size=(8, 3))[random.integers(0, 8, count)]
    walls = np.array([4.0, 2.0, 5.0]) * directions / np.abs(directions).max(axis=1, keepdims=True)
    means = np.where(in_ball[:, None], centres + 0.7 * directions, walls)
    # Spacing on the surfaces shrinks with the number of Gaussians.
    spacing = 0.7 * np.sqrt(150 / count)
    scales = np.log(spacing) + random.normal(-0.3, 0.7, (count, 3)) - np.array([0, 0, 1.5])

    def tensor(array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32))

    rows = Rows(
        ids=torch.arange(count),
        means=tensor(means),
        scales=tensor(scales),
        quats=tensor(random.normal(size=(count, 4))),
        features_dc=tensor(random.normal(size=(count, 3))),
        features_rest=tensor(0.1 * random.normal(size=(count, (degree + 1) ** 2 - 1, 3))),
        opacities=tensor(random.normal(-1.0, 2.0, (count, 1))),
    )
    viewmat = torch.eye(4)
    viewmat[2, 3] = 4.0
    K = tensor(np.array([[0.7 * width, 0, width / 2], [0, 0.7 * width, height / 2], [0, 0, 1]]))
    return rows, PinholeCamera(viewmat, K, width, height)


def _render(
    rasterizer: Rasterizer,
    rows: Rows,
    camera: PinholeCamera,
    settings: RasterSettings,
    dtype: torch.dtype,
    device: str,
) -> tuple[dict[str, Tensor], tuple[float, float]]:
    """Image and gradients of its squares, and the seconds that the forward and the backward took."""

    def now() -> float:
        if device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter()

    leaves = {
        name: t.detach().to(device, dtype).requires_grad_() for name, t in rows._asdict().items() if name != "ids"
    }
    leaves["viewmat"] = camera.viewmat.detach().to(device, dtype).requires_grad_()
    camera = replace(camera, viewmat=leaves["viewmat"], K=camera.K.to(device, dtype))
    inputs = Rows(rows.ids.to(device), *(leaves[name] for name in Rows._fields[1:]))
    start = now()
    splats = rasterizer.project(inputs, camera, settings)
    image = rasterizer.rasterize(splats, camera.width, camera.height, absgrad=True)
    middle = now()
    # The gradient of ½ Σ image², handed in so that no loss is timed.
    outputs = {name: value for name, value in image._asdict().items() if value is not None}
    torch.autograd.backward(list(outputs.values()), [value.detach() for value in outputs.values()])
    end = now()
    values = {f"image {name}": value for name, value in outputs.items()}
    # The last row of the camera's matrix is constant.
    gradients = {name: leaf.grad[:3] if name == "viewmat" else leaf.grad for name, leaf in leaves.items()}
    values |= {f"gradient of {name}": gradient for name, gradient in gradients.items()}
    return {name: value.detach().cpu() for name, value in values.items()}, (middle - start, end - middle)


def _errors(rasterizer: Rasterizer, device: str) -> tuple[float, float]:
    """Largest differences from the float64 reference on a small room, each relative to the largest value."""
    settings = RasterSettings()
    room = _room(400, 64, 48, 3, seed=0)
    values, _ = _render(rasterizer, *room, settings, torch.float32, device)
    truth, _ = _render(ReferenceRasterizer(), *room, settings, torch.float64, "cpu")
    errors = {name: float((values[name] - truth[name]).abs().max() / truth[name].abs().max()) for name in truth}
    image = max(error for name, error in errors.items() if name.startswith("image"))
    return image, max(error for name, error in errors.items() if name.startswith("gradient"))
