"""Both kinds of collectives: what travels together comes apart again, and a process remembers its
own learner only.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from commsweep.collectives import BUCKET, Collectives, Processes, Simulated, _joined, _parted, mean
from commsweep.config.compressors.lowrank import PowerSGDSpec
from commsweep.config.compressors.sparse import TopKSpec
from commsweep.config.feedback import (
    EF21GradientSpec,
    EF21SGDMSpec,
    MomentumCorrectionSpec,
    ResidueSpec,
)
from commsweep.config.gradients import Gradients
from commsweep.data_parallel.exchange import Exchange
from tests.helpers import same_bits

TYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 4), max_size=4), st.sampled_from(TYPES)), max_size=5)
)
def test_tensors_of_any_shapes_and_types_travel_as_one(kinds):
    tensors = [(100 * torch.randn(shape)).to(kind) for shape, kind in kinds]
    back = _parted(_joined(tensors), tensors)
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(tensors, back, strict=True))
    assert _joined(tensors).numel() == sum(one.numel() * one.element_size() for one in tensors)


def test_a_layout_in_memory_survives():
    x = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    (back,) = _parted(_joined([x]), [x])
    assert back.stride() == x.stride() and torch.equal(back, x)


@given(st.integers(1, 5))
def test_a_mean_is_taken_in_the_learners_order(n):
    parts = [[torch.randn(7) * 10.0**k, torch.randn(2, 2)] for k in range(n)]
    want = [parts[0][i].clone() for i in range(2)]
    for one in parts[1:]:
        want = [a + b for a, b in zip(want, one, strict=True)]
    got = Simulated(n).all_reduce(parts, "gradients").wait()
    assert all(same_bits(a / n if n > 1 else a, b) for a, b in zip(want, got, strict=True))
    assert mean([parts[0][0]]) is parts[0][0]


class Elsewhere(Collectives):
    """A process whose peers say nothing: only what it holds is looked at."""

    bucket = BUCKET


@pytest.mark.parametrize(
    "feedback, tensors, mirrored",
    [
        (ResidueSpec(), 1, 0),
        (MomentumCorrectionSpec(), 2, 0),
        (EF21GradientSpec(), 1, 1),
        (EF21SGDMSpec(), 2, 1),
    ],
)
def test_a_process_holds_the_residues_of_its_own_learner_only(feedback, tensors, mirrored):
    net = nn.Linear(30, 40, bias=False)
    spec = Gradients(
        learners=4, exchange="allgather", compressor=TopKSpec(ratio=0.1), feedback=feedback
    )
    made = Exchange(spec, net, 0, Elsewhere(4, (2,)))
    held = [sum(one.dim() > 0 for one in own.buffers()) for own in made.memories]
    assert held == [
        mirrored,
        mirrored,
        tensors,
        mirrored,
    ]  # EF21's receivers must know A of everybody


def test_layers_travel_in_buckets_between_processes_and_alone_in_one():
    # 4 MB of weights each, and a vector
    net = nn.Sequential(*(nn.Linear(1000, 1000) for _ in range(8)))
    spec = Gradients(learners=4, exchange="allgather", compressor=TopKSpec(ratio=0.1))
    apart = Exchange(spec, net, 0)
    together = Exchange(spec, net, 0, Elsewhere(4, (0,)))
    assert all(len(bucket) == 1 for bucket in apart.buckets(0))
    buckets = list(together.buckets(0))
    assert buckets[0] == [index for index, layer in enumerate(together.layers) if layer.dense]
    assert [len(bucket) for bucket in buckets[1:]] == [6, 2]
    assert sorted(index for bucket in buckets for index in bucket) == list(range(16))
    assert Processes.bucket == BUCKET


def test_all_layers_of_a_joint_compressor_go_in_two_rounds():
    """PowerSGD's factors of every layer are one all-reduce each way, not one a layer."""
    asked = []

    class Counting(Simulated):
        bucket = BUCKET

        def gather(self, parts, what):
            asked.append(len(parts[0]))
            return super().gather(parts, what)

    net = nn.Sequential(*(nn.Linear(20, 20, bias=False) for _ in range(5)))
    spec = Gradients(learners=2, compressor=PowerSGDSpec(rank=2), feedback=ResidueSpec())
    ours, plain = Exchange(spec, net, 0, Counting(2)), Exchange(spec, net, 0)
    grads = [[torch.randn_like(p) for p in net.parameters()] for _ in range(2)]
    merged = {}
    for made in (ours, plain):
        made.collected = [[grad.clone() for grad in own] for own in grads]
        made.reduce(0, 0)
        merged[made] = [p.grad.clone() for p in net.parameters()]
    assert asked == [5, 5]
    assert all(same_bits(a, b) for a, b in zip(merged[ours], merged[plain], strict=True))
    assert ours.ledger.totals() == plain.ledger.totals()


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float32])
def test_a_mean_of_learners_is_one_where_their_sum_is_none(kind):
    """Four times 40,000 is infinite in float16."""
    tensors = [torch.full((3,), 40_000.0, dtype=kind) for _ in range(4)]
    assert torch.equal(mean(tensors), tensors[0]) and mean(tensors[:1]) is tensors[0]
