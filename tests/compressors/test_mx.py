"""Microscaling formats against torch's own small floats, the standard's examples, and properties."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from commsweep.compressors import build
from commsweep.compressors.kernels import cpu
from commsweep.compressors.mx import E2M1, E2M3, E4M3, E5M2
from commsweep.config.base import by_kind
from commsweep.config.compressors import CompressorSpec
from commsweep.errors import UserError
from tests.helpers import same_bits

FORMATS = ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp6", "mxfp4", "nvfp4")
BITS = {"mxfp8_e4m3": 8.25, "mxfp8_e5m2": 8.25, "mxfp6": 6.25, "mxfp4": 4.25, "nvfp4": 4.5}


def test_the_grid_of_fp4_is_the_standards():
    assert E2M1.decode(torch.arange(8)).tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert E2M3.decode(torch.tensor([1, 31])).tolist() == [0.125, 7.5]


@pytest.mark.parametrize("kind", [E4M3, E5M2, E2M3, E2M1])
def test_codes_and_values_are_one_to_one(kind):
    codes = torch.arange(kind.codes)
    values = kind.decode(codes)
    assert torch.equal(kind.encode(values), codes) and torch.equal(kind.rounded(values), values)
    assert values[-1] == kind.most and bool((values.diff() > 0).all())


@pytest.mark.parametrize(
    "kind, own", [(E4M3, torch.float8_e4m3fn), (E5M2, torch.float8_e5m2)], ids=["e4m3", "e5m2"]
)
@given(st.floats(-20, 16), st.integers(0, 2**31))
def test_rounding_is_torchs_cast(kind, own, exponent, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(64, generator=generator) * 2**exponent
    x = x.clamp(max=kind.most)
    assert torch.equal(kind.rounded(x), x.to(own).float())
    codes = x.to(own).view(torch.uint8).long()
    assert torch.equal(kind.encode(kind.rounded(x)), codes)


def test_ties_go_to_the_even_code():
    x = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert E2M1.rounded(x).tolist() == [0, 1, 1, 2, 2, 4, 4]


def test_an_mxfp4_block_by_hand():
    """max 7 -> floor(log2 7) - 2 = 0, X = 1: 7 saturates at 6, 2.6 -> 3, -0.3 -> -0.5, 0.2 -> 0."""
    x = torch.zeros(1, 32)
    x[0, :4] = torch.tensor([7.0, 2.6, -0.3, 0.2])
    codec = build({"kind": "mx"})
    payload = codec.encode(x)
    assert codec.decode(payload)[0, :4].tolist() == [6.0, 3.0, -0.5, 0.0]
    assert payload.parts["scales"].tolist() == [127]
    # codes of four bits, the first in the low half: 6 is 0111, 3 is 0101, -0.5 is 1001
    assert payload.parts["codes"][:2].tolist() == [0b0101_0111, 0b0000_1001]


def test_an_nvfp4_block_by_hand():
    """Message max 2688 = 448 * 6: T = 1. A block with max 12 has s = 2 and keeps 12 and 3 exactly."""
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 16], x[0, 17] = 2688.0, 12.0, -3.0
    codec = build({"kind": "mx", "format": "nvfp4"})
    payload = codec.encode(x)
    assert payload.parts["whole"].tolist() == [1.0]
    assert E4M3.decode(payload.parts["scales"].long()).tolist() == [448.0, 2.0]
    assert torch.equal(codec.decode(payload), x)


@pytest.mark.parametrize("format_", FORMATS)
def test_bytes_are_the_formats(format_):
    codec = build({"kind": "mx", "format": format_})
    x = torch.randn(8, 512)
    whole = 4 if format_ == "nvfp4" else 0
    assert codec.encode(x).nbytes == BITS[format_] * x.numel() / 8 + whole


@pytest.mark.parametrize("format_", FORMATS)
def test_stochastic_rounding_has_no_bias(format_):
    codec = build({"kind": "mx", "format": format_, "rounding": "stochastic"})
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    draws = torch.stack([codec.roundtrip(x, 2 * seed) for seed in range(800)])
    # Without bias the squared error of the mean is that of a draw, divided by their number.
    left = (draws.mean(0) - x).square().sum() / (draws - x).square().sum(dim=(1, 2)).mean()
    assert 0.6 < left * len(draws) < 1.4


@pytest.mark.parametrize("format_", FORMATS)
@given(st.integers(1, 70), st.floats(-30, 30), st.integers(0, 2**31))
def test_no_value_is_further_off_than_half_a_step_of_its_block(format_, n, exponent, seed):
    codec = build({"kind": "mx", "format": format_})
    x = torch.randn(n, generator=torch.Generator().manual_seed(seed)) * 2**exponent
    y = codec.roundtrip(x)
    # Saturation of the largest: MX floors the scale, so up to a third of it (fp4: 8 -> 6).
    assert bool(((y - x).abs() <= 0.34 * x.abs().max()).all())
    assert torch.equal(y, codec.decode(codec.encode(x)))


def test_foreign_codes_are_refused():
    for format_, part, byte in (("mxfp8_e4m3", "codes", 127), ("mxfp4", "scales", 255)):
        codec = build({"kind": "mx", "format": format_})
        payload = codec.encode(torch.randn(1, 64))
        payload.parts[part][0] = byte
        with pytest.raises(UserError):
            codec.decode(payload)
    codec = build({"kind": "mx", "format": "nvfp4"})
    payload = codec.encode(torch.randn(1, 64))
    payload.parts["whole"][0] = torch.inf
    with pytest.raises(UserError, match="no positive number"):
        codec.decode(payload)


def test_it_is_a_kind_for_boundaries():
    assert "mx" in by_kind(CompressorSpec)


@pytest.mark.slow
def test_torchao_agrees_bit_for_bit():
    """Where torchao is installed (pip install --no-deps torchao==0.18.0): its MX tensors, with
    floor scales, and its NVFP4 tensors under a scale of the message.
    """
    pytest.importorskip("torchao")
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    types = {
        "mxfp8_e4m3": torch.float8_e4m3fn,
        "mxfp8_e5m2": torch.float8_e5m2,
        "mxfp4": torch.float4_e2m1fn_x2,
    }
    generator = torch.Generator().manual_seed(0)
    for exponent in range(-12, 12):
        x = torch.randn(8, 128, generator=generator) * 2.0**exponent
        for name, dtype in types.items():
            wanted = MXTensor.to_mx(x, dtype, 32, ScaleCalculationMode.FLOOR)
            found = build({"kind": "mx", "format": name}).roundtrip(x)
            assert torch.equal(found, wanted.dequantize(torch.float32)), name
        scale = per_tensor_amax_to_scale(x.abs().max())
        wanted = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=scale).dequantize(torch.float32)
        assert torch.equal(build({"kind": "mx", "format": "nvfp4"}).roundtrip(x), wanted)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("format_", FORMATS)
@given(st.integers(1, 200), st.integers(-45, 37), st.booleans(), st.integers(0, 2**31))
def test_kernels_do_what_torch_does(format_, rounding, n, power, ties, seed):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(2, n, generator=draw) * 10.0**power
    x = x * (torch.rand(x.shape, generator=draw) < 0.9)
    x = (x / x.abs().max().clamp(min=1e-45) * 16).round() / 2 if ties else x
    made = build({"kind": "mx", "format": format_, "rounding": rounding})
    y, told = made.apply(x, seed), made.encode(x, seed)
    bad = made.apply(torch.where(x == x.max(), torch.inf, x), seed)
    with mock.patch.object(cpu, "usable", lambda x: False):
        assert same_bits(y, made.apply(x, seed))
        wanted = made.encode(x, seed)
        plain = made.apply(torch.where(x == x.max(), torch.inf, x), seed)
    assert all(torch.equal(told.parts[part], wanted.parts[part]) for part in wanted.parts)
    assert torch.equal(bad.isnan(), plain.isnan())
    assert same_bits(bad.nan_to_num(0.0), plain.nan_to_num(0.0))
