"""A hash grid as a torch module."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from odin_nerfstudio.nerfxl.hash_grid.layout import HashGridConfig
from odin_nerfstudio.nerfxl.hash_grid.select import select_encoder

_INITIAL_RANGE = 1e-4


class HashGrid(nn.Module):
    """Trainable features on a hierarchy of grids over the unit cube (Müller et al. 2022).

    Args:
        config: sizes.
        generator: of the initial features; torch's global one if not given.

    Raises:
        UserError: for sizes that no kernel can handle.
    """

    def __init__(self, config: HashGridConfig, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.layout = config.layout
        table = torch.empty(self.layout.entries, self.layout.features)
        self.table = nn.Parameter(table.uniform_(-_INITIAL_RANGE, _INITIAL_RANGE, generator=generator))

    @property
    def out_dim(self) -> int:
        """Features of a position."""
        return self.layout.out_dim

    def forward(self, positions: Tensor) -> Tensor:
        """Features of positions.

        Args:
            positions: (N, 3) in [0, 1], of the table's type and device.

        Returns:
            (N, ``out_dim``), the coarsest level first; the memory may be that of the transpose.
        """
        encode = select_encoder(self.table.device, self.table.dtype)
        return encode(positions, self.table, self.layout)
