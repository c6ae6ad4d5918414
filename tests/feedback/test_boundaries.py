"""Law 4: what telescopes, what sums to the state, what sends nothing twice; and whose memory is
whose.
"""

from __future__ import annotations

import pytest
import torch

from commsweep import compressors
from commsweep.boundary.channel import SimulatedSender
from commsweep.config.feedback import AQSGDSpec, EF21Spec, EFMixedSpec, EFSpec
from commsweep.feedback import boundaries as feedback
from commsweep.feedback.memory import Keys

SHAPE = torch.Size([2, 3, 3])
SPECS = {"ef": EFSpec, "ef_mixed": EFMixedSpec, "ef21": EF21Spec}


def make(spec, n_samples=6, batch=4, channels_last=False, file=None):
    made = feedback.build(spec, SHAPE, batch, n_samples, channels_last, file)
    if made.memory is not None:  # float64 makes the algebra exact enough to test it as an identity
        made.memory.state = (
            made.memory.state.double()
            if file is None and spec.kind != "aqsgd"
            else made.memory.state
        )
    return made


def wire(**spec):
    return SimulatedSender(
        compressors.build(spec or {"kind": "topk", "ratio": 0.3}), seed=0, want_mask=False
    )


def keys(*samples):
    return Keys(torch.tensor(samples), torch.device("cpu"))


def message(n=4, seed=0):
    return torch.randn(
        n, *SHAPE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


@pytest.mark.parametrize("key", ["slot", "sample"])
@pytest.mark.parametrize("kind", ["ef", "ef_mixed"])
@pytest.mark.parametrize(
    "spec",
    [
        {"kind": "topk", "ratio": 0.3},
        {"kind": "topk", "ratio": 1.0},
        {"kind": "topk_strict", "ratio": 0.3},
        {"kind": "randomk", "ratio": 0.5},
    ],
)
def test_ef_telescopes(key, kind, spec):
    made = make(SPECS[kind](key=key))
    sent = inputs = torch.zeros(4, *SHAPE, dtype=torch.float64)
    for step in range(12):
        x = message(seed=step)
        sent = sent + made.send(wire(**spec), x, keys(0, 1, 2, 3))
        inputs = inputs + x
    residual = made.memory.read(keys(0, 1, 2, 3))
    assert torch.allclose(sent + residual, inputs, atol=1e-12)
    if spec == {"kind": "topk", "ratio": 0.3}:
        assert residual.abs().max() > 0.1  # it does remember something


def test_ef_with_everything_kept_sends_the_input():
    made = make(EFSpec())
    for step in range(3):
        x = message(seed=step)
        assert torch.equal(made.send(wire(kind="topk", ratio=1.0), x, keys(0, 1, 2, 3)), x)


@pytest.mark.parametrize("kind", ["uniform", "fixed"])
def test_ef_telescopes_with_quantizers(kind):
    made = make(EFSpec())
    total = sum(
        made.send(wire(kind=kind, bits=2), message(seed=s), keys(0, 1, 2, 3)) for s in range(8)
    )
    assert torch.allclose(
        total + made.memory.state, sum(message(seed=s) for s in range(8)), atol=1e-12
    )


@pytest.mark.parametrize("key", ["slot", "sample"])
def test_ef21_state_is_the_sum_of_its_messages(key):
    made = make(EF21Spec(key=key))
    messages = []

    class Spy(SimulatedSender):
        def send(self, x):
            messages.append(super().send(x))
            return messages[-1]

    for step in range(10):
        spy = Spy(compressors.build({"kind": "topk", "ratio": 0.3}), 0, False)
        y = made.send(spy, message(seed=step), keys(0, 1, 2, 3))
        assert torch.allclose(y, sum(messages), atol=1e-12)
        assert torch.equal(y, made.memory.read(keys(0, 1, 2, 3)))


def test_ef21_converges_on_a_constant_message_and_hands_out_copies():
    made, x = make(EF21Spec()), message()
    first = made.send(wire(), x, keys(0, 1, 2, 3))
    kept = first.clone()
    for _ in range(5):
        y = made.send(wire(), x, keys(0, 1, 2, 3))
    assert torch.allclose(y, x)
    assert torch.equal(first, kept), "a later step changed an activation already handed to autograd"


def test_aqsgd_first_visit_is_dense_and_an_unchanged_sample_sends_zero():
    made, x = make(AQSGDSpec()), message().float()
    first = wire()
    assert torch.equal(made.send(first, x, keys(4, 2, 0, 5)), x)
    assert first.nbytes == [x.numel() * 4]
    again = []

    class Spy(SimulatedSender):
        def send(self, d):
            again.append(d)
            return super().send(d)

    y = made.send(
        Spy(compressors.build({"kind": "topk", "ratio": 0.3}), 0, False), x[[2, 0]], keys(0, 4)
    )
    assert torch.equal(again[0], torch.zeros(2, *SHAPE))
    assert torch.equal(y, x[[2, 0]])


def test_aqsgd_mixes_first_and_later_visits_in_a_batch():
    made = make(AQSGDSpec())
    x, later = message(seed=1).float(), message(seed=2).float()
    made.send(wire(), x[:2], keys(0, 1))
    both = wire()
    y = made.send(both, later, keys(0, 3, 1, 2))
    assert torch.equal(y[[1, 3]], later[[1, 3]])  # first visits arrive whole
    k = round(0.3 * SHAPE.numel())
    delta = (later[[0, 2]] - x[:2]).flatten(1)
    top = torch.zeros_like(delta).scatter_(1, delta.abs().topk(k).indices, 1) * delta
    assert torch.allclose(y[[0, 2]].flatten(1), x[:2].flatten(1) + top)
    half = compressors.build({"kind": "topk", "ratio": 0.3}).formula_bytes(
        later[:2].shape, torch.float32
    )
    assert sum(both.nbytes) == half + 2 * SHAPE.numel() * 4


def test_aqsgd_uses_downstream_what_its_16_bit_buffer_stores():
    made = make(AQSGDSpec(buffer="bfloat16"))
    made.send(wire(), message(seed=0).float(), keys(0, 1, 2, 3))
    y = made.send(wire(), message(seed=1).float(), keys(0, 1, 2, 3))
    assert torch.equal(y, made.memory.state[:4].float())
    assert made.memory.state.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "spec", [EFSpec(key="sample"), EF21Spec(key="sample"), AQSGDSpec()], ids=lambda s: s.kind
)
def test_a_memory_mapped_memory_behaves_like_one_in_memory(spec, tmp_path):
    plain, mapped = (
        feedback.build(spec, SHAPE, 4, 6),
        feedback.build(spec, SHAPE, 4, 6, file=tmp_path / "m.buffer"),
    )
    for step in range(6):
        order = torch.randperm(6, generator=torch.Generator().manual_seed(step))[:4]
        x = message(seed=step).float()
        got = [one.send(wire(), x, Keys(order, torch.device("cpu"))) for one in (plain, mapped)]
        assert torch.equal(*got)
    assert torch.equal(plain.memory.state, mapped.memory.state)
    assert (tmp_path / "m.buffer").stat().st_size == 6 * SHAPE.numel() * 4
    assert torch.equal(
        torch.from_file(str(tmp_path / "m.buffer"), size=6 * SHAPE.numel()).view(6, *SHAPE),
        plain.memory.state,
    )


