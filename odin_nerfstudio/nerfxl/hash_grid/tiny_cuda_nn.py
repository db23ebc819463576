"""Multiresolution hash encoding by tiny-cuda-nn, where it is installed.

The table stays a parameter of ours and is lent to tiny-cuda-nn for the call, so checkpoints do not depend on it.
"""

from __future__ import annotations

from functools import lru_cache

import tinycudann
import torch
from torch import Tensor, nn

from odin_nerfstudio.nerfxl.hash_grid.layout import HashGridLayout


def encode(positions: Tensor, table: Tensor, layout: HashGridLayout) -> Tensor:
    """Interpolates the features of all levels; see :func:`reference.encode`.

    Args:
        positions: (N, 3) float32 on a CUDA device, in [0, 1].
        table: (entries, features) float32 on the same device.
        layout: of the table.

    Returns:
        (N, levels · features) float32, differentiable with respect to both arguments.

    Raises:
        RuntimeError: if this version of tiny-cuda-nn lays the table out differently.
    """
    if len(positions) == 0:
        return table.new_zeros(0, layout.out_dim) + 0 * table.sum()
    encoding = _encoding(layout, positions.device)
    return torch.func.functional_call(encoding, {"params": table.flatten()}, (positions,))


@lru_cache(maxsize=8)
def _encoding(layout: HashGridLayout, device: torch.device) -> nn.Module:
    config = layout.config
    with torch.cuda.device(device):
        encoding = tinycudann.Encoding(
            n_input_dims=3,
            encoding_config={
                "otype": "HashGrid",
                "n_levels": config.levels,
                "n_features_per_level": config.features,
                "log2_hashmap_size": config.log2_table_size,
                "base_resolution": config.base_resolution,
                "per_level_scale": layout.growth,
            },
            dtype=torch.float32,
        )
    if encoding.params.numel() != layout.entries * layout.features:
        raise RuntimeError(
            f"tiny-cuda-nn has {encoding.params.numel()} parameters for {config}, not "
            f"{layout.entries * layout.features}: uninstall it, or use a version whose layout is that of 1.7 or 2.0."
        )
    return encoding
