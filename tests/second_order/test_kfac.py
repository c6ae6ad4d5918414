"""K-FAC: factors against naive loops in float64, the solve against Kronecker products, learners,
processes, resumes.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from commsweep.config import Execution, override, record, run_id
from commsweep.config.execution import LearnerWiring
from commsweep.config.second_order import KFAC
from commsweep.errors import UserError
from commsweep.processes import ddp
from commsweep.registry import preset
from commsweep.second_order import factors
from commsweep.second_order.layer import KFACLayer
from commsweep.second_order.preconditioner import Preconditioner, memory_bytes
from commsweep.store import Store
from commsweep.training.run import build, execute, trainer
from tests.helpers import linked, tiny, tiny_text

HOW = Execution("cpu")


class Conv1D(nn.Module):
    """transformers' layer: y = x W + b, W [in, out]."""

    def __init__(self, out, into):
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.randn(into, out)),
            nn.Parameter(torch.zeros(out)),
        )

    def forward(self, x):
        return x @ self.weight + self.bias


LAYERS = {
    "linear": (lambda: nn.Linear(5, 3), (4, 5)),
    "without bias": (lambda: nn.Linear(5, 3, bias=False), (4, 5)),
    "sequence": (lambda: nn.Linear(5, 3), (4, 6, 5)),
    "conv1d": (lambda: Conv1D(3, 5), (4, 6, 5)),
    "conv": (lambda: nn.Conv2d(2, 3, 3), (4, 2, 6, 7)),
    "conv, every option": (
        lambda: nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2), bias=False),
        (4, 2, 7, 8),
    ),
}


def naive(module, x, target, sharing):
    """A and G by loops over samples and positions, from each sample's own loss."""
    a_sum = g_sum = 0
    for one, aim in zip(x, target, strict=True):
        y = module(one[None])
        loss = ((y - aim[None]) ** 2).sum()
        (slope,) = torch.autograd.grad(loss, y)
        if isinstance(module, nn.Conv2d):
            padded = nn.functional.pad(
                one[None], [p for side in reversed(module.padding) for p in (side, side)]
            )[0]
            rows = []
            (sh, sw), (dh, dw), (kh, kw) = module.stride, module.dilation, module.kernel_size
            for i in range(y.shape[2]):
                for j in range(y.shape[3]):
                    rows.append(
                        torch.stack(
                            [
                                padded[c, i * sh + u * dh, j * sw + v * dw]
                                for c in range(len(padded))
                                for u in range(kh)
                                for v in range(kw)
                            ]
                        )
                    )
            a, g = torch.stack(rows), slope[0].flatten(1).T
        else:
            a, g = one.reshape(-1, one.shape[-1]), slope[0].reshape(-1, slope.shape[-1])
        if module.bias is not None:
            a = torch.cat([a, torch.ones(len(a), 1, dtype=a.dtype)], 1)
        if sharing == "reduce":
            a, g = a.mean(0, keepdim=True), g.sum(0, keepdim=True)
        a_sum = a_sum + sum(torch.outer(row, row) for row in a) / len(a)
        g_sum = g_sum + sum(torch.outer(row, row) for row in g)
    return a_sum / len(x), g_sum / len(x)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("name", LAYERS)
def test_factors_equal_naive_loops_in_float64(name, sharing):
    make, shape = LAYERS[name]
    module, x = make().double(), torch.randn(shape, dtype=torch.float64)
    target = torch.randn_like(module(x))
    want_a, want_g = naive(module, x, target, sharing)
    y = module(x)
    loss = ((y - target) ** 2).flatten(1).sum(1).mean()
    (slope,) = torch.autograd.grad(loss, y)
    a = factors.input_factor(factors.inputs(module, x), module.bias is not None, sharing)
    g = factors.output_factor(factors.slopes(module, slope), len(x), sharing)
    assert torch.allclose(a, want_a, rtol=1e-12, atol=1e-12) and torch.allclose(
        g, want_g, rtol=1e-12, atol=1e-12
    )
    assert factors.sizes(module) == (len(a), len(g))
    assert factors.packed(a).numel() == len(a) * (len(a) + 1) // 2
    assert torch.equal(
        factors.unpacked(factors.packed(a), len(a)), torch.tril(a) + torch.tril(a, -1).T
    )


