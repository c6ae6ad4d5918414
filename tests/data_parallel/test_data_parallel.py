"""Learners: equal to one learner, to the formulas, to published cases and volumes, and to real
processes.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from commsweep.cli.main import main
from commsweep.collectives import Handle, Simulated
from commsweep.compressors.adacomp import AdaComp
from commsweep.compressors.kernels import cpu, elias
from commsweep.config import Execution, override, record
from commsweep.config.compressors.dense import NoCompressorSpec
from commsweep.config.compressors.joint import AdaCompSpec
from commsweep.config.compressors.lowrank import PowerSGDSpec
from commsweep.config.compressors.qsgd import QSGDSpec
from commsweep.config.compressors.sparse import TopKSpec
from commsweep.config.compressors.spelling import spelled
from commsweep.config.compressors.thresholds import PeriodicSpec
from commsweep.config.compressors.values.levels import NaturalSpec, OneBitSpec, SignSpec, TernSpec
from commsweep.config.compressors.values.quantize import FixedPointSpec
from commsweep.config.execution import LearnerWiring
from commsweep.config.feedback import (
    AdaCompResidueSpec,
    EF21GradientSpec,
    EF21SGDMSpec,
    LoCoSpec,
    LowPassSpec,
    MomentumCorrectionSpec,
    NoFeedbackSpec,
    ResidueSpec,
)
from commsweep.config.gradients import AccordionSpec, Gradients, RampSpec, exchange_of
from commsweep.config.override import parse_gradients
from commsweep.config.training import ImageModel
from commsweep.data_parallel.exchange import Exchange
from commsweep.data_parallel.joint import build
from commsweep.data_parallel.layers import layers
from commsweep.data_parallel.memory import memory_bytes
from commsweep.errors import UserError
from commsweep.feedback import gradient_memories as feedback
from commsweep.models import resnet
from commsweep.processes import ddp
from commsweep.registry import content
from commsweep.training.run import build as build_run
from commsweep.training.run import execute
from tests.helpers import free_port, resumed, same_bits, spawned, tiny, tiny_text, trained

METHODS = content("sweeps.adacomp").METHODS

HOW = Execution("cpu")
GATHER = {"grad.exchange": "allgather"}
each_method = pytest.mark.parametrize("name", METHODS)


def weights(task):
    return {name: one.clone() for name, one in task.model.state_dict().items()}


def largest_difference(a, b):
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)


def exchange(compressor, memory=None, learners=1, shape=(40, 30), **more):
    """An exchange of one matrix."""
    net = nn.Linear(shape[1], shape[0], bias=False)
    spec = Gradients(
        learners=learners,
        exchange=more.pop("exchange", "allgather"),
        compressor=compressor,
        feedback=memory or NoFeedbackSpec(),
        **more,
    )
    return Exchange(spec, net, seed=0)


# Learners.


def test_learners_without_compression_equal_one_learner_up_to_rounding():
    """A GPT-2 has no batch statistics, so only the order of sums differs (float32: 1e-6 of the
    largest weight).
    """
    one, four = (
        weights(trained(tiny_text(grad__learners=n, optim__kind="sgd", optim__lr=0.1)))
        for n in (1, 4)
    )
    assert largest_difference(one, four) < 1e-6 * max(float(w.abs().max()) for w in one.values())


@pytest.mark.parametrize(
    "base", [tiny(), tiny(channels_last=True), tiny_text(epochs=1)], ids=["image", "last", "text"]
)
def test_what_is_kept_whole_changes_nothing(base):
    """Law 2 for gradients: K = 100 % with two learners is bit-identical to two learners without
    compression.
    """
    dense = trained(override(base, {"grad.learners": 2}))
    for memory in ("none", "ef"):
        whole = trained(
            override(
                base,
                GATHER
                | {
                    "grad.learners": 2,
                    "grad.compressor.kind": "topk",
                    "grad.compressor.ratio": 1.0,
                    "grad.feedback.kind": memory,
                },
            )
        )
        assert all(
            same_bits(a, b)
            for a, b in zip(weights(dense).values(), weights(whole).values(), strict=True)
            if a.is_floating_point()
        )


def test_learners_share_a_batch_and_a_short_one_too():
    learners = build_run(tiny(grad__learners=4), HOW).task.components["learners"]
    for batch in (32, 13, 3):
        shares = learners.passes(batch)
        rows = [row for share in shares for row in range(share.rows.start, share.rows.stop)]
        assert rows == list(range(batch))
        assert sum(share.weight for share in shares) == pytest.approx(4)
        assert [(share.turn, share.of) for share in shares] == [
            (turn, len(shares)) for turn in range(len(shares))
        ]


def test_bytes_a_step_are_of_all_messages_of_the_step(store):
    """Microbatches and learners cut a batch into more messages; of dense ones the bytes of a step
    stay the same.
    """
    rows = [
        execute(override(tiny(epochs=1, eval_every=1), changes), store, HOW)
        for changes in (
            {},
            {"microbatches": 4},
            {"grad.learners": 4},
            {"grad.learners": 2, "grad.outer.interval": 2},
        )
    ]
    sent = [(row["bytes"]["fwd_per_step"], row["bytes"]["bwd_per_step"]) for row in rows]
    total = sum(boundary["fwd"] for boundary in rows[0]["boundaries"].values())
    assert len(set(sent)) == 1 and sent[0][0] * rows[0]["steps"] == total


@pytest.mark.parametrize("learners", [1, 2])
def test_local_steps_are_sgd_steps_on_weights_of_ones_own(learners):
    """Against a plain loop: every learner's copy takes its steps, then the copies are averaged."""
    run = override(
        tiny(
            model__name="mlp",
            epochs=1,
            eval_every=1,
            optim__momentum=0.0,
            optim__weight_decay=0.0,
            optim__lr=0.02,
            schedule__kind="constant",
        ),
        {"grad.learners": learners, "grad.local_steps": 4},
    )
    torch.set_num_threads(1)
    parts = build_run(run, HOW)
    shared = {name: p.detach().clone() for name, p in parts.task.model.named_parameters()}
    model = parts.task.model
    parts.data.train.set_epoch(0)
    for x, y, _ in parts.data.train:
        ends = []
        for rows in torch.arange(len(y)).chunk(learners):
            model.load_state_dict(shared, strict=False)
            for part in rows.chunk(4):
                model.zero_grad()
                nn.functional.cross_entropy(model(x[part]), y[part]).backward()
                with torch.no_grad():
                    for p in model.parameters():
                        p -= 0.02 * p.grad
            ends.append({name: p.detach().clone() for name, p in model.named_parameters()})
        shared = {name: sum(end[name] for end in ends) / learners for name in shared}
    ours = dict(trained(run).model.named_parameters())
    assert largest_difference(shared, {name: p.detach() for name, p in ours.items()}) < 1e-5


