"""Rotations: inverses, unbiased codes, errors against the theory's constants, blocks of any shape."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from commsweep.compressors import build
from commsweep.compressors.rotation import (
    back,
    blocks,
    butterflies,
    centroids,
    counted,
    rotated,
    signs,
    uniform,
    uniform_back,
)
from commsweep.compressors.transform import matrix
from commsweep.errors import UserError

# Lloyd-Max quantizers of N(0, 1): mean squared error (Max 1960, table 1).
DISTORTION = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009497, 5: 0.002499}


@given(st.integers(1, 5000), st.sampled_from([32, 128, 1024]))
def test_blocks_cover_a_sample_of_any_length(row, block):
    cuts = blocks(row, block)
    ends = [start for start, _ in cuts[1:]] + [row]
    at = 0
    for (start, size), end in zip(cuts, ends, strict=True):
        assert (
            start == at and size <= block and size & (size - 1) == 0 and (end - start) % size == 0
        )
        at = end
    assert at == row and counted(row, block) <= row // block + 11


@pytest.mark.parametrize("shape", [(3, 200), (1, 7), (5,), (2, 3, 4, 5), (1, 1)])
def test_a_rotation_keeps_lengths_and_its_inverse_brings_x_back(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    spun = rotated(x, 64, 5)
    assert torch.allclose(spun.norm(), x.norm(), rtol=1e-5)
    assert torch.allclose(back(spun, 64, 5).view(-1), x.reshape(-1), atol=1e-5)


def test_signs_are_fair_and_those_of_the_seed():
    drawn = signs(100_000, 3, torch.device("cpu"))
    assert abs(float(drawn.mean())) < 4 / math.sqrt(100_000) and set(drawn.tolist()) == {1.0, -1.0}
    assert torch.equal(drawn, signs(100_000, 3, torch.device("cpu")))
    assert not torch.equal(drawn, signs(100_000, 4, torch.device("cpu")))


@pytest.mark.parametrize("bits", DISTORTION)
def test_levels_are_lloyd_and_maxs(bits):
    levels = centroids(bits)
    assert len(levels) == 2 ** (bits - 1) and bool((levels.diff() > 0).all())
    z = torch.randn(2_000_000, generator=torch.Generator().manual_seed(1)).abs()
    edges = (levels[1:] + levels[:-1]) / 2
    off = (levels[torch.bucketize(z, edges)] - z).square()
    assert float(off.mean()) == pytest.approx(DISTORTION[bits], rel=0.01)


def heavy(n=512):
    """A message with outliers."""
    generator = torch.Generator().manual_seed(2)
    return torch.randn(1, n, generator=generator) ** 3


UNBIASED = [
    {"kind": "eden", "bits": 1},
    {"kind": "eden", "bits": 2},
    {"kind": "eden", "bits": 4, "block": 512},
    {"kind": "rotated", "code": {"kind": "uniform", "bits": 2, "rounding": "stochastic"}},
    {"kind": "rotated", "code": {"kind": "mx", "rounding": "stochastic"}},
    {"kind": "ms_eden"},
]


@pytest.mark.parametrize("spec", UNBIASED, ids=str)
def test_the_mean_over_draws_is_the_message(spec):
    x, codec, draws = heavy(), build(spec), 1500
    every = torch.stack([codec.roundtrip(x, seed)[0] for seed in range(draws)])
    error = every.std(0) / math.sqrt(draws)
    far = ((every.mean(0) - x[0]).abs() / error).square().mean()
    assert float(far) < 1.3, "chi-square a degree of freedom"
    # along the message itself, which is what a step of training sees
    along = (every @ x[0]) / (x @ x.T)[0]
    assert abs(float(along.mean()) - 1) < 4 * float(along.std()) / math.sqrt(draws) + 1e-6


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_edens_error_is_the_theorys(bits):
    """E|y - x|^2 / |x|^2 -> 1 / (1 - D) - 1, D the distortion of the levels (EDEN, theorem 1)."""
    x = torch.randn(64, 4096, generator=torch.Generator().manual_seed(3))
    codec = build({"kind": "eden", "bits": bits, "block": 1024})
    off = (codec.roundtrip(x, 1) - x).square().sum() / x.square().sum()
    assert float(off) == pytest.approx(1 / (1 - DISTORTION[bits]) - 1, rel=0.02)


def test_one_bit_is_drive():
    """Scale |x|^2 / |R x|_1, signs of R x (DRIVE, arXiv 2105.08339)."""
    x = heavy(128)
    spun = uniform(x, 128, 9)
    wanted = uniform_back(spun.sign() * (x.norm() ** 2 / spun.abs().sum()), 128, 9)
    found = build({"kind": "eden", "bits": 1}).roundtrip(x, 9)
    assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_a_rotation_helps_a_code_of_outliers():
    x = heavy(4096)
    code = {"kind": "uniform", "bits": 4, "scale": "group", "group": 128}
    plain, spun = (
        float((build(spec).roundtrip(x, 0) - x).norm())
        for spec in (code, {"kind": "rotated", "code": code})
    )
    assert spun < 0.75 * plain


@pytest.mark.parametrize("size", [1e-30, 1e25])
def test_very_small_and_very_large_messages_arrive(size):
    x = torch.randn(2, 128, generator=torch.Generator().manual_seed(4)) * size
    y = build({"kind": "eden", "bits": 4}).roundtrip(x, 0)
    assert float(((y - x) / size).norm() / (x / size).norm()) < 0.15


def test_zeros_stay_zeros():
    for spec in UNBIASED:
        assert not build(spec).roundtrip(torch.zeros(2, 100), 1).any()


def test_foreign_scales_are_refused():
    codec = build({"kind": "eden"})
    payload = codec.encode(heavy(), 1)
    payload.parts["scales"][0, 0] = -1.0
    with pytest.raises(UserError, match="a scale of EDEN is no positive number"):
        codec.decode(payload)


def test_what_a_rotated_message_has_not_is_one_line():
    from commsweep.registry import preset

    with pytest.raises(UserError, match="a rotated message has no channels"):
        preset(
            "digits",
            fwd__compressor__kind="rotated",
            fwd__compressor__code__kind="uniform",
            fwd__compressor__code__scale="channel",
        )


def test_ms_eden_has_less_error_than_stochastic_rounding_at_the_same_bits():
    x = torch.randn(16, 4096, generator=torch.Generator().manual_seed(5))
    drawn, corrected = (
        float((build(spec).roundtrip(x, 0) - x).square().sum())
        for spec in (
            {"kind": "mx", "format": "nvfp4", "rounding": "stochastic"},
            {"kind": "ms_eden"},
        )
    )
    assert corrected < 0.6 * drawn


@pytest.mark.parametrize("size", [2, 10, 31, 130])
@pytest.mark.parametrize("spec", [{"kind": "eden", "bits": 1}, {"kind": "ms_eden"}], ids=str)
def test_small_messages_have_no_bias_either(spec, size):
    x, codec, draws = heavy(size), build(spec), 800
    along = torch.stack([codec.roundtrip(x, seed)[0] for seed in range(draws)]) @ x[0]
    along = along / (x @ x.T)[0]
    # 0.005 remain of whole blocks of 128
    assert abs(float(along.mean()) - 1) < 4 * float(along.std()) / math.sqrt(draws) + 0.006


@pytest.mark.parametrize("size", [1e-44, 1e-41, 1e-30, 1e30, 1e37, 2e38])
def test_eden_sends_messages_near_the_ends_of_float32(size):
    x, codec = torch.full((1, 200), size), build({"kind": "eden", "bits": 4})
    y = codec.decode(codec.encode(x, 3))
    assert bool(y.isfinite().all()) and torch.equal(y, codec.roundtrip(x, 3))
    if size > 1e-38:
        assert float(y.double().mean() / size) == pytest.approx(1, abs=0.1)


def test_a_block_that_is_nothing_beside_the_message_arrives_as_zero():
    x = torch.full((2, 6), 3e-45)
    x[0, 0] = 1
    code = build({"kind": "eden", "bits": 4})
    for seed in range(5):
        y = code.decode(code.encode(x, seed))
        assert y.isfinite().all() and y[1].abs().max() <= 1e-40
        assert torch.equal(y, code.apply(x, seed))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", [(3, 1000), (1, 5000), (4, 7, 33), (2, 128), (5, 37), (11, 384)])
def test_eden_has_the_same_bits_with_and_without_the_compiler(bits, shape, monkeypatch):
    """Blocks beside each other, fewer than eight of them, small rests, several rows, extremes."""
    codec = build({"kind": "eden", "bits": bits})
    x = torch.randn(shape, generator=torch.Generator().manual_seed(bits)) * 3
    x.view(-1)[::97] *= 1e4
    x[0] = 0
    compiled = *codec._codes(x, 5), codec.apply(x, 5)
    assert torch.equal(codec.decode(codec.encode(x, 5)), compiled[2])
    with monkeypatch.context() as patch:
        patch.setattr("commsweep.compressors.kernels.rotation.usable", lambda x: False)
        plain = *codec._codes(x, 5), codec.apply(x, 5)
    assert all(torch.equal(a, b) for a, b in zip(compiled, plain, strict=True))


def test_butterflies_are_the_hadamard_transform():
    x = torch.randn(2, 3, 128, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(butterflies(x) / 128**0.5, x @ matrix("hadamard", 128), atol=1e-5)
