"""Laws 2 and 5: what is kept whole changes nothing; evaluation remembers nothing; one call a
direction and step.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from commsweep.boundary.channel import Counts
from commsweep.compressors import build as compressor
from commsweep.config import Execution, override
from commsweep.config.training import ImageModel
from commsweep.errors import UserError
from commsweep.feedback.memory import Keys
from commsweep.models import resnet
from commsweep.models.cuts import chosen
from commsweep.registry import preset
from commsweep.training.run import build
from tests.helpers import COMPRESSORS, FEEDBACKS, linked, name, same_bits, tiny

CPU = torch.device("cpu")
TOPK = {"kind": "topk", "ratio": 0.1}


def train(run, steps=4, model=None, boundaries=None, batch=8):
    """Plain SGD on a fixed batch; returns (losses, weights)."""
    if model is None:
        parts = build(run, Execution("cpu"))
        model, boundaries = parts.task.model, parts.task.components["boundaries"]
    x = torch.randn(batch, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    y = torch.arange(batch) % 10
    optimizer = torch.optim.SGD(model.parameters(), 0.05, 0.9)
    losses = []
    for number in range(steps):
        if boundaries is not None:
            boundaries.begin(number, torch.arange(batch))
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses), [p.detach() for p in model.parameters()]


def bare(run):
    """The same network without any boundary."""
    torch.manual_seed(run.seed)
    return resnet.build(run.model, 1, 10)


@pytest.mark.parametrize(
    "fwd,bwd",
    [
        ({"kind": "none"}, {"kind": "none"}),
        ({"kind": "topk", "ratio": 1.0}, {"kind": "topk", "ratio": 1.0}),
        (
            {"kind": "topk", "ratio": 1.0, "scope": "last"},
            {"kind": "topk", "ratio": 1.0, "scope": "tensor"},
        ),
        ({"kind": "topk_strict", "ratio": 1.0}, {"kind": "topk_strict", "ratio": 1.0}),
        ({"kind": "topk", "ratio": 1.0}, {"kind": "forward_mask"}),
    ],
    ids=str,
)
def test_everything_kept_is_bit_identical_to_no_boundary(fwd, bwd):
    run = linked(fwd, bwd)
    losses, weights = train(run)
    bare_losses, bare_weights = train(run, model=bare(run))
    assert same_bits(losses, bare_losses)
    assert all(same_bits(a, b) for a, b in zip(weights, bare_weights, strict=True))


def test_a_compressed_boundary_does_change_training():
    losses, _ = train(linked(TOPK, TOPK))
    assert not same_bits(losses, train(tiny(), model=bare(tiny()))[0])


def test_forward_and_backward_are_the_compressors_applied_by_hand():
    run = linked(TOPK, {"kind": "uniform", "bits": 2}, model__cuts=["layer2"])
    parts = build(run, Execution("cpu"))
    model, boundaries = parts.task.model.train(), parts.task.components["boundaries"]
    x, y = torch.randn(8, 1, 8, 8), torch.arange(8)
    before = [b.clone() for b in model.buffers()]
    step = boundaries.step
    step.training, step.keys = True, Keys(torch.arange(8), CPU)
    loss = cross_entropy(model(x), y)
    loss.backward()
    got = [p.grad.clone() for p in model.parameters()]

    reference = bare(run).train()
    reference.load_state_dict(model.state_dict())
    for buffer, value in zip(reference.buffers(), before, strict=True):
        buffer.data.copy_(value)
    head = torch.nn.Sequential(
        reference.conv1, reference.bn1, reference.relu, reference.layer1, reference.layer2
    )
    cut = head(x)
    received = compressor(dict(TOPK)).roundtrip(cut.detach()).requires_grad_()
    tail = torch.nn.Sequential(
        reference.layer3, reference.layer4, reference.avgpool, torch.nn.Flatten(), reference.fc
    )
    by_hand = cross_entropy(tail(received), y)
    by_hand.backward()
    cut.backward(compressor({"kind": "uniform", "bits": 2}).roundtrip(received.grad))
    assert torch.equal(loss, by_hand)
    assert all(torch.equal(a, p.grad) for a, p in zip(got, reference.parameters(), strict=True))


def test_a_shared_mask_is_the_forward_support_and_sends_values_only():
    run = linked(TOPK, {"kind": "forward_mask"}, model__cuts=["layer1"])
    parts = build(run, Execution("cpu"))
    seen = {}
    channel = parts.task.components["boundaries"]["layer1"]
    original = channel.bwd.cross

    def spy(g, want_mask=False, mask=None):
        y, extra = original(g, want_mask, mask)
        seen.update(mask=mask, y=y, g=g)
        return y, extra

    channel.bwd.cross = spy
    train(run, 1, parts.task.model, parts.task.components["boundaries"])
    k = round(0.1 * 4 * 8 * 8)
    assert (seen["mask"].flatten(1).sum(1) == k).all()
    assert torch.equal(seen["y"], seen["g"] * seen["mask"])
    assert channel.bwd.counts.total() == 8 * k * 4
    assert channel.fwd.counts.total() > 8 * k * 4


CODERS = ("none", "bottleneck", "subspace")  # forward only, or nothing


@pytest.mark.sampled(5)
@pytest.mark.parametrize("spec", [s for s in COMPRESSORS if s["kind"] not in CODERS][::3], ids=name)
@pytest.mark.parametrize("feedback", [None, *FEEDBACKS], ids=lambda f: name(f) if f else "plain")
def test_evaluation_changes_no_memory_and_no_count(spec, feedback):
    if (
        feedback
        and feedback["kind"] == "ef_mixed"
        and spec["kind"] not in ("topk", "topk_strict", "randomk")
    ):
        pytest.skip("EF-mixed halves a sparsifier's ratio")
    if feedback and spec["kind"] in ("zero", "mean"):
        pytest.skip("nothing corrects a control")
    run = linked(spec, spec, feedback, feedback)
    parts = build(run, Execution("cpu"))
    model, boundaries = parts.task.model, parts.task.components["boundaries"]
    train(run, 2, model, boundaries)
    before = {
        key: value.clone()
        for key, value in boundaries.state_dict().items()
        if torch.is_tensor(value)
    }
    counts = boundaries.ledger()
    step = boundaries.step
    step.training = False
    model.eval()
    with torch.no_grad():
        for compress in (True, False):
            step.compress = compress
            model(torch.randn(5, 1, 8, 8))
            # larger than any training batch: nothing is sized by slots
            model(torch.randn(32, 1, 8, 8))
    after = boundaries.state_dict()
    assert all(torch.equal(value, after[key]) for key, value in before.items())
    assert boundaries.ledger() == counts


@pytest.mark.parametrize("feedback", [{"kind": "none"}, *FEEDBACKS], ids=name)
def test_calls_and_bytes_are_counted_once_a_direction_and_step(feedback):
    run = linked(TOPK, TOPK, feedback, {"kind": "none"})
    parts = build(run, Execution("cpu"))
    train(run, 3, parts.task.model, parts.task.components["boundaries"])
    parts.task.components["boundaries"].check_calls(3)
    for cut, sent in parts.task.components["boundaries"].ledger().items():
        sizes = torch.Size(
            [8, *{"layer1": (4, 8, 8), "layer2": (8, 4, 4), "layer3": (16, 2, 2)}[cut]]
        )
        formula = compressor(dict(TOPK)).formula_bytes(sizes, torch.float32)
        assert sent["bwd"] == 3 * formula
        assert sent["bwd_dense"] == 3 * sizes.numel() * 4
        if feedback["kind"] in ("none", "ef", "ef21"):
            assert sent["fwd"] == 3 * formula
        if feedback["kind"] == "aqsgd":
            assert sent["fwd"] == sizes.numel() * 4 + 2 * formula
    with pytest.raises(RuntimeError, match="boundary layer1: 3 fwd calls in 2 training steps"):
        parts.task.components["boundaries"].check_calls(2)


@pytest.mark.parametrize("start", ["start_epoch", "start_step"])
def test_dense_warm_start_then_compression(start):
    first = 1 if start == "start_epoch" else 2
    run = linked(TOPK, TOPK, **{f"{side}__{start}": first for side in ("fwd", "bwd")})
    parts = build(run, Execution("cpu"))
    losses, _ = train(run, 2, parts.task.model, parts.task.components["boundaries"])
    assert same_bits(losses, train(run, 2, model=bare(run))[0])
    sent = parts.task.components["boundaries"].ledger()["layer1"]
    assert sent["fwd"] == sent["fwd_dense"] and sent["bwd"] == sent["bwd_dense"]
    if start == "start_step":  # the third step is the first compressed one
        parts = build(run, Execution("cpu"))
        train(run, 3, parts.task.model, parts.task.components["boundaries"])
        part = compressor(dict(TOPK)).formula_bytes(torch.Size([8, 4, 8, 8]), torch.float32)
        later = parts.task.components["boundaries"].ledger()["layer1"]
        assert later["fwd"] == sent["fwd"] + part and later["bwd"] == sent["bwd"] + part


def test_random_compressors_repeat_by_seed_and_step_and_differ_between_them():
    spec = {"kind": "randomk", "ratio": 0.5}
    first, again = train(linked(spec, spec))[0], train(linked(spec, spec))[0]
    assert same_bits(first, again)
    parts = build(linked(spec, spec), Execution("cpu"))
    channels = [c for b in parts.task.components["boundaries"].values() for c in (b.fwd, b.bwd)]
    drawn = set()
    for channel in channels:
        for number in range(3):
            channel.step.number = number
            drawn.add(channel._seed())
    assert len(drawn) == len(channels) * 3


def test_illegal_cuts_are_named():
    for cuts, message in (
        (["layer5"], "did you mean 'layer"),
        (["layer2", "layer1"], "model's order"),
        (["layer1", "layer1"], "at most once"),
        (["layer1.1"], "no legal cut"),
    ):
        with pytest.raises(UserError, match=message):
            build(tiny(model__cuts=cuts), Execution("cpu"))


@pytest.mark.parametrize(
    "cuts", [[], ["maxpool"], ["avgpool"], ["maxpool", "layer1", "layer2", "layer3", "layer4"]]
)
def test_any_number_of_stages(cuts):
    run = linked(TOPK, TOPK, model__cuts=cuts) if cuts else tiny(model__cuts=cuts)
    losses, _ = train(run, 2)
    assert losses.isfinite().all()


def test_resnet18_is_the_papers():
    run = preset("resnet18_paper")
    model = resnet.build(run.model, 3, 10)
    assert sum(p.numel() for p in model.parameters()) == 11_173_962
    spec = ImageModel(name="resnet18", width=64, cuts=("layer1.0", "layer3", "layer4.0"))
    cuts = chosen(spec, model, resnet.legal_cuts(model))
    assert list(cuts) == ["layer1.0", "layer3", "layer4.0"]
    from commsweep.boundary.insert import message_shapes

    shapes, _ = message_shapes(
        model, chosen(run.model, model, resnet.legal_cuts(model)), torch.zeros(1, 3, 32, 32)
    )
    assert [tuple(s) for s in shapes.values()] == [(64, 32, 32), (128, 16, 16), (256, 8, 8)]


def test_memories_that_cannot_fit_stop_the_run_before_it_starts(monkeypatch, tmp_path):
    run = linked(TOPK, TOPK, {"kind": "aqsgd"})
    monkeypatch.setattr("commsweep.boundary.message_sizes._free_memory", lambda: 1000)
    with pytest.raises(UserError, match=r"need .* MiB and .* are free: use --buffers mmap"):
        build(run, Execution("cpu"))
    build(run, Execution("cpu", buffers="mmap"), tmp_path)  # on disk there is room
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Disk", (), {"free": 10})())
    with pytest.raises(UserError, match="memory-mapped feedback buffers need"):
        build(run, Execution("cpu", buffers="mmap"), tmp_path)


def test_an_override_reaches_the_installed_link():
    run = override(tiny(), {"fwd.compressor.kind": "topk", "fwd.compressor.ratio": "0.05"})
    links = build(run, Execution("cpu")).task.components["boundaries"].links()
    assert all(link.fwd.compressor.ratio == 0.05 for link in links.values())


def test_a_boundary_of_its_own_gets_its_links_and_its_bytes():
    run = override(
        tiny(),
        {
            "fwd.compressor.kind": "topk",
            "fwd.compressor.ratio": 0.1,
            "at.layer1.fwd.compressor.ratio": 0.5,
            "at.layer3.bwd.compressor.kind": "uniform",
        },
    )
    boundaries = build(run, Execution("cpu")).task.components["boundaries"]
    links = boundaries.links()
    assert [links[cut].fwd.compressor.ratio for cut in ("layer1", "layer2", "layer3")] == [
        0.5,
        0.1,
        0.1,
    ]
    assert [links[cut].bwd.compressor.kind for cut in ("layer1", "layer2", "layer3")] == [
        "none",
        "none",
        "uniform",
    ]
    task = build(run, Execution("cpu")).task
    train(run, steps=1, model=task.model, boundaries=task.components["boundaries"])
    sent = {
        boundary.name: boundary.fwd.counts for boundary in task.components["boundaries"].values()
    }
    share = {cut: counts.total() / counts.dense_bytes for cut, counts in sent.items()}
    assert share["layer1"] > 3 * share["layer2"] and share["layer2"] == pytest.approx(
        share["layer3"], rel=0.2
    )


@pytest.mark.parametrize("cuts, at", [(["layer1"], "layer1"), (["layer1", "layer2"], "layer3")])
def test_boundaries_that_are_not_there_or_leave_nothing_to_the_rest_are_refused(cuts, at):
    run = override(tiny(), {"model.cuts": cuts, f"at.{at}.fwd.compressor.kind": "topk"})
    with pytest.raises(
        UserError,
        match="mean nothing" if at in cuts else "at.layer3: there is no such boundary; did",
    ):
        build(run, Execution("cpu"))


def test_runs_whose_seeds_differ_by_a_power_of_two_share_no_randomness():
    """Every boundary, direction and seed draws for itself; low rank's first factor, too."""
    factors, numbers = [], set()
    for seed in (0, 1, 65536, 2**31):
        task = build(
            linked({"kind": "lowrank", "rank": 2}, {"kind": "lowrank", "rank": 2}, seed=seed),
            Execution("cpu"),
        ).task
        for boundary in task.components["boundaries"].values():
            for channel in (boundary.fwd, boundary.bwd):
                numbers.add(channel._seed())
                factors.append(channel.warm)
    assert len(numbers) == len(factors) == 4 * 3 * 2
    assert not any(
        torch.equal(a, b) for i, a in enumerate(factors) for b in factors[:i] if a.shape == b.shape
    )


@pytest.mark.parametrize("bad", [1, 63, 64, 65, 130])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_the_first_message_that_is_not_finite_is_found_whenever_it_is_asked_for(bad, value):
    counts = Counts()
    assert counts.first_bad is None
    for call in range(1, 200):
        x = torch.ones(2, 3)
        if call in (bad, bad + 40):
            x[1, 2] = value
        counts.saw(x)
        if call % 50 == 0:
            assert counts.first_bad == (bad if call >= bad else math.inf)
    assert counts.first_bad == bad and counts.calls == 199
