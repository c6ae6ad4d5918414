"""Sums that are rounded on the way: against loops over learners, and between real processes."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from commsweep.collectives import Simulated
from commsweep.compressors import build, message
from commsweep.config import Execution, override, record, run_id
from commsweep.config.gradients import RECODED
from commsweep.config.override import parse_gradients
from commsweep.data_parallel.exchange import Exchange
from commsweep.data_parallel.hook import CompressionHook
from commsweep.data_parallel.hops import ALL_TO_ALL, RING, TREE, Hops
from commsweep.errors import UserError
from commsweep.registry import preset
from commsweep.training.run import execute
from tests.helpers import resumed, spawned, tiny

ADDRESS = message.Address(message.digest("test"), 0)
CODES = (
    {"kind": "cast", "to": "bfloat16"},
    {"kind": "uniform", "bits": 8, "scale": "group", "group": 16},
    {"kind": "uniform", "bits": 4, "scale": "group", "group": 16, "rounding": "stochastic"},
    {"kind": "mx", "format": "mxfp8_e4m3"},
    {"kind": "mx", "format": "mxfp8_e5m2"},
)


def draw(layer, learner, hop):
    return 1000 * layer + 100 * learner + hop


def summed(collective, code, rows):
    """The mean of rows [learner][entry] by the library, and the bytes of all hops."""
    way = Hops(Simulated(len(rows)), [build(code)], draw, ADDRESS)
    result = way.reduce(collective, [[row] for row in rows])
    return result.means[0], sum(map(int, result.sent[0])) / len(rows)


def by_hand(collective, code, rows):
    """The same, one learner and one part at a time, on lists."""
    n, compressor = len(rows), build(code)

    def rounded(x, learner, hop):
        return compressor.decode(compressor.encode(x[None], draw(0, learner, hop)))[0]

    size = -(-len(rows[0]) // n)
    padded = [nn.functional.pad(row / n, (0, size * n - len(row))) for row in rows]
    whole = torch.zeros(size * n)
    if collective == TREE:
        values, hop, distance = [row / n for row in rows], 0, 1
        while distance < n:
            for receiver in range(0, n - distance, 2 * distance):
                sender = receiver + distance
                values[receiver] = values[receiver] + rounded(values[sender], sender, hop)
            distance, hop = 2 * distance, hop + 1
        return rounded(values[0], 0, hop)
    for part in range(n):
        entries = slice(part * size, (part + 1) * size)
        if collective == RING:
            at, partial = part, padded[part][entries]
            for hop in range(n - 1):
                at_next = (at + 1) % n
                partial = rounded(partial, at, hop) + padded[at_next][entries]
                at = at_next
            whole[entries] = rounded(partial, at, n - 1)
        else:
            total = torch.zeros(size)
            for learner in range(n):
                total = total + rounded(padded[learner][entries], learner, 0)
            whole[entries] = rounded(total, part, 1)
    return whole[: len(rows[0])]


@pytest.mark.parametrize("collective", [RING, TREE, ALL_TO_ALL])
@pytest.mark.parametrize("code", CODES, ids=lambda code: str(list(code.values())[1]))
def test_sums_are_those_of_a_loop_over_learners(collective, code):
    for n, entries in ((2, 7), (3, 64), (5, 33), (8, 100)):
        rows = [torch.randn(entries, generator=torch.Generator().manual_seed(k)) for k in range(n)]
        mean, _ = summed(collective, code, rows)
        assert torch.equal(mean, by_hand(collective, code, rows)), (n, entries)


CHANNELS = {"kind": "uniform", "bits": 4, "scale": "channel"}


@pytest.mark.parametrize(
    "code", [*(code for code in CODES if "rounding" not in code), CHANNELS], ids=str
)
def test_learners_that_are_coded_as_one_batch_get_the_same_bits(monkeypatch, code):
    """Of parts of whole blocks, MX is coded as one batch; of others, and NVFP4, each by itself."""
    for entries in (64, 33):
        rows = [
            torch.randn(4 * entries, generator=torch.Generator().manual_seed(k)) for k in range(4)
        ]
        together = summed(RING, code, rows)
        with monkeypatch.context() as patch:
            patch.setattr("commsweep.collectives._by_sample", lambda *_: False)
            alone = summed(RING, code, rows)
        assert torch.equal(together[0], alone[0]) and together[1] == alone[1]


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 9), st.integers(1, 40), st.sampled_from([RING, TREE, ALL_TO_ALL]))
def test_a_code_without_error_gives_the_mean(n, entries, collective):
    """Small whole numbers over a power of two are exact in bfloat16, wherever they are added."""
    generator = torch.Generator().manual_seed(n * 100 + entries)
    rows = [torch.randint(-3, 4, (entries,), generator=generator).float() * n for _ in range(n)]
    mean, _ = summed(collective, {"kind": "cast", "to": "bfloat16"}, rows)
    assert torch.equal(mean, torch.stack(rows).mean(0).round())


@pytest.mark.parametrize("n", [2, 4, 6])
def test_bytes_of_every_hop_are_counted(n):
    rows = [torch.ones(12 * n) for _ in range(n)]
    code = {"kind": "cast", "to": "bfloat16"}
    layer, part = 2 * 12 * n, 2 * 12
    # a ring and all-to-all: n - 1 parts each way and learner; a tree: n - 1 layers each way
    for collective in (RING, ALL_TO_ALL):
        assert summed(collective, code, rows)[1] == 2 * n * (n - 1) * part
    assert summed(TREE, code, rows)[1] == 2 * (n - 1) * layer


def test_unbiased_codes_err_with_the_root_of_their_roundings():
    """The error of the sum grows with the number of roundings, not of learners."""
    errors = {}
    code = {"kind": "uniform", "bits": 6, "scale": "group", "group": 32, "rounding": "stochastic"}
    for n in (4, 64):
        rows = [torch.randn(64 * n, generator=torch.Generator().manual_seed(k)) for k in range(n)]
        exact = torch.stack(rows).mean(0)
        for way in (RING, TREE, ALL_TO_ALL):
            errors[way, n] = float((summed(way, code, rows)[0] - exact).norm() / exact.norm())
    assert errors[RING, 64] > 2 * errors[RING, 4]
    assert errors[ALL_TO_ALL, 64] < 1.5 * errors[ALL_TO_ALL, 4]
    assert errors[TREE, 64] < errors[RING, 64]


def test_every_kind_that_can_be_coded_again_is_summed():
    for kind in RECODED:
        rows = [torch.randn(40, generator=torch.Generator().manual_seed(k)) for k in range(4)]
        mean, nbytes = summed(RING, {"kind": kind}, rows)
        assert mean.isfinite().all() and nbytes > 0
        assert math.isfinite(float(mean.norm()))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"grad.compressor": "topk:0.1"},
            "needs a code of one length .* not grad.compressor.kind=topk",
        ),
        ({"grad.compressor": "uniform:4,coding=rans"}, "needs a code of one length"),
        ({"grad.learners": 1}, "has no effect with one learner"),
        ({"grad.compressor": "uniform:8,scale=channel"}, "set grad.compressor.scale=group"),
        ({"grad.exchange": "server"}, "grad.exchange=server does not go with it"),
        ({"grad.feedback": "ef"}, "grad.feedback.kind=ef does not go with it"),
        ({"grad.compressor": "sign", "grad.vote": True}, "grad.vote does not go with it"),
        ({"grad.outer.interval": 4, "grad.outer.clip": True}, "grad.outer.clip does not go"),
        ({"grad.outer.interval": 4, "grad.outer.eager": True}, "grad.outer.eager does not go"),
        ({"grad.compressor": "none"}, "vote, collective, compress_vectors"),
    ],
)
def test_what_a_sum_on_the_way_cannot_have_is_refused(changes, line):
    ring = {"grad.learners": 4, "grad.collective": "ring", "grad.compressor": "uniform:8"}
    assert override(preset("synthetic"), ring).grad.collective == "ring"
    with pytest.raises(UserError, match=line):
        override(preset("synthetic"), ring | changes)


def test_a_run_without_it_has_the_id_that_it_had():
    exact = override(preset("digits_adacomp"), {"grad.collective": "exact"})
    assert run_id(exact) == run_id(preset("digits_adacomp"))
    assert "collective" not in record(exact)["grad"]


def test_a_stopped_run_goes_on_as_if_it_had_not_been(store, tmp_path):
    """Sums on the way keep nothing between steps but their counts."""
    changes = {"grad.learners": 4, "grad.collective": "tree", "grad.compressor": "mxfp4"}
    run = override(tiny(), changes | {"epochs": 2})
    whole, again = execute(run, store, Execution("cpu")), resumed(run, tmp_path / "stopped")
    for name in ("metrics", "gradients", "steps"):
        assert again[name] == whole[name]


def _net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))


def _hooked(rank, port, answer, collective, processes):
    """Put a learner's gradients of two steps, alone and with the hook, into `answer`."""
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=processes)
    model = _net()
    ddp = nn.parallel.DistributedDataParallel(model)
    hook = CompressionHook(model, "uniform:4,rounding=stochastic", seed=3, **SUMMED[collective])
    hook.attach(ddp)
    rows = []
    for step in range(2):
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(10 * step + rank))
        alone = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
        ddp.zero_grad()
        ddp(x).square().mean().backward()
        together = [p.grad.tolist() for p in model.parameters()]
        rows.append(([grad.tolist() for grad in alone], together))
    answer.put((rank, (rows, hook.totals()["up"])))
    dist.destroy_process_group()


