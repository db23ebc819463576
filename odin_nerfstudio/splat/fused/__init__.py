"""How rows and gradients travel between GPUs: the same two placements, in few kernels and without waiting for counts.

A unit is planned while the one before it is rendered: every owner culls its rows for all views at once, and the ranks
let each other know how many rows of each view they have, early and late, wanted and not. All later sizes follow from
these numbers, so that nobody asks for a size again, and a row that turns out to be invisible travels with radius 0.
"""

from odin_nerfstudio.splat.fused.sparse_exchange import FusedSparseExchange
from odin_nerfstudio.splat.fused.splat_exchange import FusedSplatExchange

__all__ = ["FusedSparseExchange", "FusedSplatExchange"]
