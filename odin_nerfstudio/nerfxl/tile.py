"""One tile at work: where it is worth sampling, and what its field says there."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from odin_nerfstudio.nerfxl.contraction import Contraction
from odin_nerfstudio.nerfxl.exchange import Radiance
from odin_nerfstudio.nerfxl.field import SharedHead, TileField, TileFieldConfig
from odin_nerfstudio.nerfxl.lattice import Samples
from odin_nerfstudio.nerfxl.occupancy import OccupancyConfig, OccupancyGrid
from odin_nerfstudio.nerfxl.scene import Scene
from odin_nerfstudio.nerfxl.segments import running_sum

_CHUNK = 1 << 18
"""Positions that an occupancy update evaluates at a time."""
_HIDDEN = 6.9
"""Optical depth within a tile behind which samples are left out: a thousandth of the light gets there."""
_STRETCHES = 4
"""In how many parts, front to back, rays are searched for the end of what is visible."""


class Tile(nn.Module):
    """What is private to a tile: its field and its occupancy grid.

    Args:
        field: sizes of the field.
        occupancy: sizes of the grid.
        seed: of the run.
        number: of the tile; its parameters and draws depend on seed and number alone, wherever it lives.
    """

    def __init__(self, field: TileFieldConfig, occupancy: OccupancyConfig, seed: int, number: int) -> None:
        super().__init__()
        key = (seed << 20) + number
        self.field = TileField(field, torch.Generator().manual_seed(key))
        self.occupancy = OccupancyGrid(occupancy, key)

    def radiance(
        self,
        samples: Samples,
        origins: Tensor,
        directions: Tensor,
        contraction: Contraction,
        unit: float,
        head: SharedHead,
        rays: Tensor,
    ) -> Radiance:
        """Evaluates the field at samples, of which there may be none.

        Args:
            samples: S samples in this tile.
            origins: (R, 3).
            directions: (R, 3); gradients reach both.
            contraction: of this tile.
            unit: world length in which the field's density counts.
            head: the colour network of all tiles.
            rays: (R, ``hidden_dim``) from :meth:`~.field.SharedHead.encode_rays`.
        """
        density, geometry = self.field(contraction(samples.positions(origins, directions)))
        return Radiance(samples, density / unit, head(geometry, rays, samples.ray_index))

    @torch.no_grad()
    def visible(
        self, samples: Samples, origins: Tensor, directions: Tensor, contraction: Contraction, unit: float
    ) -> Samples:
        """The samples that are not hidden behind others of this tile; arguments as of :meth:`radiance`.

        Space behind surfaces is opaque, since nothing tells it not to be, so occupancy grids do not skip it. Finding
        out takes the density only, and not that of what is known to be hidden already.
        """
        ray, start, end = samples
        counts = torch.bincount(ray, minlength=len(origins))
        place = torch.arange(len(ray), device=ray.device) - (counts.cumsum(0) - counts)[ray]
        stretch = place * _STRETCHES // counts[ray].clamp_min(1)
        optical = torch.zeros_like(start)
        passed = start.new_zeros(len(origins))
        for part in range(_STRETCHES):
            index = ((stretch == part) & (passed[ray] < _HIDDEN)).nonzero()[:, 0]
            chosen = Samples(ray[index], start[index], end[index])
            density, _ = self.field(contraction(chosen.positions(origins, directions)))
            optical[index] = density / unit * (chosen.t_end - chosen.t_start)
            passed.index_add_(0, chosen.ray_index, optical[index])
        before, _ = running_sum(optical, ray, len(origins))
        kept = before < _HIDDEN
        return Samples(ray[kept], start[kept], end[kept])

    @torch.no_grad()
    def look_around(self, step: int, contraction: Contraction, scene: Scene, samples: int) -> None:
        """Updates the occupancy grid, if it is time to.

        Args:
            step: of the run.
            contraction: of this tile.
            scene: how long intervals of the lattice are.
            samples: intervals per ray.
        """

        def opacity_at(positions: Tensor) -> Tensor:
            parts = []
            for part in positions.split(_CHUNK):
                length = scene.step_length(contraction.inverse(part), samples)
                parts.append(-torch.expm1(-self.field(part)[0] / scene.unit * length))
            return torch.cat(parts)

        self.occupancy.update(step, opacity_at)
