"""Gradients of old weights, against loops by hand that keep every version."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from commsweep.component import Moment, Pass
from commsweep.config import Execution, override
from commsweep.config.training import Delay
from commsweep.errors import UserError
from commsweep.registry import preset
from commsweep.store import Store
from commsweep.training.delay import Delayed, memory_bytes, stages_of
from commsweep.training.run import execute

STEPS = 9


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(step):
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
    return x, x.sum(1, keepdim=True).sin()


def optimizer(kind, parameters):
    return {
        "sgd": lambda: torch.optim.SGD(parameters, 0.1, momentum=0.9),
        "adamw": lambda: torch.optim.AdamW(parameters, 0.01),
    }[kind]()


def by_hand(delays, lookahead, kind, microbatches):
    """Old versions in a list; a second network computes with them."""
    net, old = network(), network()
    made, versions = optimizer(kind, list(net.parameters())), []
    for step in range(STEPS):
        versions.append([p.detach().clone() for p in net.parameters()])
        for index, (p, delay) in enumerate(zip(old.parameters(), delays, strict=True)):
            then, before = max(0, step - delay), max(0, step - delay - 1)
            used = versions[then][index]
            if lookahead and delay:
                used = used + lookahead * (used - versions[before][index])
            p.data.copy_(used)
        old.zero_grad()
        for x, y in zip(*(part.chunk(microbatches) for part in batch(step)), strict=True):
            (nn.functional.mse_loss(old(x), y) / microbatches).backward()
        for p, q in zip(net.parameters(), old.parameters(), strict=True):
            p.grad = q.grad.clone()
        made.step()
    return [p.detach() for p in net.parameters()]


def ours(spec, kind, microbatches, resumes=False):
    net = network()
    made = optimizer(kind, list(net.parameters()))
    delayed = Delayed(spec, net, {"first": net[0], "second": net[2]})
    for step in range(STEPS):
        if resumes and step == STEPS // 2:
            saved = copy.deepcopy((net.state_dict(), made.state_dict(), delayed.state_dict()))
            net = network()
            made = optimizer(kind, list(net.parameters()))
            delayed = Delayed(spec, net, {"first": net[0], "second": net[2]})
            for part, state in zip((net, made, delayed), saved, strict=True):
                part.load_state_dict(state)
        moment = Moment(step, 0, 0.1, 0, 0)
        made.zero_grad()
        for x, y in zip(*(part.chunk(microbatches) for part in batch(step)), strict=True):
            delayed.before_pass(
                moment, Pass(slice(0), 1, 1.0), torch.arange(1), torch.device("cpu")
            )
            (nn.functional.mse_loss(net(x), y) / microbatches).backward()
        delayed.before_exchange(moment)
        made.step()
    return [p.detach() for p in net.parameters()]


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize(
    "spec, delays",
    [
        (Delay(), [1] * 6),
        (Delay(steps=3), [3] * 6),
        (Delay(steps=0), [0] * 6),
        (Delay(kind="stages"), [2, 2, 1, 1, 0, 0]),
        (Delay(kind="stages", steps=2), [4, 4, 2, 2, 0, 0]),
        (Delay(lookahead=0.9), [1] * 6),
        (Delay(kind="stages", lookahead=2), [2, 2, 1, 1, 0, 0]),
    ],
    ids=lambda value: str(value) if isinstance(value, Delay) else "",
)
def test_each_version_is_the_one_of_its_delay(spec, delays, kind, microbatches):
    wanted = by_hand(delays, spec.lookahead, kind, microbatches)
    for resumes in (False, True):
        found = ours(spec, kind, microbatches, resumes)
        for one, other in zip(found, wanted, strict=True):
            if spec.lookahead:
                torch.testing.assert_close(one, other)
            else:
                assert torch.equal(one, other)


def test_stages_follow_the_cuts_and_a_shared_weight_is_the_first_ones():
    net = network()
    net[4].weight = nn.Parameter(torch.zeros(1, 8))
    net.append(nn.Linear(8, 4))
    net[5].weight = net[0].weight
    found = {name: stages_of(net, [net[0], net[2]])[p] for name, p in net.named_parameters()}
    assert found == {
        **dict.fromkeys(("0.weight", "0.bias"), 0),
        **dict.fromkeys(("2.weight", "2.bias"), 1),
        **dict.fromkeys(("4.weight", "4.bias", "5.bias"), 2),
    }
    spec, cuts = Delay(kind="stages", lookahead=1), {"a": net[0], "b": net[2]}
    assert memory_bytes(spec, net, cuts) == 4 * (3 * 40 + 2 * 72)


def run(changes, name="synthetic", epochs=2):
    return override(preset(name), {"epochs": epochs, "schedule.t_max": epochs} | changes)


def score(tmp_path, run_):
    row = execute(run_, Store(tmp_path), Execution())
    assert row["status"] == "finished", row
    return row["metrics"]


def test_no_delay_is_no_section_and_one_stage_has_none(tmp_path):
    plain = score(tmp_path, run({}))
    assert score(tmp_path, run({"delay.steps": 0})) == plain
    late = score(tmp_path, run({"delay.steps": 1}))
    assert late != plain
    alone = score(tmp_path, run({"model.cuts": []}))
    for kind in ("uniform", "stages"):
        assert score(tmp_path, run({"model.cuts": [], "delay.kind": kind})) == alone


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "changes",
    [
        {"microbatches": 2},
        {"fwd.compressor.kind": "topk", "fwd.feedback.kind": "ef21"},
        {"fwd.compressor.kind": "uniform", "fwd.feedback.kind": "aqsgd"},
        {
            "grad.learners": 2,
            "grad.exchange": "allgather",
            "grad.compressor.kind": "topk",
            "grad.feedback.kind": "ef",
        },
        {"kfac.factors_every": 2},
        {"optim.kind": "adamw"},
        {"optim.kind": "muon"},
        {"recalibrate": 2},
        {"channels_last": True},
        {"precision": "bfloat16"},
    ],
    ids=lambda changes: ",".join(changes),
)
def test_it_goes_with_every_section(tmp_path, changes):
    name = "digits_mlp" if changes.get("optim.kind") == "muon" else "synthetic"
    changes = changes | ({"data.train_size": 256} if name == "digits_mlp" else {})
    on_time = score(tmp_path, run(changes, name, 1))
    row = execute(run(changes | {"delay.steps": 1}, name, 1), Store(tmp_path), Execution())
    assert row["status"] == "finished" and row["run"]["delay"]["steps"] == 1
    assert row["metrics"] != on_time


def test_bad_delays_are_refused():
    for changes, said in (
        ({"delay.steps": -1}, "delay.steps"),
        ({"delay.steps": 0, "delay.lookahead": 1}, "delay.steps=0 has none"),
        ({"delay.kind": "stage"}, "uniform, stages"),
        ({"delay.stepz": 1}, "delay.steps"),
    ):
        with pytest.raises(UserError, match=said):
            override(preset("synthetic"), changes)
