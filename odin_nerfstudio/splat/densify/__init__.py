"""Densification by gsplat's strategies: the same scene whatever the number of ranks.

A strategy works on one rank's :class:`Shard`. What it decides follows from values and global ids alone, and what it
draws from (seed, step, id), so that the union of the shards is the same, to the last bit on a CPU, however the rows are
spread. What has to be known of other ranks is asked for through the shard's ``gather``.
"""

from odin_nerfstudio.splat.densify.grow_and_prune import GrowAndPrune
from odin_nerfstudio.splat.densify.monte_carlo import MonteCarlo, relocated_shape
from odin_nerfstudio.splat.densify.shard import Gather, Shard, alone
from odin_nerfstudio.splat.densify.statistics import SplatStatistics

__all__ = [
    "Gather",
    "GrowAndPrune",
    "MonteCarlo",
    "Shard",
    "SplatStatistics",
    "alone",
    "relocated_shape",
]