def test_one_datum_is_exact():
    """For a batch of one the Fisher's block is the product of the factors."""
    module, x = nn.Linear(4, 3).double(), torch.randn(1, 4, dtype=torch.float64)
    y = module(x)
    (slope,) = torch.autograd.grad(nn.functional.cross_entropy(y, torch.tensor([1])), y)
    a = factors.input_factor(factors.inputs(module, x), True, "expand")
    g = factors.output_factor(factors.slopes(module, slope), 1, "expand")
    grad = torch.outer(slope[0], torch.cat([x[0], torch.ones(1, dtype=torch.float64)]))
    assert torch.allclose(torch.kron(g, a), torch.outer(grad.flatten(), grad.flatten()))


@pytest.mark.parametrize(
    "method, split", [("inverse", "direct"), ("inverse", "factored"), ("eigen", "factored")]
)
@pytest.mark.parametrize(
    "make", [lambda: nn.Linear(5, 3), lambda: nn.Conv2d(2, 3, 2), lambda: Conv1D(3, 5)]
)
def test_the_preconditioned_gradient_is_the_explicit_kronecker_solve(make, method, split):
    module, spec = make().double(), KFAC(method=method, split=split, damping=0.1)
    layer = KFACLayer("it", module).double()
    roots = [torch.randn(d, d, dtype=torch.float64) for d in factors.sizes(module)]
    layer.a.copy_(roots[0] @ roots[0].T)
    layer.g.copy_(roots[1] @ roots[1].T)
    before, layer.taken = (layer.a.clone(), layer.g.clone()), 1.0
    invert(layer, spec)
    # damping is never written into them
    assert torch.equal(before[0], layer.a) and torch.equal(before[1], layer.g)
    for p in module.parameters():
        p.grad = torch.randn_like(p)
    grad = layer.gradient()
    a, g = before
    pi = torch.sqrt((a.trace() / len(a)) / (g.trace() / len(g)))
    eye_a, eye_g = (torch.eye(len(m), dtype=torch.float64) for m in before)
    if method == "eigen":
        fisher = torch.kron(g, a) + 0.1 * torch.eye(len(a) * len(g), dtype=torch.float64)
    elif split == "direct":
        fisher = torch.kron(g + 0.1 * eye_g, a + 0.1 * eye_a)
    else:
        fisher = torch.kron(g + 0.1**0.5 / pi * eye_g, a + 0.1**0.5 * pi * eye_a)
    want = torch.linalg.solve(fisher, grad.flatten()).reshape(grad.shape)
    made = layer.preconditioned(grad, spec)
    assert torch.allclose(made, want, rtol=1e-8)
    layer.write(made)
    assert torch.allclose(layer.gradient(), want, rtol=1e-8)


def invert(layer, spec):
    for side in "ag":
        layer.install(side, layer.inverse(side, spec), 0)


def test_eigenvalues_that_do_not_converge_are_looked_for_in_float64(monkeypatch):
    layer, spec = KFACLayer("it", nn.Linear(5, 3)), KFAC(method="eigen")
    layer.a.copy_(torch.eye(6))
    layer.taken, plain, types = 1.0, torch.linalg.eigh, []

    def eigh(matrix):
        types.append(matrix.dtype)
        if matrix.dtype is torch.float32:
            raise torch.linalg.LinAlgError("failed to converge")
        return plain(matrix)

    monkeypatch.setattr(torch.linalg, "eigh", eigh)
    values, vectors = layer.inverse("a", spec)
    assert types == [torch.float32, torch.float64] and values.dtype is torch.float32
    assert torch.allclose((vectors * values) @ vectors.T, torch.eye(6))


def seen(run):
    """The preconditioner after one step, and the parameters' gradients then."""
    parts = build(run, HOW)
    one = parts.task.components["kfac"]
    trainer(run, parts, [], False).fit(parts.task, parts.data.train, [])
    return one, parts


def test_the_mean_of_the_learners_factors_is_the_factor_of_the_whole_batch():
    """A text model has no batch statistics, so its layers see the same; the first step's
    factors.
    """
    made = []
    for learners in (1, 4):
        run = tiny_text(
            epochs=1,
            data__train_blocks=8,
            optim__kind="sgd",
            optim__lr=1e-9,
            kfac__damping=0.1,
            **{"grad__learners": learners},
        )
        made.append(seen(run)[0])
    for one, four in zip(made[0].layers, made[1].layers, strict=True):
        assert torch.allclose(one.a, four.a, rtol=1e-4, atol=1e-7)
        assert torch.allclose(one.g, four.g, rtol=1e-3, atol=1e-9)


