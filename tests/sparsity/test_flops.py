"""FLOPs: torch's own counter, closed forms of the literature, plans against what ran."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from commsweep.config import Execution, override
from commsweep.config.sparsity import Sparsity
from commsweep.errors import UserError
from commsweep.registry import preset
from commsweep.sparsity import flops
from commsweep.sparsity.layers import survey
from commsweep.sparsity.predicted_cost import gpt2, network, of_run, planned, rows
from commsweep.training.run import build, execute
from tests.helpers import tiny, tiny_text

HOW = Execution("cpu")
SMALL = gpt2(12, 768, 12, 50304, 1024, "all")


@pytest.mark.parametrize(
    "run",
    [
        tiny_text(),
        tiny_text(model__gradient_checkpointing=True),
        tiny(),
        tiny_text(model__gradient_checkpointing=True, model__dropout=0.1),
        tiny(model__name="mlp", model__cuts=[]),
    ],
)
def test_a_dense_step_is_what_torch_counts(run):
    """Every product of a forward and a backward; attention without a fused kernel, with all pairs,
    as torch sees it.
    """
    parts = build(override(run, {"sparsity.drop_fraction": 0.1}), HOW)
    own, task = parts.task.components["sparsity"], parts.task
    x, y, samples = next(iter(parts.data.train))
    if own.network.attention is not None:
        task.model.config._attn_implementation = "eager"
    task.components["boundaries"].begin(0, samples)
    with FlopCounterMode(display=False) as counter:
        task.loss(task.logits(x), y).backward()
    square = own.network.attention and own.network.attention.tokens**2
    every = [one.numel for one in own.network.masked]
    assert counter.get_total_flops() == len(y) * sum(
        flops.step(own.network, every, square or 0.0).values()
    )


def test_gpt2_small_by_the_rule_of_the_literature():
    """6 N + 12 L H Q T: 741.52 + 113.25 MFLOP a token, N without positions; N has 19,200 norm
    weights, no products.
    """
    dense = flops.Account(SMALL).dense_step()
    linear, head, attention = (dense[part] / 1024 / 1e6 for part in ("linear", "head", "attention"))
    assert sum(one.numel for one in SMALL.products) == 84_934_656 + 38_633_472
    assert linear + head + 6 * 19_200 / 1e6 == pytest.approx(741.52, abs=0.01)
    square = 3 * SMALL.attention.forward(1024**2) / 1024 / 1e6
    assert square == pytest.approx(113.25, abs=0.01)
    whole = linear + head + square
    assert [round(100 * one / whole, 1) for one in (linear, head, square)] == [59.6, 27.1, 13.3]
    assert round(100 * linear / (linear + square), 1) == 81.8
    assert attention == pytest.approx(square * 1025 / 2048)


def test_with_a_dense_head_that_is_counted_a_quarter_cannot_be_reached():
    spec = Sparsity(
        phases={"all": {"until": 1, "sparsity": 0.99, "attention": "strided"}}, drop_fraction=0.0
    )
    dense_head = gpt2(12, 768, 12, 50304, 1024, "blocks")
    made = planned(spec, dense_head, 10)
    assert made["relative"] > 0.25 > made["relative_without_head"] and made["head_share"] > 0.27


@pytest.mark.parametrize(
    "sparsity, published", [(0.5, 0.5017), (0.8, 0.2026), (0.9, 0.1030), (0.95, 0.0531)]
)
def test_rigls_overhead(sparsity, published):
    """(3 f_S dT + 2 f_S + f_D) / (dT + 1) of a dense step's 3 f_D, at dT = 100."""
    net = flops.NetworkShape(
        tuple(flops.Product(f"{i}", (100, 1000), 100_000, 1) for i in range(3))
    )
    live = [round(100_000 * (1 - sparsity))] * 3
    plain, growing = flops.step(net, live, 0.0), flops.step(net, live, 0.0, [True] * 3)
    dense = sum(flops.step(net, [100_000] * 3, 0.0).values())
    assert round((100 * sum(plain.values()) + sum(growing.values())) / 101 / dense, 4) == published


