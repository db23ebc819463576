"""Multiresolution hash encoding: numba on the CPU, CUDA or tiny-cuda-nn on the GPU, plain torch as the reference.

All of them read and write the same table, so a field trained with one can be evaluated with another.
"""

from __future__ import annotations

from odin_nerfstudio.nerfxl.hash_grid.layout import HashGridConfig, HashGridLayout, Level
from odin_nerfstudio.nerfxl.hash_grid.module import HashGrid
from odin_nerfstudio.nerfxl.hash_grid.select import Encoder, select_encoder

__all__ = ["Encoder", "HashGrid", "HashGridConfig", "HashGridLayout", "Level", "select_encoder"]
