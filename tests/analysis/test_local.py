"""Claims L1 to L7 in made-up worlds: supported where they hold, contradicted where the opposite
does.
"""

from __future__ import annotations

import pytest

from commsweep.config import run_id
from commsweep.launching.launch import register
from commsweep.registry import content, sweep
from commsweep.reporting import results
from commsweep.reporting.claim import CONTRADICTED, PARTLY, SUPPORTED, adjust
from commsweep.store import Store
from tests.helpers import outcome, scatter

adacomp = content("analysis.adacomp")
local = content("analysis.local")


def fill(folder, loss):
    """A store of local_methods' runs with made-up losses."""
    store, runs = Store(folder), sweep("local_methods")
    register("local_methods", runs, store)
    for run in runs:
        value = loss(run) + (run.seed - 1) / 4000 + scatter(run)
        scores = {
            f"test_{mode}_{what}": one
            for mode in ("on", "off")
            for what, one in (("loss", value), ("ppl", 11.0 + value))
        }
        made = store.folder(run_id(run))
        made.begin(run, {})
        made.append(
            {"epoch": 1, "step": 10, "bytes": 99, "seconds": 1, "train_loss": 2.0, **scores}
        )
        made.finish(
            outcome(
                run,
                metrics=scores,
                bytes={"fwd_per_step": 1.0, "bwd_per_step": 1.0, "ratio": 1.0},
                gradients={
                    "up": 1000.0 / (run.grad.outer.interval if run.grad.outer else 1),
                    "rate": 10,
                },
            )
        )
    return results.load(store.root, "local_methods")


def good(run):
    grad = run.grad
    if grad.outer is None:
        return 2.42
    if run.fwd.compressor.kind != "none":
        return 2.6 if run.fwd.compressor.kind == "uniform" else 2.9
    if grad.outer.sign:
        return {"dct": 2.6, "hadamard": 2.6, None: 2.9}[grad.transform]
    if grad.compressor.kind == "topk":
        return 2.4 if grad.outer.interval == 1 else 2.8 if grad.outer.aggregate == "all" else 2.6
    if grad.compressor.kind == "uniform" and grad.compressor.bits == 2:
        return 2.7
    if grad.outer.interval == 100:
        return 3.0
    return (
        2.4 + 0.05 * (grad.learners > 1) + 0.05 * (grad.learners > 2) + 0.05 * (grad.learners > 4)
    )


def bad(run):
    """Each the other way round, about what the good world has at four learners."""
    middle = 2.5
    dense = (
        run.grad.outer is not None
        and run.grad.compressor.kind == "none"
        and run.grad.outer.interval == 10
    )
    if run.grad.compressor.kind in ("e3m0",) or (dense and run.grad.outer.overlap):
        return 2.8
    if run.grad.compressor.kind == "uniform" and run.grad.compressor.bits == 4:
        return 2.8
    return 2 * middle - good(run)


@pytest.mark.parametrize(("world", "verdict"), [(good, SUPPORTED), (bad, CONTRADICTED)])
def test_claims_follow_the_rows(world, verdict, tmp_path):
    frame = local.rows(fill(tmp_path, world))
    claims = adjust([claim(frame) for claim in local.CLAIMS])
    assert [claim.name for claim in claims] == [f"L{number}" for number in range(1, 9)]
    # each beside plain training with its own optimizer, whatever the world
    adamw, muon, uncompressed = claims[-1].effects
    assert "plain AdamW" in adamw.what and "plain Muon" in muon.what
    assert len(adamw.values) == len(muon.values) == len(uncompressed.values) == 3
    if world is good:
        assert adamw.values == pytest.approx([2.5 - 2.42] * 3)
    for claim in claims[:-1]:
        # a bad world may leave an effect of several as it was
        assert claim.verdict == verdict or (verdict, claim.verdict) == (CONTRADICTED, PARTLY)
        assert all(len(effect.values) == 3 and len(effect.ids) == 6 for effect in claim.effects), (
            claim
        )
    assert "bytes a step" in claims[1].effects[0].what


def test_the_table_goes_from_many_bytes_to_few_and_the_figure_is_drawn(tmp_path):
    frame = local.rows(fill(tmp_path, good))
    (table,) = local.tables(frame)
    assert len(table.rows) == 29 and all(row[2] == "3" for row in table.texts())
    sizes = [float(row[3].replace(",", "")) for row in table.texts() if row[3] != "-"]
    assert sizes == sorted(sizes, reverse=True)
    assert local.bytes_up(frame, frame) is not None
    assert local.bytes_up(frame.assign(status="missing"), frame) is None
    assert local.tables(frame.head(4)) and [claim(frame.head(4)) for claim in local.CLAIMS]
    assert adacomp.rows(frame).empty  # learners that exchange every step are another paper's
