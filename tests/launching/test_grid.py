"""Grids are finite lists of distinct Runs; law 9: every preset and every sweep executes at toy
size.
"""

from __future__ import annotations

import pytest
import torch

from commsweep.compressors import build
from commsweep.compressors.sparse import budget
from commsweep.config import Execution, Run, record, run_id
from commsweep.errors import UserError
from commsweep.launching.grid import product, seeds, union
from commsweep.registry import content, preset, presets, sweep, sweeps
from commsweep.training.run import execute
from tests.helpers import toy

rudakov_text = content("sweeps.rudakov_text")


def test_product_is_every_combination_and_joined_axes_move_together():
    runs = product(
        Run(),
        {
            "fwd.compressor.kind+bwd.compressor.kind": ("topk",),
            "fwd.compressor.ratio+bwd.compressor.ratio": (0.1, 0.2),
            "seed": (0, 1, 2),
        },
    )
    assert [(r.fwd.compressor.ratio, r.bwd.compressor.ratio, r.seed) for r in runs] == [
        (a, a, s) for a in (0.1, 0.2) for s in (0, 1, 2)
    ]


def test_union_keeps_order_and_drops_repeats_and_seeds_come_seed_by_seed():
    a, b = product(Run(), {"epochs": (10, 20)})
    assert union([a, b], [b, a]) == [a, b]
    assert [(r.epochs, r.seed) for r in seeds([a, b], 2, first=5)] == [
        (10, 5),
        (20, 5),
        (10, 6),
        (20, 6),
    ]


def test_an_unknown_axis_or_sweep_is_named():
    with pytest.raises(UserError, match="did you mean 'epochs'"):
        product(Run(), {"epoch": (1,)})
    with pytest.raises(UserError, match="did you mean 'demo'"):
        sweep("demos")


@pytest.mark.parametrize("name", sweeps())
def test_a_sweep_names_each_run_once_with_several_seeds(name):
    runs = sweep(name)
    assert len({run_id(run) for run in runs}) == len(runs)
    assert (
        name.startswith("smoke")
        or name in ("finetune", "local_tuning", "text_scale_rates")
        or len({run.seed for run in runs}) >= 3
    )


def test_the_papers_grid_is_complete():
    runs = sweep("resnet18_paper")
    levels = {run.fwd.compressor.ratio for run in runs if run.fwd.compressor.kind == "topk_strict"}
    assert levels == {0.5, 0.3, 0.2, 0.1, 0.05, 0.02}
    assert {run.fwd.feedback.kind for run in runs} == {"none", "ef", "ef_mixed", "ef21", "aqsgd"}
    assert all(
        run.schedule.t_max == 200 and run.epochs == 100 and run.data.val_size == 0 for run in runs
    )
    assert all(
        run.schedule.t_max == 100 and run.data.val_size == 5000
        for run in sweep("resnet18_corrected")
    )


def distinct(runs):
    """One toy run for each way the runs compress, feed back, augment or cast."""
    return list({run_id(toy(run)): toy(run) for run in runs}.values())


@pytest.mark.parametrize("name", presets())
@pytest.mark.sampled(6)
def test_every_preset_executes_at_toy_size(name, store):
    assert execute(toy(preset(name)), store, Execution("cpu"))["status"] == "finished"


@pytest.mark.parametrize(
    "name",
    [
        "gpt2_aqsgd",
        "finetune",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in (
                "smoke",
                "smoke-text",
                "demo",
                "gpt2_paper",
                "demo-gradients",
                "resnet18_paper",
                "resnet18_corrected",
                "smoke-bias",
                "smoke-recipe",
                "smoke-local",
            )
        ),
    ],
)
def test_every_sweep_executes_at_toy_size(name, store):
    # The other sweeps are parts of these or differ in their base run only, as the tests below hold.
    for run in distinct(sweep(name)):
        row = execute(run, store, Execution("cpu"))
        assert row["status"] in ("finished", "diverged"), row["error"]
        assert row["run"] == record(run)


def test_the_partial_sweeps_are_parts_of_the_whole():
    whole = {run_id(run) for run in sweep("resnet18_paper")}
    for name in sweeps():
        if name.startswith("resnet18_") and not name.startswith(
            ("resnet18_co", "resnet18_short", "resnet18_paper_bf16")
        ):
            assert {run_id(run) for run in sweep(name)} <= whole