def test_infinite_damping_is_the_gradient_up_to_scale():
    module = nn.Linear(5, 3)
    layer = KFACLayer("it", module)
    layer.a.copy_(torch.eye(6))
    layer.g.copy_(torch.eye(3))
    layer.taken = 1.0
    invert(layer, KFAC(damping=1e6, split="direct"))
    grad = torch.randn(3, 6)
    made = layer.preconditioned(grad, KFAC())
    assert torch.allclose(made / made.norm(), grad / grad.norm(), atol=1e-5)


def test_a_gpt2s_head_is_left_to_the_optimizer_and_counted():
    one, parts = seen(tiny_text(epochs=1, kfac__damping=0.1))
    assert one.left == ["transformer.wte", "transformer.wpe", "lm_head"]
    assert [layer.name for layer in one.layers][:2] == [
        "transformer.h.0.attn.c_attn",
        "transformer.h.0.attn.c_proj",
    ]
    need = memory_bytes(parts.task.run.kfac, parts.task.model, 1)
    held = sum(4 * b.numel() for b in one.layers.buffers() if b.dim())
    assert held <= need <= 2 * held


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kfac__method": "eigen", "kfac__inverses_every": 2, "kfac__factors_every": 3},
        {
            "grad__learners": 2,
            "grad__exchange": "allgather",
            "grad__compressor__kind": "topk",
            "grad__feedback__kind": "ef",
        },
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one(changes, tmp_path):
    run = linked(
        {"kind": "topk", "ratio": 0.3},
        None,
        {"kind": "ef"},
        kfac__damping=0.1,
        epochs=2,
        eval_every=1,
        **changes,
    )
    straight = execute(run, Store(tmp_path / "a"), HOW)
    assert straight["status"] == "finished", straight["error"]
    assert straight["run"] == record(run) and straight["kfac"]["factors"] > 0
    asked = iter((True,))
    with pytest.raises(KeyboardInterrupt):
        execute(
            run, Store(tmp_path / "b"), Execution("cpu", checkpoint_every=0), lambda: next(asked)
        )
    resumed = execute(run, Store(tmp_path / "b"), HOW)
    assert resumed["metrics"] == straight["metrics"] and resumed["kfac"] == straight["kfac"]


CODED = {
    "kfac.compressor.kind": "uniform",
    "kfac.compressor.bits": 8,
    "kfac.compressor.scale": "group",
    "kfac.feedback.kind": "ef",
}


@pytest.mark.slow
def test_processes_equal_the_simulation_bit_for_bit(store):
    """Whatever is placed and fused how; both methods, coded factors, owners, sampled labels."""
    torch.set_num_threads(1)
    base = tiny(
        epochs=1,
        eval_every=1,
        grad__learners=4,
        kfac__damping=0.1,
        kfac__inverses_every=2,
        model__cuts=[],
        data__val_size=64,
    )
    wires = [
        LearnerWiring(fusion="after", placement="everywhere"),
        LearnerWiring(fusion="layer", placement="spread"),
        LearnerWiring(fusion="threshold", buffer=5000, placement="balanced", small=40),
        LearnerWiring(fusion="pipelined", placement="shared", fraction=0.5),
        LearnerWiring(placement="shared", fraction=0.25),
        LearnerWiring(placement="shared", fraction=1.0),
    ]
    wanted = [(base, wiring) for wiring in wires]
    others = [
        CODED,
        {"kfac.method": "eigen"},
        {"kfac.statistics": "owner"},
        {"kfac.fisher": "sampled"},
    ]
    wanted += [
        (override(base, one), LearnerWiring(placement="spread", fusion="layer")) for one in others
    ]
    rows = ddp.execute(wanted, store, HOW)
    want = {}
    for (run, wiring), row in zip(wanted, rows, strict=True):
        if run_id(run) not in want:
            parts = build(run, HOW)
            trainer(run, parts, [], False).fit(
                parts.task, parts.data.train, parts.data.val_dataloader()
            )
            want[run_id(run)] = (
                ddp.digest(parts.task.model.state_dict()),
                parts.task.totals()["kfac"],
            )
        weights, totals = want[run_id(run)]
        assert row["weights"] == weights, (run.kfac, wiring)
        assert row["kfac"] == totals and row["run"] == record(run)
        sent = [one.get("factors", 0) for one in row["transport"]]
        assert sent[0] == row["kfac"]["factors_up"] * row["steps"] and len(set(sent)) == 1
        assert (row["timing"]["framing"][0] > 0) == (run.kfac.compressor.kind != "none")
        handed = sum(one.get("inverses", 0) for one in row["transport"])
        if wiring.placement == "spread" and run.kfac.statistics == "all":
            assert handed == pytest.approx(row["kfac"]["inverses_spread"] * row["steps"])
        gradients = sum(one.get("preconditioned", 0) for one in row["transport"])
        assert (
            gradients == row["kfac"]["preconditioned"] * row["steps"]
            or wiring.placement == "shared"
        )
    # and what changes the result, does
    assert len({weights for weights, _ in want.values()}) == len(want)
    groups = [row["timing"]["groups"] for row in rows]
    assert (
        groups[0] is None
        and all(len(group) == 1 for group in groups[1])
        and 1 < len(groups[2]) < len(groups[1])
    )


