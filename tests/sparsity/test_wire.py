"""What sparsity saves on the wire: live gradients, places of topology updates, learners as
processes.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from commsweep.compressors import build as compressor
from commsweep.compressors import message
from commsweep.compressors.bits import mask_bytes
from commsweep.compressors.live_entries import LiveEntries
from commsweep.config import Execution, override, record
from commsweep.config.execution import LearnerWiring
from commsweep.processes import ddp
from commsweep.training.run import build, execute, trainer
from tests.helpers import same_bits, tiny_text
from tests.sparsity.test_masks import FIXED, MOVES

HOW = Execution("cpu")
LIVE = {"grad.learners": 4, "grad.compressor.kind": "live"}
TOPK = {
    "grad.learners": 4,
    "grad.exchange": "allgather",
    "grad.compressor.kind": "topk",
    "grad.compressor.ratio": 0.1,
    "grad.feedback.kind": "ef",
}
SPECS = [
    {"kind": "none"},
    {"kind": "cast"},
    {"kind": "topk", "ratio": 0.3},
    {"kind": "topk_strict", "ratio": 0.3},
    {"kind": "randomk", "ratio": 0.3},
    {"kind": "uniform", "bits": 4},
    {"kind": "sign"},
    {"kind": "qsgd"},
    {"kind": "dryden", "ratio": 0.2},
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec["kind"])
@given(seed=st.integers(0, 999), dead=st.floats(0, 0.95))
def test_live_entries_are_the_inner_message_of_what_lives(spec, seed, dead):
    """Zero elsewhere; the bytes are those of the live vector; packed and decoded as passed through,
    bit for bit.
    """
    torch.manual_seed(seed)
    alive = torch.rand(12, 5) >= dead
    alive.view(-1)[0] = True
    places = alive.flatten().nonzero()[:, 0]
    inner, x = compressor(spec), torch.randn(1, 12, 5)
    made = LiveEntries(inner, places, torch.Size((12, 5)))
    y = made.apply(x, 3)
    assert same_bits(y[0][alive], inner.apply(x[0][alive][None], 3)[0]) and not y[0][~alive].any()
    payload = made._encode(x, 3)
    assert same_bits(made.decode(payload), y) and int(made.bytes_sent(y)) == payload.nbytes
    packed = message.pack([payload], message.Address(b"12345678", 1))
    reader = message.Reader(packed, message.Address(b"12345678", 1))
    assert same_bits(made.decode(reader.take(made, payload.shape)), y)


def test_live_gradients_cost_the_live_weights_and_the_places_that_grow(store):
    """Per learner and step: 4 bytes a live weight, the dense rest, and a learner's share of the
    packed places.
    """
    run = override(tiny_text(), FIXED | LIVE | {"sparsity.drop_fraction": 0.2})
    row = execute(run, store, HOW)
    assert row["status"] == "finished", row["error"]
    parts = build(run, HOW)
    own = parts.task.components["sparsity"]
    rest = sum(p.numel() for p in own.trained) - sum(mask.dead.numel() for mask in own.masks)
    places = row["gradients"]["places"]
    assert row["gradients"]["up"] - places == pytest.approx(
        4 * (rest + sum(mask.live for mask in own.masks))
    )
    told = 0
    for step in range(row["steps"]):
        if own.schedule.updates(step):
            told += sum(
                mask_bytes(1, mask.dead.numel(), int(own.schedule.drop(step) * mask.live))
                for mask in own.masks
                if int(own.schedule.drop(step) * mask.live)
            )
    assert row["masks"]["places"] == told > 0 and places == told / row["steps"] / 4
    free = execute(override(run, {"sparsity.growth": "random"}), store, HOW)
    # all can draw it themselves
    assert free["masks"]["places"] == 0 and "places" not in free["gradients"]


def test_values_of_live_weights_lose_nothing(store):
    """Between updates of masks, live gradients are the dense exchange masked: the same weights, bit
    for bit.
    """
    base = override(tiny_text(), FIXED | {"sparsity.drop_fraction": 0, "grad.learners": 4})
    dense, sparse = (execute(override(base, one), store, HOW) for one in ({}, LIVE))
    assert dense["metrics"] == sparse["metrics"]
    assert sparse["gradients"]["up"] < 0.4 * dense["gradients"]["up"]


def test_a_residue_of_pruned_weights_is_gone():
    parts = build(override(tiny_text(), MOVES | TOPK), HOW)
    trainer(parts.task.run, parts, [], False).fit(parts.task, parts.data.train, [])
    own, exchange = parts.task.components["sparsity"], parts.task.components["learners"].exchange
    for mask in own.masks:
        for memories in exchange.memories:
            residue = memories[own._turns[id(mask.weight)]].e
            assert residue.any() and not residue[mask.dead].any()


WAYS = [
    LIVE,
    TOPK,
    {"grad.learners": 4},
    LIVE | {"sparsity.score": "mest", "sparsity.growth": "random", "sparsity.regrow": True},
    LIVE
    | {"fwd.compressor.kind": "topk", "bwd.compressor.kind": "topk", "sparsity.modules": "all"},
]


@pytest.mark.slow
def test_processes_equal_the_simulation_bit_for_bit(store):
    """Masks, weights and bytes, whoever chooses what grows; at all learners."""
    torch.set_num_threads(1)
    runs = [
        override(
            tiny_text(), MOVES | {"epochs": 1, "sparsity.interval": 1} | way | {"grad.learners": 2}
        )
        for way in WAYS
    ]
    rows = ddp.execute([(run, LearnerWiring()) for run in runs], store, HOW)
    for run, row in zip(runs, rows, strict=True):
        parts = build(run, HOW)
        trainer(run, parts, [], False).fit(
            parts.task, parts.data.train, parts.data.val_dataloader()
        )
        totals = parts.task.totals()
        assert row["weights"] == ddp.digest(parts.task.model.state_dict()), run.grad
        assert row["run"] == record(run) and row["masks"] == totals["masks"]
        assert row["flops"] == totals["flops"]
        assert row["gradients"] == pytest.approx(totals["gradients"], rel=1e-6)
        told = [one.get("topology", 0) for one in row["transport"]]
        assert sum(told) == row["masks"]["places"]
        if told[0]:
            assert len({bool(one) for one in told}) == 1  # each learner chose in its turn


def test_learners_of_a_short_batch_still_agree(store):
    """Fewer rows than learners: the leader is one that has a gradient."""
    run = override(
        tiny_text(),
        FIXED | LIVE | {"data.train_blocks": 17, "grad.learners": 8, "sparsity.interval": 1},
    )
    row = execute(run, store, HOW)
    assert row["status"] == "finished" and row["masks"]["updates"] == row["steps"] - 1


@pytest.mark.sampled(3)
@pytest.mark.parametrize("exchange", ["allreduce", "allgather", "server"])
def test_places_reach_every_other_learner_once(exchange, store):
    """B bytes of one learner to n - 1 others: each learner receives (n - 1) / n of them, whoever
    sent them on.
    """
    base = override(tiny_text(), FIXED | LIVE | {"grad.exchange": exchange, "epochs": 1})
    told, drawn = (
        execute(override(base, {"sparsity.growth": how}), store, HOW)
        for how in ("gradient", "random")
    )
    n, steps, b = 4, told["steps"], told["masks"]["places"]
    more = {
        key: (told["gradients"][key] - drawn["gradients"][key]) * steps
        for key in ("up", "bound", "learner_sends", "learner_receives", "total")
    }
    assert more["up"] == more["bound"] == pytest.approx(b / n)
    assert more["learner_receives"] == pytest.approx(b * (n - 1) / n)
    assert more["learner_sends"] == pytest.approx(b / n * (1 if exchange == "server" else n - 1))
    assert more["total"] == pytest.approx(b * (n - 1) + (b if exchange == "server" else 0))


def test_the_entropy_bound_is_of_places_among_live_weights(store):
    """k of L live entries: 32 k + L H2(k / L) bits, for every layer's messages."""
    import math

    run = override(
        tiny_text(), FIXED | TOPK | {"sparsity.drop_fraction": 0, "grad.compress_vectors": False}
    )
    row = execute(run, store, HOW)
    parts = build(run, HOW)
    own = parts.task.components["sparsity"]
    masked = {id(mask.weight): mask.live for mask in own.masks}
    want = 0.0
    for p in own.trained:
        n = masked.get(id(p), p.numel())
        k = max(1, round(0.1 * n))
        share = k / n
        entropy = -share * math.log2(share) - (1 - share) * math.log2(1 - share)
        want += (
            4 * n if p.dim() < 2 else min(4 * k + mask_bytes(1, n, k), (32 * k + n * entropy) / 8)
        )
    assert row["gradients"]["bound"] == pytest.approx(want, rel=1e-3)
    assert row["gradients"]["kept"] == pytest.approx(0.1, abs=0.001)