@pytest.mark.parametrize("kind", ["ef", "ef_mixed", "ef21"])
def test_a_short_batch_touches_only_its_own_rows(kind):
    made = make(SPECS[kind]())
    made.send(wire(), message(), keys(0, 1, 2, 3))
    before = made.memory.state.clone()
    made.send(wire(), message(2, seed=9), keys(4, 5))
    assert torch.equal(made.memory.state[2:], before[2:])
    assert not torch.equal(made.memory.state[:2], before[:2])


def test_slots_mix_samples_and_sample_keys_do_not():
    for key, mixed in (("slot", True), ("sample", False)):
        made = make(EFSpec(key=key))
        made.send(wire(), message(1, seed=1), keys(0))
        made.send(wire(), message(1, seed=2), keys(1))
        rows = made.memory.state.flatten(1).abs().sum(1) > 0
        assert rows.sum() == (1 if mixed else 2)


def test_sizes_are_what_is_allocated():
    for spec in (
        EFSpec(),
        EFSpec(key="sample"),
        EF21Spec(),
        AQSGDSpec(),
        AQSGDSpec(buffer="bfloat16"),
    ):
        state = feedback.build(spec, SHAPE, 4, 6).memory.state
        assert feedback.memory_bytes(spec, SHAPE, 4, 6) == state.numel() * state.element_size()


def test_the_papers_aqsgd_buffers_are_as_large_as_stated():
    """facts: 114,688 floats x 50,000 samples = 22.9 GB for ResNet-18 on CIFAR-10."""
    total = sum(
        feedback.memory_bytes(AQSGDSpec(), torch.Size(shape), 128, 50_000)
        for shape in ((64, 32, 32), (128, 16, 16), (256, 8, 8))
    )
    assert total == 114_688 * 50_000 * 4