def test_it_learns_and_absent_it_changes_nothing(store):
    assert (
        execute(tiny(epochs=6, schedule__t_max=6, eval_every=6, kfac__damping=0.1), store, HOW)[
            "metrics"
        ]["test_on_acc"]
        > 0.7
    )
    assert "kfac" not in record(preset("digits")) and run_id(
        override(preset("digits_kfac"), {"kfac": "null", "grad.learners": 1})
    ) == run_id(override(preset("digits"), {"model.cuts": []}))


def test_a_factor_that_is_not_finite_is_an_outcome_with_the_layers_name(store, monkeypatch):
    original = factors.input_factor
    calls = []

    def poisoned(a, bias, sharing):
        calls.append(1)
        made = original(a, bias, sharing)
        # the third layer's, in the first step
        return made * float("nan") if len(calls) == 3 else made

    monkeypatch.setattr(factors, "input_factor", poisoned)
    row = execute(tiny(kfac__damping=0.1), store, HOW)
    assert (
        row["status"] == "diverged"
        and "a factor of layer layer1.0.conv2 that is not finite" in row["error"]
    )


@pytest.mark.parametrize(
    "changes, line",
    [
        (
            {"kfac.inverses_every": 0},
            "kfac.inverses_every=0: input should be greater than or equal to 1",
        ),
        ({"kfac.damping": -1}, "kfac.damping=-1"),
        ({"kfac.dampng": 1}, "did you mean 'kfac.damping'"),
        ({"kfac.start_epoch": 9}, "kfac.start_epoch=9: the run has 2 epochs"),
        ({"kfac.damping": 1, "microbatches": 2}, "kfac does not go with microbatches=2"),
        ({"kfac.damping": 1, "grad.local_steps": 2}, "kfac does not go with grad.local_steps=2"),
    ],
)
def test_settings_that_do_not_fit_are_one_line(changes, line):
    with pytest.raises(UserError, match=line):
        override(tiny(), changes)


def test_a_model_without_a_supported_layer_is_refused():
    with pytest.raises(UserError, match="kfac: the model has no layer that it supports"):
        Preconditioner(KFAC(), nn.Sequential(nn.Conv2d(4, 4, 3, groups=2), nn.BatchNorm2d(4)), 1)
    with pytest.raises(UserError, match="at most kfac.max_factor=2 rows"):
        build(tiny(kfac__max_factor=2), HOW)


def test_eigenvectors_that_are_no_numbers_are_found_in_float64(monkeypatch):
    """LAPACK answers with NaN in float32 for some factors with many equal eigenvalues."""
    decompose = torch.linalg.eigh

    def nan_in_float32(x):
        values, vectors = decompose(x)
        return values, vectors * torch.nan if x.dtype == torch.float32 else vectors

    monkeypatch.setattr(torch.linalg, "eigh", nan_in_float32)
    layer = KFACLayer("fc", torch.nn.Linear(6, 4, bias=False))
    sample = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    layer.a.copy_(sample @ sample.mT)
    layer.taken = 1.0
    values, vectors = layer.inverse("a", KFAC(method="eigen"))
    assert vectors.dtype == values.dtype == torch.float32
    torch.testing.assert_close((vectors * values) @ vectors.mT, layer.a)
