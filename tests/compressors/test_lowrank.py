"""Orthonormal columns by Cholesky's way, beside numpy's Householder QR in float64."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commsweep.compressors import lowrank


def projector(factor: torch.Tensor) -> np.ndarray:
    q, _ = np.linalg.qr(factor.double().numpy())
    return q @ q.T


@given(
    rank=st.integers(lowrank.CHOLESKY_RANK, 40),
    taller=st.integers(2, 6),
    spread=st.floats(0, 2),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=25, deadline=None)
def test_columns_are_orthonormal_and_span_the_factors(rank, taller, spread, seed):
    """Also of columns whose lengths differ by a hundred times."""
    draw = torch.Generator().manual_seed(seed)
    factor = torch.randn(taller * rank, rank, generator=draw) * torch.logspace(0, -spread, rank)
    q = lowrank.orthonormal(factor)
    assert q.dtype == torch.float32
    assert (q.mT @ q - torch.eye(rank)).abs().max() < 2e-6
    np.testing.assert_allclose((q @ q.mT).numpy(), projector(factor), atol=2e-5)


@pytest.mark.parametrize("noise", [0.0, 1e-7, 1e-5])
def test_nearly_dependent_columns_are_orthonormal_too(noise):
    factor = torch.randn(96, 24, generator=torch.Generator().manual_seed(1))
    factor[:, 5] = factor[:, 4] * (1 + noise * torch.arange(96) / 96)
    q = lowrank.orthonormal(factor)
    assert (q.mT @ q - torch.eye(24)).abs().max() < 2e-6


def test_values_that_are_not_finite_stay_so():
    factor = torch.randn(96, 24)
    factor[3, 4] = torch.nan
    assert lowrank.orthonormal(factor).isnan().any()