def test_running_statistics_are_the_first_learners(store):
    """DistributedDataParallel broadcasts rank 0's buffers before every pass."""
    task = trained(tiny(grad__learners=2, epochs=1, eval_every=1))
    assert task.model.bn1.num_batches_tracked == task.global_step


@pytest.mark.parametrize("apart", [{}, {"grad__outer__interval": 2}])
def test_running_statistics_travel_beside_what_is_exchanged(monkeypatch, apart):
    """They are on their way before anything is waited for, so that they cost no latency."""
    seen = []

    def watched(name):
        inner = getattr(Simulated, name)

        def begin(self, parts, *rest, **more):
            seen.append(rest[-1])
            handle = inner(self, parts, *rest, **more)
            return Handle(lambda: (seen.append("waited for"), handle.wait())[1])

        return begin

    for name in ("gather", "broadcast"):
        monkeypatch.setattr(Simulated, name, watched(name))
    trained(tiny(grad__learners=2, epochs=1, eval_every=1, **apart))
    first = seen.index("waited for")
    assert {"gradients", "statistics"} <= set(seen[:first])


def test_each_learners_slots_of_a_boundary_are_its_own():
    run = tiny(grad__learners=2, fwd__compressor__kind="topk", fwd__feedback__kind="ef")
    task = trained(run)
    state = next(iter(task.components["boundaries"].values())).fwd.feedback.memory.state
    assert all(float(row.abs().sum()) > 0 for row in state)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if turn % 4 == 0 else pytest.mark.slow)
        for turn, name in enumerate(METHODS)
    ],
)
@pytest.mark.sampled(3)
def test_every_method_trains_and_a_resumed_run_equals_an_uninterrupted_one(name, tmp_path):
    from commsweep.store import Store

    run = override(
        tiny(epochs=4, eval_every=2, schedule__t_max=4), {"grad.learners": 2} | METHODS[name]
    )
    straight = execute(run, Store(tmp_path / "a"), HOW)
    assert straight["status"] == "finished", straight["error"]
    turns = itertools.count()
    store = Store(tmp_path / "b")
    with pytest.raises(KeyboardInterrupt):
        execute(run, store, Execution("cpu", checkpoint_every=0), lambda: next(turns) == 1)
    resumed = execute(run, store, HOW)
    assert (
        resumed["metrics"] == straight["metrics"] and resumed["gradients"] == straight["gradients"]
    )
    assert straight["run"]["grad"] == record(run)["grad"]


# AdaComp.


def worked():
    r = torch.tensor([0.5, -0.25, 0, 0.125, 1, -0.5, 0.25, 0])
    d = torch.tensor([0.25, -0.5, 0.125, -0.125, -0.25, -0.25, 0.5, 0.125])
    return (
        r,
        d,
        torch.tensor([0.75, -0.75, 0, 0, 0, -0.75, 0.75, 0]),
        torch.tensor([0, 0, 0.125, 0, 0.75, 0, 0, 0.125]),
    )


@pytest.mark.parametrize("compiled", [True, False])
def test_adacomps_worked_case(compiled, monkeypatch):
    if not compiled:
        monkeypatch.setattr(cpu, "numba", None)
    r, d, sent, left = worked()
    made = exchange(AdaCompSpec(fc=4), AdaCompResidueSpec(), shape=(2, 4))
    made.memories[0][0].e.copy_(r.reshape(2, 4))
    assert torch.equal(made.send(0, [d.reshape(2, 4)], 0, 0).flatten(), sent)
    assert torch.equal(made.memories[0][0].e.flatten(), left)
    # 1 + scale + four elements of a byte (bins of up to 64)
    assert made.ledger.up[0] == 5 + 2 * 4 // 2


