"""Arms at equal FLOPs: planned to their share, and what the presets say of themselves."""

from __future__ import annotations

import pytest

from commsweep.config import override
from commsweep.registry import content, preset, sweep
from commsweep.sparsity import predicted_cost

PRESETS = content("experiments.sparse").PRESETS
mst = content("sweeps.mst")


@pytest.mark.parametrize(
    "name, seeds, least",
    [("demo-sparse", 3, 0.245), ("sparse-long", 3, 0.247), ("gpt2_mst", 3, 0.23)],
)
def test_every_arm_costs_its_share(name, seeds, least):
    runs = sweep(name)
    first = [run for run in runs if run.seed == 0]
    assert len(runs) == seeds * len(first)
    dense = mst.cost(first[0])
    for run in first[1:]:
        share = mst.cost(run) / dense
        level = run.sparsity.phases.get("ultra")
        if (
            run.model == first[0].model
            and not run.sparsity.sparse
            and run.fwd.compressor.kind != "none"
        ):
            assert share == 1
        elif level is not None and level.attention == "causal":
            assert share > 0.25  # attention alone differs
        elif run.grad.compressor.kind != "none":
            assert 0.22 < share <= 0.2515  # growth needs one learner's dense gradient only
        else:
            assert least <= share <= 0.2515, run.sparsity


def test_presets_cost_what_their_header_says():
    assert plan_of(preset("sotu_nano_mst"))["relative"] == pytest.approx(0.25, abs=0.001)
    assert plan_of(preset("gpt2_mst"))["relative"] == pytest.approx(0.25, abs=0.002)
    assert plan_of(preset("sotu_nano_counted"))["relative"] == 1
    assert {name.removeprefix("sotu_nano_") for name in PRESETS} >= {
        "static",
        "set",
        "rigl",
        "granet",
        "oneshot",
        "mst",
        "no_warmup",
        "no_ultra",
        "no_restore",
    }


def plan_of(run):
    return predicted_cost.of_run(run)


def test_a_share_that_no_sparsity_reaches_is_said():
    run = preset("sotu_nano_static")
    with pytest.raises(ValueError, match="even 0.999 costs more than"):
        mst.at_sparsity(run, mst.ALL, 0.01 * mst.cost(preset("sotu_nano_counted")))
    one = mst.at_sparsity(run, mst.ALL, 0.5 * mst.cost(preset("sotu_nano_counted")))
    more = override(one, {mst.ALL: one.sparsity.phases["all"].sparsity - 0.001})
    assert mst.cost(one) <= 0.5 * mst.cost(preset("sotu_nano_counted")) < mst.cost(more)
