"""Optimizers: Muon beside torch's own, Dion beside its rule on the mean gradient, as a run installs
them.
"""

from __future__ import annotations

import copy

import pytest
import torch

from commsweep.config import Execution, override, record
from commsweep.config.execution import LearnerWiring
from commsweep.errors import UserError
from commsweep.processes import ddp
from commsweep.training import optim
from commsweep.training.run import build, execute, trainer
from tests.helpers import same_bits, tiny_text

MUON = {
    "optim.kind": "muon",
    "optim.lr": 0.01,
    "optim.weight_decay": 0.1,
    "schedule.kind": "constant",
}


def test_muon_takes_matrices_and_adamw_the_rest():
    """Against torch's two optimizers by hand; embeddings and what is tied to them are the rest."""
    run = override(tiny_text(epochs=1), MUON)
    model = build(run, Execution("cpu")).task
    twin = copy.deepcopy(model)
    ours = optim.optimizer(run, list(model.parameters()), optim.embedded(model))
    embeddings = optim.embedded(twin)
    matrices = [p for p in twin.parameters() if p.dim() == 2 and id(p) not in embeddings]
    rest = [p for p in twin.parameters() if all(p is not one for one in matrices)]
    # tokens and places; a block's four matrices
    assert len(embeddings) == 2 and len(matrices) == 4 * run.model.stages
    theirs = [
        torch.optim.Muon(matrices, 0.01, 0.1, 0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, 0.01, (0.9, 0.95), weight_decay=0.1, fused=True),
    ]
    for turn in range(3):
        if turn == 2:  # from a checkpoint
            kept = ours.state_dict()
            ours = optim.optimizer(run, list(model.parameters()), optim.embedded(model))
            ours.load_state_dict(kept)
        for one, other in zip(model.parameters(), twin.parameters(), strict=True):
            one.grad = torch.randn(one.shape, generator=torch.Generator().manual_seed(turn))
            other.grad = one.grad.clone()
        ours.param_groups[0]["lr"] = ours.param_groups[1]["lr"] = 0.01 / (turn + 1)
        for part in theirs:
            part.param_groups[0]["lr"] = 0.01 / (turn + 1)
            part.step()
        ours.step()
    assert all(same_bits(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_a_run_with_muon_is_what_it_says_and_muon_without_a_matrix_is_one_line(store):
    run = override(tiny_text(epochs=1), MUON | {"grad.learners": 2, "grad.outer.interval": 2})
    row = execute(run, store, Execution("cpu"))
    assert row["status"] == "finished" and row["run"] == record(run)
    with pytest.raises(UserError, match="no matrix beside embeddings"):
        optim.optimizer(run, [torch.nn.Parameter(torch.ones(3))])


DION = {
    "optim.kind": "dion",
    "optim.lr": 0.02,
    "optim.rest_lr": 0.005,
    "optim.weight_decay": 0.1,
    "schedule.kind": "constant",
    "grad.compressor.kind": "dion",
    "grad.feedback.kind": "decoupled",
    "grad.feedback.momentum": 0.9,
}


def dion(run, n, turned=True):
    """Dion as its simplest code has it (arXiv 2504.05295), on the mean of n learners' gradients:
    one momentum, which nobody shares out; the weights after the run, and the momenta. turned:
    whether matrices of transformers' Conv1D, which lie [inputs, outputs], are taken as the
    [outputs, inputs] of a Linear.
    """
    torch.set_num_threads(1)
    parts = build(run, Execution("cpu"))
    model, embeddings = parts.task.model, optim.embedded(parts.task)
    exchange = parts.task.components["learners"].exchange
    named = dict(model.named_parameters())
    q = {
        layer.name.removeprefix("model."): getattr(exchange, f"kept{index}").clone()
        for index, layer in enumerate(exchange.layers)
        if not layer.dense
    }
    assert q.keys() == {
        name for name, p in named.items() if p.dim() == 2 and id(p) not in embeddings
    }
    lying = {
        f"{name}.weight"
        for name, one in model.named_modules()
        if turned and type(one).__name__ == "Conv1D"
    }
    assert not turned or len(lying) == len(q)
    momenta = {
        name: torch.zeros_like(named[name].mT if name in lying else named[name]) for name in q
    }
    adamw = torch.optim.AdamW(
        [p for name, p in named.items() if name not in q], 0.005, (0.9, 0.95), weight_decay=0.1
    )
    parts.data.train.set_epoch(0)
    for x, y, _ in parts.data.train:
        model.zero_grad()
        for rows in torch.arange(len(y)).chunk(n):
            (parts.task.loss(model(x[rows]).logits, y[rows]) / n).backward()
        with torch.no_grad():
            for name in q:
                p, m = named[name], momenta[name]
                m += p.grad.T if name in lying else p.grad
                left = torch.linalg.qr(m @ q[name]).Q
                right = m.T @ left
                m -= 0.1 * left @ right.T
                q[name] = right / right.norm(dim=0)
                step = left @ q[name].T * (len(m) / m.shape[1]) ** 0.5
                p.mul_(1 - 0.02 * 0.1).sub_(step.T if name in lying else step, alpha=0.02)
        adamw.step()
    return named, momenta


@pytest.mark.parametrize("rows", ["outputs", "memory"])
def test_dion_of_decoupled_momenta_is_dion_on_the_mean_gradient(rows, store):
    """With equal factors at the start, the mean of momenta that learners never exchange is the
    momentum of the mean.
    """
    run = override(tiny_text(epochs=1), DION | {"grad.learners": 4, "grad.compressor.rows": rows})
    torch.set_num_threads(1)
    parts = build(run, Execution("cpu"))
    before = {name: p.clone() for name, p in parts.task.model.named_parameters()}
    trainer(run, parts, [], False).fit(parts.task, parts.data.train, [])
    wanted, momenta = dion(run, 4, turned=rows == "outputs")
    exchange = parts.task.components["learners"].exchange
    for index, layer in enumerate(exchange.layers):
        name = layer.name.removeprefix("model.")
        ours = dict(parts.task.model.named_parameters())[name]
        far = float((ours - wanted[name]).detach().abs().max())
        # AdamW divides gradients that are rounding by their size
        assert far < (2e-3 if layer.dense else 1e-4), name
        assert float((ours - before[name]).detach().abs().max()) > 1e-2
        if not layer.dense:
            own = [learner[index].e for learner in exchange.memories]
            mean = momenta[name].T if rows == "outputs" else momenta[name]
            assert float((sum(own) / 4 - mean).abs().max()) < 1e-5
            assert not torch.allclose(own[0], own[1], atol=1e-5)  # and they differ
    sent = sum(
        4 * (-(-min(layer.shape) // 4)) * sum(layer.shape) if not layer.dense else layer.dense_bytes
        for layer in exchange.layers
    )
    assert exchange.ledger.totals()["up"] == sent


@pytest.mark.slow
def test_a_run_with_dion_is_what_it_says_and_processes_are_it(store):
    run = override(tiny_text(epochs=1), DION | {"grad.learners": 2})
    torch.set_num_threads(1)
    row = execute(run, store, Execution("cpu"))
    assert row["status"] == "finished" and row["run"] == record(run)
    (real,) = ddp.execute([(run, LearnerWiring())], store, Execution("cpu"))
    assert {key: one for key, one in real["metrics"].items() if key.startswith("test")} == {
        key: one for key, one in row["metrics"].items() if key.startswith("test")
    }


def test_a_factor_without_a_gradient_stays():
    from commsweep.collectives import Simulated
    from commsweep.config.compressors.lowrank import DionFactorsSpec
    from commsweep.data_parallel.joint import Orthonormal

    one = Orthonormal(DionFactorsSpec(fraction=0.5))
    q = one.begin(torch.Size([6, 4]), 0)
    kept = [q.clone()]
    arrived, seen = Orthonormal.combine([one], [[torch.zeros(6, 4)]], kept, 0, Simulated(1))
    assert (
        torch.equal(kept[0], q)
        and torch.equal(arrived[0][0], torch.zeros(6, 4))
        and bool(seen[0].isfinite().all())
    )


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"optim.kind": "dion"}, "halves of one method"),
        ({"grad.compressor.kind": "dion"}, "learners' own momenta"),
        (
            {"grad.compressor.kind": "dion", "grad.feedback.kind": "decoupled"},
            "halves of one method",
        ),
        (DION | {"grad.exchange": "server"}, "two all-reduces of matrices"),
        (DION | {"kfac.damping": 0.1}, "kfac does not go with optim.kind=dion"),
    ],
)
def test_half_of_dion_is_one_line(changes, line):
    with pytest.raises(UserError, match=line):
        override(tiny_text(), changes)