@given(data=st.data())
def test_adacomp_against_a_plain_loop_and_its_payload(data):
    n, size = data.draw(st.integers(1, 200)), data.draw(st.sampled_from([1, 4, 50, 64, 65, 500]))
    values = st.sampled_from([-2.0, -1.0, -0.5, 0.0, 0.25, 1.0, 3.0])
    g, d = (
        np.array(data.draw(st.lists(values, min_size=n, max_size=n)), np.float32) for _ in range(2)
    )
    want, tops = np.zeros(n, np.float32), []
    for start in range(0, n, size):
        part = slice(start, start + size)
        top = np.abs(g[part]).max()
        tops += [top] if top > 0 else []
        keep = (np.abs(g[part] + d[part]) >= top) & (g[part] != 0)
        want[part] = np.sign(g[part]) * keep
    want *= np.float32(np.mean(tops)) if tops else 0
    method = AdaComp(AdaCompSpec(fc=size))
    y = method.look_ahead(torch.from_numpy(g)[None], torch.from_numpy(d)[None], 1.0)
    assert np.allclose(y[0].numpy(), want, rtol=1e-6, atol=0)
    e = torch.from_numpy(g - d)
    fast, nbytes, kept = method.step(e, torch.from_numpy(d), 1.0)
    assert kept == int(y.count_nonzero())
    assert same_bits(fast + 0.0, y[0] + 0.0) and nbytes == int(method.bytes_sent(y))
    assert same_bits(e, torch.from_numpy(g) - y[0])
    payload = method.pack(y)
    assert same_bits(method.decode(payload), y + 0.0) and payload.nbytes == int(
        method.bytes_sent(y)
    )


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_gradient_stays_visible(bad, compiled, monkeypatch):
    if not compiled:
        monkeypatch.setattr(cpu, "numba", None)
    made = exchange(AdaCompSpec(), AdaCompResidueSpec())
    grad = torch.randn(40, 30)
    grad[3, 3] = bad
    assert not made.send(0, [grad], 0, 0).isfinite().all()


def test_adacomps_layout_gives_the_published_rates_at_five_elements_a_bin():
    for spec, shape, rate in (
        (AdaCompSpec(), (1, 100, 50, 10, 10), 40),
        (AdaCompSpec(), (1, 1000, 500), 200),
    ):
        y = torch.zeros(shape)
        size = AdaComp(spec).bin_size(torch.Size(shape))
        y.view(-1, size)[:, :5] = 1.0
        assert 4 * y.numel() / int(AdaComp(spec).bytes_sent(y)) == pytest.approx(rate, rel=1e-3)


def test_bins_of_zeros_send_nothing_and_a_bitmap_names_them():
    y = torch.zeros(1, 4, 500)
    method = AdaComp(AdaCompSpec())
    assert int(method.bytes_sent(y)) == 1 + 4 + 1
    assert torch.equal(method.decode(method.pack(y)), y)


# Feedbacks, against their formulas in float64.


def reference(kind, grads, compress, **p):
    """(what is used, state) of each step, in float64."""
    e = a = v = u = np.zeros_like(grads[0])
    out, begun = [], False
    for g in grads:
        if kind in ("ef", "lowpass"):
            m = g + e
            y = compress(m)
            e = m - y if kind == "ef" else (1 - p["beta"]) * e + p["beta"] * (m - y)
            out.append(y)
        elif kind == "ef21":
            a = a + compress(g - a)
            out.append(a)
        elif kind == "ef21_sgdm":
            v = g if not begun else (1 - p["eta"]) * v + p["eta"] * g
            begun = True
            a = a + compress(v - a)
            out.append(a)
        elif kind == "dgc":
            u = p["momentum"] * u + g
            v = v + u
            y = compress(v)
            u, v = u * (y == 0), v * (y == 0)
            out.append(y)
    return out


@pytest.mark.parametrize(
    "kind, spec",
    [
        ("ef", ResidueSpec()),
        ("lowpass", LowPassSpec(beta=0.3)),
        ("ef21", EF21GradientSpec()),
        ("ef21_sgdm", EF21SGDMSpec(eta=0.2)),
        ("dgc", MomentumCorrectionSpec(momentum=0.8)),
    ],
)
def test_feedbacks_follow_their_formulas(kind, spec):
    made = exchange(TopKSpec(ratio=0.1), spec)
    grads = [
        torch.randn(40, 30, generator=torch.Generator().manual_seed(step)) for step in range(6)
    ]

    def top(x):
        keep = np.argsort(-np.abs(x).ravel(), kind="stable")[:120]
        out = np.zeros(x.size)
        out[keep] = x.ravel()[keep]
        return out.reshape(x.shape)

    wanted = reference(
        kind, [g.double().numpy() for g in grads], top, **spec.model_dump(exclude={"kind"})
    )
    for step, (grad, want) in enumerate(zip(grads, wanted, strict=True)):
        assert np.allclose(made.send(0, [grad.clone()], step, 0).numpy(), want, atol=1e-5)


def test_loco_keeps_a_mean_error_in_eight_bits_and_forgets_it():
    made = exchange(FixedPointSpec(bits=4, scale="sample"), LoCoSpec(beta=0.8, reset=3))
    errors = []
    for step in range(3):
        made.send(0, [torch.randn(40, 30, generator=torch.Generator().manual_seed(step))], step, 0)
        errors.append(made.memories[0][0].e.clone())
    assert len(errors[0].unique()) <= 255 and errors[0].abs().sum() > 0
    assert errors[2].abs().sum() == 0


@each_method
def test_residues_telescope_where_the_method_says_so(name):
    grad = override(tiny(), {"grad.learners": 2} | METHODS[name]).grad
    if grad.feedback.kind not in ("ef", "adacomp") or grad.vote:
        pytest.skip("its feedback is no residue of everything")
    made = exchange(
        grad.compressor, grad.feedback, learners=2, exchange=grad.exchange, schedule=grad.schedule
    )
    total = torch.zeros(40, 30)
    used = torch.zeros(40, 30)
    for step in range(8):
        grads = [
            torch.randn(40, 30, generator=torch.Generator().manual_seed(10 * step + i))
            for i in range(2)
        ]
        total += sum(grads) / 2
        used += made.send(0, grads, step, 0)
    left = sum(memory[0].e for memory in made.memories) / 2
    assert torch.allclose(used + left, total, atol=1e-4)


