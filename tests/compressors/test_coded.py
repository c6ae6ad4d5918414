"""Kept values in a code of their own: TopK and the codec, each as it is alone, and nothing
between.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from commsweep.boundary.insert import insert
from commsweep.compressors import build
from commsweep.compressors.bits import mask_bytes
from commsweep.compressors.coded import scattered, taken
from commsweep.compressors.kernels.cpu import usable
from commsweep.config import override, record, run_id
from commsweep.errors import UserError
from commsweep.registry import preset
from tests.helpers import same_bits, tiny

TOPK = {"kind": "topk", "ratio": 0.25}
FOUR = {"kind": "uniform", "bits": 4, "scale": "sample"}


@pytest.mark.parametrize(
    "codec",
    [
        FOUR,
        {"kind": "fixed", "bits": 2, "scale": "group", "group": 4},
        {"kind": "sign"},
        {"kind": "cast"},
        {"kind": "natural"},
        {"kind": "onebit"},
    ],
    ids=str,
)
def test_it_is_the_codec_of_the_kept_values_at_their_places(codec):
    x = torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
    y = build(TOPK | {"values": codec}).roundtrip(x, seed=5)
    kept, mask = build(TOPK).masked(x)
    alone = build(codec)
    values = kept[mask].reshape(6, 10)
    if codec["kind"] != "natural":  # which draws
        assert same_bits(y[mask].reshape(6, 10), alone.roundtrip(values))
    assert (y[~mask] == 0).all()


def test_bytes_are_places_and_codes():
    x = torch.randn(8, 64)
    compressor = build(TOPK | {"values": FOUR})
    payload = compressor.encode(x)
    assert payload.nbytes == 8 * 16 * 4 // 8 + 8 * 2 * 4 + mask_bytes(8, 64, 16)
    assert payload.nbytes == compressor.formula_bytes(x.shape, x.dtype)
    assert set(payload.parts) == {"values.codes", "values.scales", "places"}


def test_stochastic_values_are_without_bias_and_draw_apart_from_the_places():
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(1))
    compressor = build(
        {
            "kind": "randomk",
            "ratio": 0.5,
            "scaled": True,
            "values": {"kind": "uniform", "bits": 2, "scale": "sample", "rounding": "stochastic"},
        }
    )
    mean = sum(compressor.roundtrip(x, seed) for seed in range(4000)) / 4000
    assert (mean - x).abs().max() < 0.15  # four standard deviations of the mean


def test_taking_and_putting_without_waiting_for_a_device_is_the_same():
    """The path of a GPU, on the CPU: in double, which the kernels do not take."""
    flat = torch.randn(5, 30, dtype=torch.float64)
    kept = build(TOPK).masked(flat.float())[1]
    assert not usable(flat)
    values = taken(flat, kept, 8)
    assert torch.equal(values, flat[kept].view(5, 8))
    assert torch.equal(scattered(values, kept), flat * kept)


@pytest.mark.parametrize("scope", ["sample", "last", "tensor"])
@pytest.mark.parametrize("shape", [(6, 5, 8), (4, 6, 4, 4)], ids=str)
def test_a_shared_mask_carries_codes_only(shape, scope):
    x, g = torch.randn(shape), torch.randn(shape)
    if len(shape) == 4:
        x, g = (one.contiguous(memory_format=torch.channels_last) for one in (x, g))
    forward = build({"kind": "topk", "ratio": 0.5, "scope": scope, "values": FOUR})
    _, mask = forward.masked(x)
    backward = build(
        {
            "kind": "forward_mask",
            "values": {"kind": "fixed", "bits": 2, "rounding": "stochastic", "scale": "sample"},
        }
    )
    backward.forward = forward
    bound = backward.given(mask)
    payload = bound.encode(g, seed=9)
    y = bound.roundtrip(g, seed=9)
    assert (
        same_bits(bound.decode(payload), y) and (y[~mask] == 0).all() and y.stride() == g.stride()
    )
    scales = 1 if scope == "tensor" else shape[0]
    assert payload.nbytes == -(-int(mask.sum()) * 2 // 8) + 4 * scales == bound.bytes_sent(y)


def test_a_plain_shared_mask_may_lie_otherwise_than_the_message():
    g = torch.randn(4, 6, 4, 4).contiguous(memory_format=torch.channels_last)
    bound = build({"kind": "forward_mask"}).given(
        build({"kind": "topk", "ratio": 0.5, "scope": "last"}).masked(g)[1]
    )
    assert same_bits(bound.decode(bound.encode(g)), bound.roundtrip(g))


def test_a_model_of_ones_own_trains_with_it():
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    made = insert(
        net,
        {
            "1": {
                "fwd": {"compressor": TOPK | {"values": FOUR}},
                "bwd": {"compressor": {"kind": "forward_mask", "values": {"kind": "sign"}}},
            }
        },
        torch.randn(1, 8),
        12,
    )
    made.begin(0, torch.arange(12))
    cross_entropy(net(torch.randn(12, 8)), torch.arange(12) % 4).backward()
    assert net[0].weight.grad.abs().sum() > 0
    ledger = made.ledger()["1"]
    assert (
        ledger["fwd"] == 12 * 2 + 12 * 8 + mask_bytes(12, 16, 4)
        and ledger["bwd"] == -(-12 * 4 // 8) + 12 * 4
    )


def test_a_run_without_it_keeps_its_text_and_id():
    run = preset("digits_topk")
    assert "values" not in record(run)["fwd"]["compressor"] and run_id(run) == "cc69feba5fef"
    coded = override(
        run, {"fwd.compressor.values.kind": "uniform", "fwd.compressor.values.bits": 4}
    )
    assert override(coded, {"fwd.compressor.values": None}) == run


@pytest.mark.parametrize(
    "changes, line",
    [
        (
            {
                "fwd__compressor__kind": "topk",
                "fwd__compressor__values__kind": "uniform",
                "fwd__compressor__values__scale": "last",
            },
            "kept values have no channels",
        ),
        (
            {
                "fwd__compressor__kind": "topk",
                "fwd__compressor__values__kind": "uniform",
                "fwd__compressor__values__group": 8,
            },
            "fwd.compressor.values.group has no effect",
        ),
        (
            {"fwd__compressor__kind": "topk", "fwd__compressor__values__kind": "topk"},
            "fwd.compressor.values.kind=topk: this compressor is not for here",
        ),
        (
            {"fwd__compressor__kind": "uniform", "fwd__compressor__values__kind": "cast"},
            "values belongs to kind=topk",
        ),
        (
            {
                "fwd__compressor__kind": "topk",
                "fwd__feedback__kind": "aqsgd",
                "bwd__compressor__kind": "forward_mask",
                "bwd__compressor__values__kind": "cast",
            },
            "needs as many values of every sample",
        ),
        (
            {
                "grad__learners": 2,
                "grad__exchange": "allgather",
                "grad__compressor__kind": "topk",
                "grad__compressor__values__kind": "uniform",
                "grad__compressor__values__scale": "channel",
            },
            "grad.compressor.values.scale=channel: kept values have no channels",
        ),
    ],
)
def test_what_means_nothing_is_refused(changes, line):
    with pytest.raises(UserError) as refused:
        tiny(**changes)
    assert line in str(refused.value)