def test_the_sizes_of_a_plan_are_those_of_the_model():
    for changes in (
        {},
        {"model.width": 32},
        {"model.gradient_checkpointing": True},
        {"model.gradient_checkpointing": True, "model.dropout": 0.1},
        {"sparsity.modules": "all"},
    ):
        run = override(tiny_text(), {"sparsity.drop_fraction": 0.1} | changes)
        parts = build(run, HOW)
        made, _ = survey(parts.task.model, parts.data.example, run.sparsity.modules)
        assert made == network(run)


MOVING = {
    "sparsity.phases.warmup.until": 0.3,
    "sparsity.phases.warmup.sparsity": 0.9,
    "sparsity.phases.warmup.shape": "linear",
    "sparsity.phases.ultra.until": 0.8,
    "sparsity.phases.ultra.sparsity": 0.9,
    "sparsity.phases.ultra.attention": "local_strided",
    "sparsity.phases.all": None,
    "sparsity.phases.end.until": 1,
    "sparsity.width": 8,
    "sparsity.interval": 2,
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sparsity.growth": "mixed", "sparsity.restart": True},
        {"sparsity.growth": "random", "sparsity.modules": "all"},
        {"grad.learners": 4},
        {"microbatches": 2},
        {"data.train_blocks": 60},
        {"grad.learners": 4, "grad.compressor.kind": "live"},
    ],
)
def test_a_plan_is_what_the_run_then_counts(changes, store):
    run = override(tiny_text(), MOVING | changes)
    row = execute(run, store, HOW)
    assert row["status"] == "finished", row["error"]
    want = of_run(run)
    assert row["flops"] == pytest.approx(want, rel=1e-12) and 0.3 < want["relative"] < 0.8
    assert row["flops"]["total"] == pytest.approx(sum(row["flops"][part] for part in flops.PARTS))


def test_a_plan_of_what_cannot_be_planned_is_one_line():
    with pytest.raises(UserError, match="FLOPs are planned for GPT-2 from scratch"):
        network(preset("digits"))
    with pytest.raises(UserError, match="give --steps"):
        rows(preset("sotu_micro"))


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4), data=st.data())
def test_phases_cost_the_mean_of_their_densities(lengths, data):
    """F = sum over phases of T_i / T (share of the linear layers x density + share of attention x
    its pairs).
    """
    steps, kinds = sum(lengths), ("causal", "local", "fixed")
    levels = [data.draw(st.integers(0, 99)) / 100 for _ in lengths]
    attends = [data.draw(st.sampled_from(kinds)) for _ in lengths]
    ends = [sum(lengths[: at + 1]) / steps for at in range(len(lengths))]
    ends[-1] = 1.0
    spec = Sparsity(
        phases={
            f"p{n}": {"until": end, "sparsity": level, "attention": kind}
            for n, (end, level, kind) in enumerate(zip(ends, levels, attends, strict=True))
        },
        drop_fraction=0.0,
        growth="random",
        width=16,
    )
    net = gpt2(2, 64, 4, 256, 64)
    made, dense = planned(spec, net, steps), flops.Account(net).dense_step()
    whole, causal = sum(dense.values()), flops.pairs("causal", 64, 16)
    # steps with the masks of each phase: they move in the backward of its first step
    masked = list(lengths)
    masked[0] += 1
    masked[-1] -= 1
    want = sum(
        m / steps * dense["linear"] * (1 - level)
        + n / steps * dense["attention"] * flops.pairs(kind, 64, 16) / causal
        for m, n, level, kind in zip(masked, lengths, levels, attends, strict=True)
    )
    want = (want + dense["head"]) / whole
    assert made["relative"] - made["topology"] / made["dense"] == pytest.approx(want, abs=2e-4)