# Published cases (facts, section 5.2).


def sent(spec, *values, seed=0):
    return build(spec).roundtrip(torch.tensor([values], dtype=torch.float32), seed)[0].tolist()


@pytest.mark.parametrize(
    "got, want",
    [
        (
            sent(TopKSpec(ratio=3 / 8), 1, 3, 5, 12, 5, 3, -11, 9),
            [0, 0, 0, 12, 0, 0, -11, 9],
        ),
        (sent(TopKSpec(ratio=0.5), 1, 2, 3, 4, 5, 6, 7, -8), [0, 0, 0, 0, 5, 6, 7, -8]),
        (sent(TopKSpec(ratio=2 / 3), 1, -2.75, 2.75), [0, -2.75, 2.75]),
        (sent(TopKSpec(ratio=0.5), 1, 2, 3, 4), [0, 0, 3, 4]),
        (sent(OneBitSpec(), 3, -1, 2, -2), [2.5, -1.5, 2.5, -1.5]),
        (sent(OneBitSpec(), 0, 2, -1), [1, 1, -1]),
        (sent(QSGDSpec(levels=7), 2, 3, 6), [2, 3, 6]),
        (sent(QSGDSpec(levels=1), 1), [1]),
        (sent(QSGDSpec(levels=2), 2), [2]),
        (sent(TernSpec(clip=0.0), -1, 0, 1), [-1, 0, 1]),
        (sent(TernSpec(clip=0.0), -1, 0, 1e5), [0, 0, 1e5]),
        (sent(SignSpec(), 1, -2, 3), [2, -2, 2]),
    ],
)
def test_published_cases(got, want):
    assert got == want


def test_two_clients_sum():
    made = exchange(TopKSpec(ratio=0.5), learners=2, shape=(1, 4))
    clients = [torch.tensor([[1.0, 2, 3, 4]]), torch.tensor([[4.0, 3, 2, 1]])]
    assert (2 * made.send(0, clients, 0, 0)).tolist() == [[4, 3, 3, 4]]


@pytest.mark.parametrize(
    "spec, values, code_bits",
    [
        (QSGDSpec(levels=7), [2, 3, 6], 17),
        (QSGDSpec(levels=1), [1], 3),
        (QSGDSpec(levels=2), [2], 5),
    ],
)
def test_qsgds_code_has_the_published_length(spec, values, code_bits):
    payload = build(spec).encode(torch.tensor([values], dtype=torch.float32))
    assert payload.parts["codes"].numel() == math.ceil(code_bits / 8)
    assert payload.nbytes == math.ceil(code_bits / 8) + 4


def test_elias_gamma_lengths_are_the_published_ones():
    for value, bits in zip((1, 2, 3, 4, 7, 8, 15, 16), (1, 3, 3, 5, 5, 7, 7, 9), strict=True):
        code = elias.elias_encode(np.array([value], np.int32))
        assert len(code) == math.ceil((1 + 1 + bits) / 8)  # a run of one, a sign, the level
        assert elias.elias_decode(code, 1).tolist() == [value]


@given(st.lists(st.integers(-300, 300) | st.just(0), min_size=1, max_size=120))
def test_elias_codes_come_back(levels):
    code = elias.elias_encode(np.array(levels, np.int32))
    assert elias.elias_decode(code, len(levels)).tolist() == levels


@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 20000),
    st.sampled_from([0.5, 0.05, 0.001]),
    st.sampled_from([1, 7, 300, 2**31 - 1]),
)
@settings(max_examples=60, deadline=None)
def test_long_elias_codes_come_back_and_are_the_published_bits(seed, n, share, largest):
    """Few and many non-zeros, short and long runs, beside gamma codes in text."""
    rng = np.random.default_rng(seed)
    levels = rng.integers(-largest, largest + 1, n).astype(np.int32)
    levels[rng.random(n) >= share] = 0
    code = elias.elias_encode(levels)
    np.testing.assert_array_equal(elias.elias_decode(code, n), levels)
    places = np.flatnonzero(levels)
    runs = np.diff(places, prepend=-1)
    text = "".join(
        f"{_gamma(run)}{int(level < 0)}{_gamma(abs(int(level)))}"
        for run, level in zip(runs.tolist(), levels[places].tolist(), strict=True)
    )
    bits = np.frombuffer(text.encode(), np.uint8) - ord("0")
    np.testing.assert_array_equal(code, np.packbits(bits, bitorder="little"))
    assert elias.elias_bits(levels) == len(text)


def test_elias_codes_come_back_without_a_compiler(monkeypatch):
    for name in ("_elias", "_elias_back", "_flushed"):
        monkeypatch.setattr(elias, name, getattr(elias, name).py_func)
    levels = np.random.default_rng(0).integers(-3, 4, 300).astype(np.int32)
    levels[150] = 70000
    code = elias.elias_encode(levels)
    assert elias.elias_decode(code, 300).tolist() == levels.tolist()


def _gamma(value: int) -> str:
    return "0" * (value.bit_length() - 1) + f"{value:b}"


@pytest.mark.parametrize(
    "spec, omega",
    [
        (NaturalSpec(), 1 / 8),
        (QSGDSpec(levels=4, bucket=64), min(64 / 16, 8 / 4)),
        (TernSpec(clip=0.0), 64.0),
    ],
)
def test_stochastic_methods_are_unbiased_with_the_stated_variance_and_do_something(spec, omega):
    x = torch.randn(1, 64, generator=torch.Generator().manual_seed(3))
    draws = torch.stack([build(spec).apply(x, seed) for seed in range(4000)])
    spread = draws.std(0) / 4000**0.5
    assert ((draws.mean(0) - x).abs() <= 5 * spread + 1e-5).all()
    error = (draws - x).square().sum(2).mean()
    assert 0 < float(error) <= 1.05 * omega * float(x.square().sum())