SUMMED = {way: {"collective": way, "compress_vectors": True} for way in (RING, TREE, ALL_TO_ALL)}


@pytest.mark.parametrize(
    "processes", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4, 8))]
)
@pytest.mark.parametrize(
    "collective", [RING, pytest.param(TREE, marks=pytest.mark.slow), ALL_TO_ALL]
)
def test_the_hook_sums_as_the_simulation_does(collective, processes):
    answers = dict(spawned(_hooked, processes, collective, processes, answers=processes))
    rows_by_rank = {rank: rows for rank, (rows, _) in answers.items()}
    code = {"learners": processes, "compressor": "uniform:4,rounding=stochastic"}
    exchange = Exchange(parse_gradients(code | SUMMED[collective]), _net(), 3)
    for step in range(2):
        learners = [
            [torch.tensor(grad) for grad in rows_by_rank[rank][step][0]]
            for rank in range(processes)
        ]
        arrived = exchange.begin(learners, step, 0, range(len(exchange.layers)))()
        for index, mean in arrived.items():
            for rows in rows_by_rank.values():
                assert torch.equal(torch.tensor(rows[step][1][index]), mean)
    # a learner counts what all send in the mean: of a tree its root sends more
    exchange.ledger.steps = 2
    for _, up in answers.values():
        assert up == exchange.ledger.totals()["up"]


@pytest.mark.parametrize("collective", [RING, TREE, ALL_TO_ALL])
@pytest.mark.parametrize("n", [2, 3, 4, 7])
def test_a_learner_sends_its_share_of_all_hops(collective, n):
    """2 (n - 1) / n of a layer, coded or dense, without rounding; a ring pads its parts."""
    spec = {"learners": n, "collective": collective, "compressor": "cast:to=bfloat16"}
    layer = nn.Linear(7 * n, 5)
    exchange = Exchange(parse_gradients(spec), layer, 0)
    grads = [[torch.ones_like(p) for p in layer.parameters()] for _ in range(n)]
    for step in range(3):
        exchange.begin(grads, step, 0, range(2))()
        exchange.ledger.steps += 1
    share = 2 * (n - 1) / n
    assert exchange.ledger.totals()["up"] == pytest.approx(share * (2 * 35 * n + 4 * 5), rel=1e-12)
