"""Front-to-back order."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from odin_nerfstudio.splat.raster.numba.order import front_to_back

depth = st.one_of(st.sampled_from([0.5, 1.0, 2.0]), st.floats(2**-10, 2**30, width=32))


@given(st.lists(depth, max_size=60), st.randoms(use_true_random=False), st.booleans())
def test_sorts_by_depth_then_id(depths: list[float], random, ascending: bool) -> None:
    ids = list(range(0, 7 * len(depths), 7))
    if not ascending:
        random.shuffle(ids)
    depth_array, id_array = np.array(depths, np.float32), np.array(ids, np.int64)
    assert np.array_equal(front_to_back(depth_array, id_array), np.lexsort((id_array, depth_array)))