def test_natural_rounds_to_the_neighbouring_powers_with_the_right_chance():
    draws = build(NaturalSpec()).apply(torch.full((1, 20000), 2.75), 1)
    assert set(draws.unique().tolist()) == {2.0, 4.0}
    assert float((draws == 4).float().mean()) == pytest.approx(0.375, abs=0.015)


# Accounting.


@pytest.mark.parametrize(
    "rank, ratio, mib", [(1, 243.26, 4.21), (2, 135.84, 7.53), (4, 72.13, 14.18), (7, 42.34, 24.16)]
)
def test_powersgds_volumes_come_out_of_the_ledger(rank, ratio, mib):
    net = resnet.build(ImageModel(name="resnet18", width=64), 3, 10)
    spec = Gradients(learners=16, compressor=PowerSGDSpec(rank=rank), feedback=ResidueSpec())
    made = Exchange(spec, nn.ModuleDict({"model": net}), 0)
    grads = [torch.randn(p.shape) for p in made.trained]
    for place, grad in enumerate(grads):
        # the arithmetic of one small layer of each kind is enough
        if made.layers[place].shape.numel() < 50_000:
            made.send(place, [grad] * 16, 0, 0)
        else:
            layer = made.layers[place]
            made.ledger.sent(place, round(16 * made.base(place).nbytes(layer.shape, 16)))
    made.ledger.steps = 1
    totals = made.ledger.totals()
    assert totals["dense"] == 4 * 11_173_962
    assert totals["rate"] == pytest.approx(ratio, abs=0.005)
    assert totals["up"] * 24 / 2**20 == pytest.approx(mib, abs=0.005)
    assert totals["dense"] * 24 / 2**20 == pytest.approx(1023.0, abs=0.05)


def test_patterns_cost_what_their_links_carry():
    for pattern, sends, receives, total in (
        ("allreduce", 1.5, 1.5, 6),
        ("allgather", 3, 3, 12),
        ("server", 1, 1, 8),
    ):
        made = exchange(NoCompressorSpec(), learners=4, exchange=pattern)
        made.send(0, [torch.ones(40, 30)] * 4, 0, 0)
        made.ledger.steps = 1
        totals = made.ledger.totals()
        assert [
            totals[key] / 4800 for key in ("up", "learner_sends", "learner_receives", "total")
        ] == [1, sends, receives, total]


def test_a_servers_answer_is_as_sparse_as_the_union_of_what_it_got():
    made = exchange(TopKSpec(ratio=0.01), learners=2, exchange="server")
    grads = [torch.zeros(40, 30), torch.zeros(40, 30)]
    grads[0][0, :12], grads[1][1, :12] = 1.0, 1.0
    made.send(0, grads, 0, 0)
    made.ledger.steps = 1
    totals = made.ledger.totals()
    assert totals["up"] == 12 * 4 + math.ceil(12 * 11 / 8)
    assert totals["learner_receives"] == 24 * 4 + math.ceil(24 * 11 / 8) + 4 + 1


def test_dense_warm_up_steps_and_vectors_are_counted(store):
    run = override(
        tiny(epochs=2, eval_every=1),
        GATHER
        | {
            "grad.learners": 2,
            "grad.compressor.kind": "topk",
            "grad.compressor.ratio": 0.01,
            "grad.start_epoch": 1,
        },
    )
    row = execute(run, store, HOW)["gradients"]
    whole = override(run, {"grad.start_epoch": 0})
    without = execute(whole, store, HOW)["gradients"]
    assert row["vector.up"] == row["vector.dense"]
    assert row["conv.up"] == pytest.approx((row["conv.dense"] + without["conv.up"]) / 2)


@pytest.mark.parametrize("ratio", [0.01, 0.1, 0.3])
def test_the_entropy_bound_is_that_of_places_and_values_and_lies_below_what_is_sent(ratio):
    made = exchange(TopKSpec(ratio=ratio), learners=2)
    made.send(0, [torch.randn(40, 30), torch.randn(40, 30)], 0, 0)
    made.ledger.steps = 1
    k = round(1200 * ratio)
    entropy = -ratio * math.log2(ratio) - (1 - ratio) * math.log2(1 - ratio)
    totals = made.ledger.totals()
    assert totals["bound"] == pytest.approx((32 * k + 1200 * entropy) / 8)
    assert (
        totals["bound"]
        < totals["up"]
        == build(TopKSpec(ratio=ratio)).formula_bytes(torch.Size([1, 40, 30]), torch.float32)
    )


def test_layers_have_their_class():
    kinds = {
        layer.name: layer.kind
        for layer in layers(build_run(tiny_text(), HOW).task.model, Gradients())
    }
    assert (
        kinds["transformer.wte.weight"] == "embedding"
        and kinds["transformer.h.0.attn.c_attn.weight"] == "fc"
    )
    assert kinds["transformer.h.0.ln_1.bias"] == "vector"
    assert {layer.kind for layer in layers(build_run(tiny(), HOW).task.model, Gradients())} == {
        "conv",
        "fc",
        "vector",
    }


def test_coders_learn_with_learners(store):
    run = tiny(grad__learners=2, fwd__compressor__kind="bottleneck", fwd__compressor__width=2)
    before = build_run(run, HOW).task.components["boundaries"].state_dict()
    after = trained(run).components["boundaries"].state_dict()
    assert all(
        not torch.equal(before[name], after[name])
        for name in before
        if "weight" in name or "encoder" in name
    )


