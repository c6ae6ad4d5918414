"""The compiled CPU kernels of thresholds against plain torch, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from commsweep.compressors import thresholds
from commsweep.compressors.kernels import cpu
from tests.helpers import same_bits

pytestmark = pytest.mark.skipif(cpu.numba is None, reason="needs numba")
AWKWARD = [0.0, -0.0, 1.0, -1.0, 1e-42, 3e38, float("inf"), -float("inf"), float("nan")]


@given(
    st.integers(1, 4),
    st.sampled_from([1, 7, 64, 20_000]),
    st.lists(st.sampled_from(AWKWARD), max_size=3),
    st.none() | st.sampled_from(AWKWARD),
    st.integers(0, 2**31),
)
def test_what_exceeds_a_threshold_is_what_torch_says(rows, n, values, edge, seed):
    generator = torch.Generator().manual_seed(seed)
    x, edges = torch.randn(rows, n, generator=generator), torch.rand(rows, 1, generator=generator)
    for value in values:
        x[int(seed % rows), int(seed % n)] = value
    if seed % 2:
        edges = x[:, :1].abs()  # an entry that is as large as the edge
    if edge is not None:
        edges[0] = edge
    made, places = thresholds._above(x, edges, True)
    bare, no_places = thresholds._above(x, edges, False)
    counted = thresholds._count(x.abs(), edges)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "usable", lambda x: False)
        wanted, mask = thresholds._above(x, edges, True)
        assert torch.equal(counted, thresholds._count(x.abs(), edges))
    assert same_bits(made, wanted) and torch.equal(places, mask)
    assert same_bits(bare, wanted) and no_places is None
