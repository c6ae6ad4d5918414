"""The controls: nothing arrives, or a running mean of each feature."""

from typing import ClassVar, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commsweep.boundary.channel import PackedReceiver, PackedSender, SimulatedSender
from commsweep.compressors import build
from commsweep.compressors.base import Compressor, Field, payload
from commsweep.config import Execution
from commsweep.config.compressors.base import Compression
from commsweep.training.run import build as build_run
from tests.boundary.test_boundary import train
from tests.helpers import linked

SHAPES = [(4, 3, 5, 6), (2, 7, 3), (5, 3), (1, 6, 3, 2, 2)]


@pytest.mark.parametrize("shape", SHAPES)
def test_nothing_travels_and_zeros_arrive(shape):
    zero, x = build({"kind": "zero"}), torch.randn(shape)
    if len(shape) == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    payload = zero.encode(x)
    arrived = zero.decode(payload)
    assert payload.nbytes == 0 and zero.bytes_sent(arrived) == 0
    assert torch.equal(arrived, torch.zeros(shape)) and arrived.stride() == x.stride()


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from(SHAPES),
    st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=30),
    st.sampled_from([0.05, 0.1, 0.5, 1.0]),
)
def test_the_mean_of_each_feature_follows_its_messages(shape, offsets, rate):
    """Against scalars in float64, feature by feature, over both ends and the gradients' way."""
    mean, g = build({"kind": "mean", "rate": rate}), torch.Generator().manual_seed(len(offsets))
    axis = 1 if len(shape) >= 4 else len(shape) - 1
    simulated = sender = receiver = mean.begin(torch.Size(shape), 0)
    state, expected = mean.sender_state(torch.Size(shape)), [0.0] * shape[axis]
    for number, offset in enumerate(offsets):
        x = torch.randn(shape, generator=g) + offset
        for feature, values in enumerate(x.double().unbind(axis)):
            weight = max(1 / (number + 1), rate)
            expected[feature] += (float(values.mean()) - expected[feature]) * weight
        arrived, simulated = mean.apply_from(x, simulated, 0)
        payload = mean.encode_from(x, sender, 0)
        sender = mean.next_kept(payload, sender)
        assert torch.equal(mean.decode(payload), arrived) and payload.nbytes == 4 * shape[axis]
        receiver = mean.next_kept(payload, receiver)
        layer = mean.for_message(x, state, number)
        assert torch.equal(layer.decode(layer.encode(x)), layer.apply(x))
        for got in (arrived, layer.apply(x)):
            for feature, values in enumerate(got.unbind(axis)):
                assert bool((values == values.flatten()[0]).all())
                assert float(values.flatten()[0]) == pytest.approx(
                    expected[feature], rel=1e-4, abs=1e-3
                )
    assert torch.equal(simulated, sender) and torch.equal(sender, receiver)


def test_a_boundary_that_sends_nothing_back_trains_only_what_lies_behind_it():
    run = linked({"kind": "none"}, {"kind": "zero"})
    parts = build_run(run, Execution("cpu"))
    model, boundaries = parts.task.model, parts.task.components["boundaries"]
    train(run, 2, model, boundaries)
    counted = [boundary.bwd.counts.total() for boundary in boundaries.values()]
    assert counted == [0] * len(boundaries)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    early = [g for name, g in gradients.items() if name.startswith(("conv1", "stem"))]
    late = [g for name, g in gradients.items() if name.startswith(("fc", "head"))]
    assert early and all(not g.any() for g in early)
    assert late and all(g.any() for g in late)


class DeltaSpec(Compression):
    """The difference to the last message."""

    label: ClassVar[str] = "delta"
    kind: Literal["delta"] = "delta"


class Delta(Compressor[DeltaSpec]):
    """Decodes with what both ends kept of the last message: its mean over the batch."""

    def begin(self, shape, seed):
        return torch.zeros(shape)

    def apply_from(self, x, memory, seed):
        payload = self.encode_from(x, memory, seed)
        return self.decode_from(payload, memory), self.next_kept(payload, memory)

    def encode_from(self, x, memory, seed):
        return payload(x, delta=x - memory)

    def decode_from(self, payload, memory):
        return payload.parts["delta"] + memory

    def next_kept(self, payload, memory):
        return (payload.parts["delta"] + memory).mean(0, keepdim=True)

    def layouts(self, shape, dtype):
        return [{"delta": Field(dtype, tuple(shape))}]

    def bytes_sent(self, y):
        return y.numel() * y.element_size()


class Mailbox:
    """Hands the payloads of a sender to a receiver."""

    def __init__(self, payloads):
        self.payloads = list(payloads)

    def take(self, compressor, shape):
        return self.payloads.pop(0)


def test_what_both_ends_keep_decodes_alike_in_simulation_and_between_processes():
    shape, delta = (4, 6), Delta(DeltaSpec())
    kept = [delta.begin(torch.Size((1, 6)), 0) for _ in range(3)]
    for number in range(3):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(number))
        simulated = SimulatedSender(delta, 0, False, True, kept[0])
        sender = PackedSender(delta, 0, False, True, kept[1])
        arrived, sent = simulated.send(x), sender.send(x)
        receiver = PackedReceiver(delta, Mailbox(sender.payloads), False, kept[2])
        assert torch.equal(arrived, sent) and torch.equal(arrived, receiver.receive(x.shape))
        kept = [simulated.warm, sender.warm, receiver.warm]
        assert torch.equal(kept[0], kept[1]) and torch.equal(kept[1], kept[2])