@pytest.mark.parametrize("name", ["resnet18_paper", "resnet18_corrected", "gpt2_paper"])
def test_sweeps_in_bfloat16_differ_in_nothing_else(name):
    fast = sweep(f"{name}_bf16")
    assert {run.precision for run in fast} == {"bfloat16"}
    slow = [run.model_copy(update={"precision": "float32"}) for run in fast]
    assert [run_id(run) for run in slow] == [run_id(run) for run in sweep(name)]


def test_the_core_on_a_gpu_is_what_the_issue_of_a_lent_hour_asks_and_named_a_copy():
    runs = sweep("resnet18_core_jpeg")
    assert {run.data.name for run in runs} == {"cifar10-jpeg"} and {
        run.precision for run in runs
    } == {"bfloat16"}
    # seed after seed: any part is a whole grid
    assert [run.seed for run in runs] == sorted(run.seed for run in runs)
    assert len(runs) == 3 * 18 and runs[0].fwd.compressor.kind == "none"


def test_text_sweeps_ask_the_same_of_every_model():
    """demo-text and gpt2_matched use the smoke sweep's methods, which are executed above."""
    kinds = {(r.fwd.compressor.kind, r.bwd.compressor.kind) for r in sweep("smoke-text")}
    for name in ("demo-text", "gpt2_matched"):
        assert {(r.fwd.compressor.kind, r.bwd.compressor.kind) for r in sweep(name)} <= kinds


def test_sweeps_of_findings_ask_what_the_smoke_sweeps_ask():
    """text_bias and cifar_bias vary bits and scales of smoke-bias's codes; the recipes' links are
    smoke-recipe's.
    """

    def kinds(name):
        return {
            (
                r.fwd.compressor.kind,
                r.fwd.feedback.kind,
                r.bwd.compressor.kind,
                r.bwd.feedback.kind,
                r.grad.compressor.kind,
            )
            for r in sweep(name)
        }

    for name in ("text_bias", "cifar_bias", "cifar_bias_jpeg"):
        assert {one for one in kinds(name) if one[0] != "uniform"} <= kinds("smoke-bias")
    for name in ("text_recipe", "cifar_recipe", "cifar_recipe_jpeg"):
        assert kinds(name) <= kinds("smoke-recipe")
    assert {run_id(run) for run in sweep("cifar_small_jpeg")}.isdisjoint(
        run_id(run) for run in sweep("cifar_small")
    )


def test_methods_that_train_apart_are_those_of_the_smoke_sweep():
    """demo-local, local_methods and local_tuning vary seeds, rates and learners of smoke-local's
    methods.
    """

    def asked(name):
        return {
            run.grad.model_copy(
                update={
                    "learners": 4,
                    "outer": run.grad.outer and run.grad.outer.model_copy(update={"rate": 1.0}),
                }
            )
            for run in sweep(name)
            if run.grad.outer
        }

    for name in ("demo-local", "local_methods", "local_tuning"):
        assert asked(name) <= asked("smoke-local")


def test_gradient_sweeps_ask_the_same_of_every_model():
    """smoke-gradients and cifar_gradients use demo-gradients' methods, which are executed above."""

    def asked(name):
        return {run.grad.model_copy(update={"learners": 1}) for run in sweep(name)}

    for name in ("smoke-gradients", "cifar_gradients"):
        assert asked(name) <= asked("demo-gradients")


@pytest.mark.parametrize(
    "base,width", [("sotu_nano", 64), ("sotu_micro", 192), ("gpt2_scratch", 768)]
)
def test_byte_matched_arms_cost_the_same(base, width):
    """An eighth of the dense bytes, both ways together; the formulas are held equal to real
    payloads elsewhere.
    """
    run = preset(base)
    shape = torch.Size([run.data.batch_size, run.data.block_size, width])
    dense = 2 * shape.numel() * 4
    arms = rudakov_text.matched(run, width)
    assert len(arms) == 10
    for arm in arms:
        fwd = build(arm.fwd.compressor).formula_bytes(shape, torch.float32)
        if arm.bwd.compressor.kind == "forward_mask":  # the values again
            rows = 1 if arm.fwd.compressor.scope == "sample" else run.data.block_size
            bwd = (
                run.data.batch_size
                * rows
                * budget(arm.fwd.compressor.ratio, shape[1:].numel() // rows)
                * 4
            )
        elif arm.fwd.compressor.kind in ("bottleneck", "subspace"):
            bwd = fwd
        else:
            bwd = build(arm.bwd.compressor).formula_bytes(shape, torch.float32)
        assert 0.92 * dense / 8 <= fwd + bwd <= 1.01 * dense / 8 or (
            width == 64 and 0.88 * dense / 8 <= fwd + bwd <= dense / 8
        ), arm  # whole entries of a narrow token