# Schedules.


def test_a_ramp_keeps_less_every_epoch():
    made = exchange(TopKSpec(ratio=0.01), schedule=RampSpec(epochs=3))
    assert [made.compressor(0, epoch).spec.ratio for epoch in range(5)] == [
        0.25,
        0.0625,
        0.015625,
        0.01,
        0.01,
    ]


def test_accordion_is_mild_while_gradients_change():
    made = exchange(
        PowerSGDSpec(rank=1),
        ResidueSpec(),
        exchange="allreduce",
        schedule=AccordionSpec(mild=4, eta=0.5, every=1),
    )
    ranks = []
    for epoch, size in enumerate((1.0, 1.0, 1.1, 3.0)):
        ranks.append(made.compressor(0, epoch).spec.rank)
        made.send(0, [size * torch.ones(40, 30)], epoch, epoch)
        made.epoch_ended(epoch)
    assert ranks == [4, 4, 1, 1] and made.compressor(0, 4).spec.rank == 4


# Settings.


@pytest.mark.parametrize(
    "changes, line",
    [
        (
            {"grad.learners": 4, "grad.local_steps": 16},
            "times grad.local_steps=16 does not divide data.batch_size=32",
        ),
        ({"grad.learners": 3}, "grad.learners=3 does not divide data.batch_size=32"),
        (
            {"grad.compressor.kind": "topk", "grad.exchange": "allreduce"},
            "grad.exchange=allreduce adds messages up on the way",
        ),
        (
            {"grad.compressor.kind": "cltk", "grad.exchange": "server"},
            "grad.exchange=server has no leader",
        ),
        (
            {
                "grad.compressor.kind": "adacomp",
                "grad.exchange": "allgather",
                "grad.compressor.fc": 40000,
            },
            "32768",
        ),
        ({"grad.feedback.kind": "ef"}, "grad.compressor.kind=none"),
        (
            {"grad.compressor.kind": "topk", "grad.exchange": "server", "grad.vote": True},
            "grad.vote=true counts signs",
        ),
        (
            {
                "grad.compressor.kind": "sign",
                "grad.exchange": "server",
                "grad.schedule.kind": "ramp",
            },
            "changes a ratio",
        ),
        (
            {
                "grad.compressor.kind": "topk",
                "grad.exchange": "server",
                "grad.feedback.kind": "adacomp",
            },
            "does not go with",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_one_line(changes, line):
    with pytest.raises(UserError, match=line):
        override(tiny(), changes)


# Real processes.


SLOW = pytest.mark.slow


@SLOW
@pytest.mark.parametrize(
    "name",
    [
        "AdaComp",
        "PowerSGD 2",
        "dense",
        "CLT-k 1 %",
        "EF21 TopK 1 %",
        "QSGD 4",
        "1-bit",
        "Local SGD, 4 steps",
        "periodic",
    ],
)
def test_processes_equal_the_simulation_bit_for_bit(name, store):
    run = override(
        tiny(epochs=1, eval_every=1, channels_last=True),
        {"grad.learners": 2} | (PERIODIC if name == "periodic" else METHODS[name]),
    )
    (row,), simulated = ddp.execute([(run, LearnerWiring())], store, HOW), trained(run)
    assert row["weights"] == ddp.digest(simulated.model.state_dict())
    assert {key: row["metrics"][key] for key in simulated.scores} == simulated.scores
    assert (
        row["run"] == record(run)
        and row["gradients"].keys() == simulated.totals()["gradients"].keys()
    )
    ledger = simulated.components["learners"].exchange.ledger
    handed = sum(one["gradients"] for one in row["transport"])
    framing = handed - sum(int(one) for one in ledger.up)
    # lengths, types, sizes
    assert 0 <= framing <= 4 * ledger.steps * 2 * (8 + 16 * len(ledger.layers))
    if name in ("dense", "PowerSGD 2", "Local SGD, 4 steps"):
        assert framing == 0
    assert 0 < row["timing"]["waited"] < row["timing"]["parts"]["gradients"], (
        "waiting is part of the exchange"
    )


def _disagree(rank, port, line):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    try:
        ddp.agree(tiny(grad__learners=2, optim__lr=0.01 * (1 + rank)))
    except UserError as error:
        line.put(str(error))
    dist.destroy_process_group()


@pytest.mark.slow
def test_learners_of_different_configurations_say_so():
    assert all(
        "the learners' configurations differ" in line for line in spawned(_disagree, 2, answers=2)
    )


@pytest.mark.slow
def test_the_ddp_command_compares_itself_with_the_recorded_simulation(tmp_path, capsys):
    settings = ["synthetic", "grad.exchange=allgather", "grad.compressor.kind=qsgd"]
    torch.set_num_threads(1)
    assert (
        main(["run", *settings, "grad.learners=2", "--store", str(tmp_path), "--device", "cpu"])
        == 0
    )
    assert main(["ddp", *settings, "--learners", "2", "--store", str(tmp_path)]) == 0
    assert "the same scores, bit for bit" in capsys.readouterr().out


@pytest.mark.parametrize(
    "args, line",
    [
        (["--learners", "1"], "one learner has nobody to exchange gradients with"),
        (["--learners", "3"], "grad.learners=3 does not divide data.batch_size=32"),
        (
            ["--learners", "2", "--device", "cuda"],
            "--device cuda: the learners are processes on this machine's CPU cores",
        ),
    ],
)
def test_ddp_refuses_in_one_line(args, line, tmp_path, capsys):
    settings = [one for one in args if "=" in one]  # before the options, as argparse wants them
    options = [one for one in args if "=" not in one]
    assert main(["ddp", "synthetic", *settings, *options, "--store", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"commsweep: {line}")


def plain_ddp(rank, run, port, answer):
    """Three steps of plain DistributedDataParallel, torch's own all-reduce, SGD: one process of
    two.
    """
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2
    )
    parts = build_run(run, HOW)
    model = nn.parallel.DistributedDataParallel(parts.task.model)
    optimizer = torch.optim.SGD(
        model.parameters(), run.optim.lr, run.optim.momentum, weight_decay=run.optim.weight_decay
    )
    parts.data.train.set_epoch(0)
    for x, y, _ in parts.data.train:
        own = slice(rank * len(y) // 2, (rank + 1) * len(y) // 2)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[own]), y[own]).backward()
        optimizer.step()
    if rank == 0:
        answer.send({name: one.numpy() for name, one in parts.task.model.state_dict().items()})
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_learners_equal_plain_ddp_with_torchs_own_all_reduce():
    """Batch statistics and all; float32, 1e-6 of the largest weight for another order of sums."""
    run = tiny(epochs=1, eval_every=1, grad__learners=2, schedule__kind="constant")
    context, port = torch.multiprocessing.get_context("spawn"), free_port()
    here, there = context.Pipe(duplex=False)
    processes = [
        context.Process(target=plain_ddp, args=(rank, run, port, there)) for rank in range(2)
    ]
    for process in processes:
        process.start()
    assert here.poll(120)
    made = {name: torch.from_numpy(one) for name, one in here.recv().items()}
    for process in processes:
        process.join()
    ours = weights(trained(run))
    assert largest_difference(ours, made) < 1e-6 * max(float(w.abs().max()) for w in made.values())


@each_method
def test_the_stated_memory_is_what_the_learners_hold(name):
    run = override(
        tiny(),
        {"grad.learners": 4}
        | METHODS[name]
        | {
            "grad.compress_vectors": name != "dense" and "local" not in name and "Local" not in name
        },
    )
    task = build_run(run, HOW).task
    tensors = [
        one
        for key, one in task.components["learners"].named_buffers()
        if one.dim() and "kept" not in key
    ]
    gradients = 4 * sum(4 * p.numel() for p in task.model.parameters())
    held = sum(4 * one.numel() for one in tensors) + gradients
    assert memory_bytes(run.grad, task.model) == held


def test_learners_that_cannot_fit_are_refused(monkeypatch):
    monkeypatch.setattr("commsweep.boundary.message_sizes._free_memory", lambda: 1000)
    with pytest.raises(UserError, match="fewer grad.learners"):
        build_run(tiny(grad__learners=4), HOW)


def test_feedback_kinds_are_all_reached():
    assert set(feedback.MEMORIES) - {"decoupled"} == {  # Dion's, in test_optim
        override(tiny(), {"grad.learners": 2} | change).grad.feedback.kind
        for change in METHODS.values()
    }


# What audits found.


def test_accordions_rank_is_the_one_that_is_used_and_charged():
    """A critical layer's message is the mean's best rank-4 product after some iterations, and costs
    rank 4.
    """
    made = exchange(
        PowerSGDSpec(rank=1),
        exchange="allreduce",
        schedule=AccordionSpec(mild=4, eta=0.5, every=1),
    )
    basis = torch.randn(40, 4) @ torch.randn(4, 30)  # of rank 4
    for step in range(8):
        y = made.send(0, [basis], step, 0)
    assert torch.linalg.matrix_rank(y) == 4 and torch.allclose(y, basis, atol=1e-3)
    made.accordion.mild = [False]
    before = made.kept0.clone()
    y = made.send(0, [basis], 8, 1)
    assert torch.linalg.matrix_rank(y) == 1
    assert torch.equal(made.kept0[:, 1:], before[:, 1:]) and not torch.equal(
        made.kept0[:, :1], before[:, :1]
    )
    assert int(made.ledger.up[0]) == 8 * 4 * 4 * (40 + 30) + 4 * (40 + 30)


def test_a_servers_downlink_and_the_bound_count_dense_warm_up_steps():
    spec = Gradients(exchange="server", compressor=TopKSpec(ratio=0.01), start_epoch=1)
    made = Exchange(spec, nn.Linear(100, 100, bias=False), 0)
    g = torch.randn(100, 100)
    for epoch in (0, 1):
        made.send(0, [g], epoch, epoch)
        made.ledger.steps += 1
    k, places = 100, math.ceil(100 * 14 / 8)
    totals = made.ledger.totals()
    assert totals["up"] == (40_000 + 4 * k + places) / 2
    assert totals["learner_receives"] == (40_000 + 4 * k + places + 4 + 1) / 2
    entropy = -0.01 * math.log2(0.01) - 0.99 * math.log2(0.99)
    assert totals["bound"] == pytest.approx((40_000 + (32 * k + 10_000 * entropy) / 8) / 2)
    assert totals["kept"] == pytest.approx(0.01)


@pytest.mark.parametrize(
    "kind, spec",
    [
        ("dgc", MomentumCorrectionSpec(momentum=0.5)),
        ("ef21_sgdm", EF21SGDMSpec(eta=0.25)),
    ],
)
def test_what_travels_dense_has_the_methods_momentum(kind, spec):
    """Warm-up epochs and vectors: the optimizer has no momentum there, so the method's is
    applied.
    """
    net = nn.Linear(3, 2)
    made = Exchange(
        Gradients(
            exchange="allgather",
            compressor=TopKSpec(ratio=0.5),
            feedback=spec,
            start_epoch=5,
        ),
        net,
        0,
    )
    want = torch.zeros(2, 3)
    for step, g in enumerate((torch.ones(2, 3), 2 * torch.ones(2, 3), torch.zeros(2, 3))):
        want = (0.5 * want + g) if kind == "dgc" else (torch.lerp(want, g, 0.25) if step else g)
        assert torch.allclose(made.send(0, [g], step, 0), want)
        assert torch.allclose(made.send(1, [g[:, 0]], step, 9), want[:, 0])


PERIODIC = {
    "grad.exchange": "allgather",
    "grad.feedback.kind": "ef",
    "grad.compressor.kind": "periodic",
    "grad.compressor.ratio": 0.1,
    "grad.compressor.every": 3,
}


def test_a_periodic_threshold_is_looked_for_every_n_messages():
    """By hand: |g + e| above the (k+1)-th largest of the message at the last look; what stays is
    remembered.
    """
    made = exchange(PeriodicSpec(ratio=0.1, every=3), ResidueSpec(), learners=2)
    draws = torch.Generator().manual_seed(0)
    residues, edges, kept = [torch.zeros(40, 30)] * 2, [0.0, 0.0], []
    for step in range(7):
        grads, merged = [torch.randn(40, 30, generator=draws) for _ in range(2)], []
        for learner, g in enumerate(grads):
            m = residues[learner] + g
            if step % 3 == 0:
                edges[learner] = m.abs().flatten().sort(descending=True).values[120]
            sent = torch.where(m.abs() > edges[learner], m, 0.0)
            residues[learner] = m - sent
            merged.append(sent)
            kept.append(int((sent != 0).sum()))
        assert torch.equal(made.send(0, grads, step, 0), (merged[0] + merged[1]) / 2)
    assert kept[:2] == kept[6:8] == [120, 120] and kept[2] != 120
    assert made.ledger.totals()["kept"] == pytest.approx(sum(kept) / 14 / 1200)


def test_a_periodic_threshold_outlives_a_checkpoint(store, tmp_path):
    run = override(tiny(epochs=2, eval_every=1), {"grad.learners": 2} | PERIODIC)
    straight, parts = execute(run, store, HOW), resumed(run, tmp_path / "parts")
    assert parts["metrics"] == straight["metrics"] and parts["gradients"] == straight["gradients"]


@pytest.mark.parametrize(
    "args, line",
    [
        (
            ["fwd.compressor.kind=topk", "fwd.feedback.kind=ef", "fwd.feedback.key=sample"],
            "fwd.feedback.kind=ef remembers",
        ),
        (
            [
                "fwd.compressor.kind=topk",
                "at.layer1.bwd.compressor.kind=topk",
                "at.layer1.bwd.feedback.kind=aqsgd",
            ],
            "at.layer1.bwd.feedback.kind=aqsgd remembers samples",
        ),
        (
            ["bwd.compressor.kind=lowrank"],
            "bwd.compressor.warm=true begins from the last message of all learners",
        ),
    ],
)
def test_ddp_refuses_what_processes_cannot_know(args, line, tmp_path, capsys):
    assert main(["ddp", "synthetic", *args, "--learners", "2", "--store", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"commsweep: {line}")


BOUNDARIES = {
    "randomk": {"fwd.compressor.kind": "randomk", "bwd.compressor.kind": "randomk"},
    "stochastic": {"fwd.compressor.kind": "uniform", "fwd.compressor.rounding": "stochastic"},
    # 122 samples: the last batch of 26 rows shifts the learners' shares, but not the slots they own
    "slots": METHODS["PowerSGD 2"]
    | {
        "fwd.compressor.kind": "topk",
        "fwd.feedback.kind": "ef",
        "bwd.compressor.kind": "topk",
        "bwd.feedback.kind": "ef21",
        "data.val_size": 38,
        "epochs": 2,
    },
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=SLOW) for name in ("randomk", "stochastic", "slots")]
)
def test_processes_compress_at_boundaries_as_the_simulation_does(name, store):
    run = override(tiny(epochs=1, eval_every=1), {"grad.learners": 2} | BOUNDARIES[name])
    (row,), simulated = ddp.execute([(run, LearnerWiring())], store, HOW), trained(run)
    assert row["weights"] == ddp.digest(simulated.model.state_dict())


@pytest.mark.slow
def test_cltk_hands_over_what_it_counts(store):
    run = override(tiny(epochs=1, eval_every=1), {"grad.learners": 2} | METHODS["CLT-k 1 %"])
    (row,) = ddp.execute([(run, LearnerWiring())], store, HOW)
    handed = sum(one["gradients"] for one in row["transport"])
    assert handed / row["steps"] / 2 == pytest.approx(row["gradients"]["up"], abs=1 * 30)


@pytest.mark.parametrize("word", ["topk:0.1", "uniform:4", "eden:2", "powersgd"])
def test_an_empty_parameter_travels_as_it_is(word):
    """Compressors of rows and scales have nothing to begin with."""
    net = nn.Linear(4, 3)
    net.register_parameter("empty", nn.Parameter(torch.zeros(0, 4)))
    spec = {"learners": 2, "compressor": word, "exchange": exchange_of(spelled(word))}
    exchange = Exchange(parse_gradients(spec), net, 0)
    grads = [[torch.ones_like(p) for p in net.parameters()] for _ in range(2)]
    arrived = exchange.begin(grads, 0, 0, range(3))()
    assert [arrived[at].shape for at in range(3)] == [p.shape for p in net.parameters()]
