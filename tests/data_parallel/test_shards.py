"""Learners that own shards: without codes the plain mean, in two hops and with codes the published
rule by hand; bytes, equal weights, clipping, checkpoints, processes.
"""

from __future__ import annotations

import pytest
import torch

from commsweep.compressors import build as compressor
from commsweep.config import Execution, override, record
from commsweep.config.execution import LearnerWiring
from commsweep.errors import UserError
from commsweep.processes import ddp
from commsweep.store import Store
from commsweep.training.run import build, execute, trainer
from tests.helpers import resumed, same_bits, tiny, tiny_text, trained

HOW = Execution("cpu")
PLAIN = {
    "model.name": "mlp",
    "optim.momentum": 0.0,
    "optim.weight_decay": 0.0,
    "optim.lr": 0.1,
    "epochs": 1,
    "schedule.kind": "constant",
    "eval_every": 1,
}
CODE = {"kind": "fixed", "scale": "group", "group": 32}


def sharded(base=None, learners=4, nodes=1, inside=0, across=0, weights=0):
    """A run whose shards travel in so many bits; 0: as they are."""
    changes = {"grad.learners": learners, "grad.sharded.nodes": nodes}
    for where, bits in {
        "grad.compressor": inside,
        "grad.sharded.across": across,
        "grad.sharded.weights": weights,
    }.items():
        if bits:
            changes |= {f"{where}.{key}": value for key, value in CODE.items()} | {
                f"{where}.bits": bits
            }
    return override(base or override(tiny(), PLAIN), changes)


def weights(task):
    return {name: p.detach().clone() for name, p in task.model.named_parameters()}


@pytest.mark.parametrize(
    "base", [override(tiny(), PLAIN), tiny_text(epochs=1, optim__clip=0.0)], ids=["sgd", "adamw"]
)
def test_without_codes_it_is_the_plain_exchange(base):
    """Reduce-scatter and all-gather: the same sums in the same order; with two hops, in another
    one.
    """
    plain = weights(trained(override(base, {"grad.learners": 4})))
    one, two = (weights(trained(sharded(base, nodes=nodes))) for nodes in (1, 2))
    assert all(same_bits(plain[name], one[name]) for name in plain)
    assert max(float((plain[name] - two[name]).abs().max()) for name in plain) < 1e-3


