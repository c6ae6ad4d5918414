"""What a codec does to a tensor, and the codecs' short names."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import commsweep as cs
from commsweep.compressors import build
from commsweep.integrations.measure import TIED, codec, measure, named

CODECS = [
    "none",
    "topk:0.1",
    "uniform:4",
    "uniform:2,rounding=stochastic,scale=group,group=32",
    "tern",
    "sign",
    "qsgd:4",
    "natural",
    "e3m0",
    "randomk:0.25,scaled=true",
    "mxfp4",
    "nvfp4:rounding=stochastic",
]


@pytest.mark.parametrize("text", CODECS)
def test_numbers_are_those_of_the_codec_itself(text):
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    before = x.clone()
    (result,) = measure(x, text, seed=5)
    compressor = codec(text)
    y = compressor.roundtrip(x, 5)
    assert torch.equal(x, before) and torch.equal(cs.compress(x, text, 5), y)
    assert result.bytes == compressor.encode(x, 5).nbytes
    assert result.error == pytest.approx(float((y - x).norm() / x.norm()), rel=1e-5, abs=1e-7)
    cosine = float(torch.nn.functional.cosine_similarity(x.flatten(), y.flatten(), dim=0))
    assert result.cosine == pytest.approx(cosine, abs=1e-5)
    assert 0 <= result.entropy <= 8 and result.energy <= 1 + 1e-6


def test_unbiased_codecs_have_none_over_many_draws_and_biased_ones_their_error():
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(2))
    for text in ("tern", "uniform:2,rounding=stochastic", "randomk:0.25,scaled=true", "natural"):
        squares = [measure(x, text, seed=7 * turn)[0].bias_squared for turn in range(200)]
        error = measure(x, text)[0].error
        assert abs(sum(squares) / len(squares)) < 0.02 * error**2, text
    for text in ("topk:0.1", "uniform:2", "sign"):
        (result,) = measure(x, text)
        assert result.bias == pytest.approx(result.error, rel=1e-5)


@given(st.integers(1, 5), st.integers(1, 40), st.floats(0.01, 1.0))
def test_any_shape_is_measured(rows, columns, ratio):
    x = torch.randn(rows, columns)
    for result in measure(x, [{"kind": "topk", "ratio": ratio}, "uniform:4"]):
        assert math.isfinite(result.error) and result.bytes > 0


def test_no_global_random_state_is_drawn_from():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    measure(torch.ones(4, 8), CODECS)
    assert torch.equal(torch.get_rng_state(), before)


def test_short_names_are_settings():
    assert (
        codec("uniform:4,rounding=stochastic").spec
        == build({"kind": "uniform", "bits": 4, "rounding": "stochastic"}).spec
    )
    assert named({"kind": "topk", "ratio": 0.1}) == "topk:ratio=0.1"


@pytest.mark.parametrize(
    "text, said",
    [
        ("topkk:0.1", "did you mean 'topk'"),
        ("mxfp9", "no kind 'mxfp9'; did you mean"),
        ("sign:3", "names no setting"),
        ("topk:0.1,0.2", "names no setting"),
        ("topk:7", "ratio"),
        ("uniform:4,bit=3", "bit"),
        *((kind, f"no kind '{kind}'") for kind in TIED),
    ],
)
def test_what_is_no_codec_is_named(text, said):
    with pytest.raises(cs.UserError, match=said.replace("(", r"\(")):
        codec(text)
