"""Which parts of a tile are worth sampling (Müller et al. 2022, "Instant neural graphics primitives", appendix E.2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from odin_nerfstudio.draws import keyed_generator


@dataclass(frozen=True)
class OccupancyConfig:
    """The grid of cells that remembers how opaque each part of a tile was."""

    resolution: int = 128
    """Cells along an edge of a tile."""
    update_every: int = 16
    """Steps between updates."""
    warmup_steps: int = 256
    """Until this step every cell counts as occupied, and every update looks at all cells."""
    decay: float = 0.95
    """Factor on a cell's opacity each time that it is looked at, before the new value can raise it."""
    threshold: float = 0.01
    """Cells count as occupied above this opacity, or above the mean if that is lower."""


class OccupancyGrid(nn.Module):
    """Cells of a tile's unit cube that may hold something.

    An update after the warm-up looks at a quarter of all cells, in turns, so that each is seen every fourth time, and
    at as many draws from the occupied ones, so that empty space is let go of sooner. A cell that is above the threshold
    whenever it is looked at stays occupied.

    Buffers, part of the state: ``opacity`` (resolution³,) float32 and ``occupied`` (resolution³,) bool, z fastest.

    Args:
        config: sizes.
        seed: of the draws: of the run and the tile.
    """

    opacity: Tensor
    occupied: Tensor

    def __init__(self, config: OccupancyConfig, seed: int) -> None:
        super().__init__()
        self.config = config
        self.seed = seed
        cells = config.resolution**3
        self.register_buffer("opacity", torch.zeros(cells))
        self.register_buffer("occupied", torch.ones(cells, dtype=torch.bool))

    def forward(self, positions: Tensor) -> Tensor:
        """Whether positions lie in occupied cells.

        Args:
            positions: (N, 3) in [0, 1]; others count as in the nearest cell.

        Returns:
            (N,) bool.
        """
        resolution = self.config.resolution
        x, y, z = (positions * resolution).long().clamp_(0, resolution - 1).unbind(-1)
        return self.occupied[(x * resolution + y) * resolution + z]

    @torch.no_grad()
    def update(self, step: int, opacity_at: Callable[[Tensor], Tensor]) -> None:
        """Looks at cells again if it is time to.

        Draws depend on (seed, step) and the kind of device alone, not on what was drawn before.

        Args:
            step: of the run.
            opacity_at: (M, 3) positions in [0, 1] → (M,) how opaque one sample there is: density · step length, or
                1 − exp(−density · step length).
        """
        if step % self.config.update_every != 0:
            return
        generator = keyed_generator(self.seed, step, device=self.opacity.device)
        cells = self._cells_to_visit(step, generator)
        seen = opacity_at(self._points_in(cells, generator)).to(self.opacity.dtype)
        # A cell may be visited twice: it decays once and takes the larger value.
        self.opacity[cells] = self.opacity[cells] * self.config.decay
        self.opacity.scatter_reduce_(0, cells, seen, "amax")
        if step >= self.config.warmup_steps:
            self.occupied = self.opacity > self.opacity.mean().clamp(max=self.config.threshold)

    def _cells_to_visit(self, step: int, generator: torch.Generator) -> Tensor:
        """(M,) int64 cells."""
        cells, device = len(self.opacity), self.opacity.device
        if step < self.config.warmup_steps:
            return torch.arange(cells, device=device)
        turn = torch.arange(step // self.config.update_every % 4, cells, 4, device=device)
        occupied = self.occupied.nonzero().squeeze(-1)
        if len(occupied) > len(turn):
            occupied = occupied[torch.randint(len(occupied), turn.shape, generator=generator, device=device)]
        return torch.cat((turn, occupied))

    def _points_in(self, cells: Tensor, generator: torch.Generator) -> Tensor:
        """(M, 3) positions in [0, 1], uniform in their cells."""
        resolution = self.config.resolution
        corners = torch.stack((cells // resolution**2, cells // resolution % resolution, cells % resolution), dim=-1)
        jitter = torch.rand(corners.shape, generator=generator, device=cells.device)
        return (corners + jitter) / resolution