def test_the_published_rule_by_hand():
    """qgZ and SDP4Bit with four learners in two nodes, for one step of SGD on a perceptron."""
    run = sharded(nodes=2, inside=8, across=4, weights=4)
    inside, across, back = (compressor(CODE | {"bits": bits}) for bits in (8, 4, 4))
    torch.set_num_threads(1)
    parts = build(run, HOW)
    parts.data.train.set_epoch(0)
    x, y, _ = next(iter(parts.data.train))
    task, model = parts.task, parts.task.model
    grads = []
    for rows in torch.arange(len(y)).chunk(4):
        model.zero_grad()
        task.loss(model(x[rows]), y[rows]).backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    wanted = []
    for place, p in enumerate(model.parameters()):
        if p.dim() < 2:
            wanted.append(p.detach() - 0.1 * sum(own[place] for own in grads) / 4)
            continue
        pad = -p.numel() % 4
        cut = [torch.cat([own[place].flatten(), torch.zeros(pad)]).view(4, -1) for own in grads]
        before = torch.cat([p.detach().flatten(), torch.zeros(pad)]).view(4, -1)
        after = []
        for owner in range(4):
            total = 0
            # learners 0 and 1, then 2 and 3; learner (node, owner mod 2) sums for the owner
            for node in range(2):
                both = [
                    inside.roundtrip(cut[2 * node + local][owner % 2 :: 2][None])[0]
                    for local in range(2)
                ]
                total = total + across.roundtrip((both[0] + both[1])[owner // 2][None])[0]
            moved = -0.1 * total / 4
            after.append(
                before[owner] + back.roundtrip(((before[owner] + moved) - before[owner])[None])[0]
            )
        wanted.append(torch.stack(after).flatten()[: p.numel()].view(p.shape))
    trainer(run, parts, [], False, steps=1).fit(task, parts.data.train, [])
    for ours, theirs in zip(model.parameters(), wanted, strict=True):
        assert float((ours.detach() - theirs).abs().max()) < 1e-7
    assert not torch.equal(
        next(p for p in model.parameters() if p.dim() > 1).data, trained_master(task)
    )


def trained_master(task):
    return next(iter(task.components["learners"]._master.values()))


def test_bytes_are_the_formulas():
    """Inside a node N (b1 + 32 / g) / 8, across it (N / L)(b2 + 32 / g) / 8, weights N / n (b3 + 32
    / g) / 8 to each of the others; what stays with a learner is not sent.
    """
    task = trained(sharded(tiny_text(epochs=1), nodes=2, inside=8, across=4, weights=4))
    shards, totals = task.components["learners"], task.totals()["gradients"]
    wide = [layer.shape.numel() for layer in shards.exchange.layers if not layer.dense]
    assert all(n % (4 * 32) == 0 for n in wide)
    inside, across, back = (sum(wide) * (bits + 32 / 32) / 8 for bits in (8, 4, 4))
    assert (
        totals["inside"] == inside / 2
        and totals["across"] == across / 2 / 2
        and totals["weights"] == back / 4 * 3
    )
    vectors = sum(layer.dense_bytes for layer in shards.exchange.layers if layer.dense)
    assert (
        totals["up"] == totals["learner_sends"] == inside / 2 + across / 4 + back * 3 / 4 + vectors
    )


def test_gradients_are_clipped_as_a_whole():
    base = tiny_text(epochs=1, optim__clip=0.01)
    plain, ours = (
        weights(trained(run)) for run in (override(base, {"grad.learners": 4}), sharded(base))
    )
    loose = weights(trained(sharded(tiny_text(epochs=1, optim__clip=0.0))))
    far = {
        name: float((plain[name] - ours[name]).abs().max())
        for name in plain
        if plain[name].dim() > 1
    }
    assert (
        max(far.values())
        < 1e-3
        < max(float((loose[name] - ours[name]).abs().max()) for name in plain)
    )


CODED = {"nodes": 2, "inside": 8, "across": 4, "weights": 4}


def test_a_resumed_run_is_the_same(tmp_path):
    run = sharded(tiny_text(epochs=2), **CODED)
    torch.set_num_threads(1)
    whole, parts = execute(run, Store(tmp_path / "whole"), HOW), resumed(run, tmp_path / "parts")
    assert parts["metrics"] == whole["metrics"] and parts["gradients"] == whole["gradients"]
    assert whole["status"] == "finished" and whole["run"] == record(run)


@pytest.mark.slow
@pytest.mark.parametrize(
    "base", [tiny(epochs=1, eval_every=1), tiny_text(epochs=1)], ids=["resnet", "text"]
)
def test_processes_equal_the_simulation_bit_for_bit(base, store):
    run = sharded(base, **CODED)
    (row,), simulated = ddp.execute([(run, LearnerWiring())], store, HOW), trained(run)
    assert row["weights"] == ddp.digest(simulated.model.state_dict())
    assert {key: row["metrics"][key] for key in simulated.scores} == simulated.scores
    totals = simulated.totals()["gradients"]
    assert {
        key: row["gradients"][key] for key in ("inside", "across", "weights", "up")
    } == pytest.approx({key: totals[key] for key in ("inside", "across", "weights", "up")})


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"grad.compressor.kind": "topk", "grad.exchange": "allgather"},
            "codes whose length their shape says",
        ),
        ({"grad.sharded.nodes": 3}, "does not divide grad.learners=4"),
        ({"grad.learners": 1}, "of several learners"),
        ({"grad.sharded.across.kind": "uniform"}, "has no effect within one node"),
        ({"grad.outer.interval": 4}, "grad.outer does not go with grad.sharded"),
        ({"grad.exchange": "server"}, "grad.exchange does not go with"),
        ({"kfac.damping": 0.1}, "kfac does not go with grad.sharded"),
        ({"optim.kind": "muon"}, "optim.kind=muon does not go with grad.sharded"),
    ],
)
def test_what_does_not_go_together_is_one_line(changes, line):
    with pytest.raises(UserError, match=line):
        override(sharded(override(tiny_text(), {"epochs": 1})), changes)
