"""The claims on a message's worth, over rows with known losses."""

from __future__ import annotations

import pandas as pd
import pytest
from matplotlib import pyplot as plt

from commsweep.registry import content
from commsweep.reporting import results
from commsweep.reporting.claim import EXPLORED
from commsweep.reporting.figure import KINDS
from commsweep.reporting.report_parts import all_claims
from sweeps import floor as grid
from tests.helpers import outcome

floor = content("analysis.floor")
BEFORE, AFTER = "2026-11-01T00:00:00+00:00", "2026-12-01T00:00:00+00:00"
HERE = {"processor": "here", "torch": "2"}
LOSSES = {
    "none": 2.0,
    "zero": 2.3,
    "mean": 2.31,
    "topk 0.1": 3.0,
    "ef": 2.8,
    "stochastic": 2.1,
    "nearest": 2.4,
}


def arm(run):
    """The name of a run's arm in `LOSSES`; None for others."""
    link = run.bwd
    if run.fwd.compressor.kind != "none":
        return None
    if link.feedback.kind == "ef":
        return "ef" if link.compressor.kind == "topk" else None
    if link.compressor.kind == "topk":
        return "topk 0.1" if link.compressor.ratio == 0.1 else None
    if link.compressor.kind == "uniform":
        return link.compressor.rounding
    return link.compressor.kind if link.compressor.kind in LOSSES else None


def world(when=AFTER, environments=(HERE,)):
    """Rows of floor_text; arms take turns in the environments."""
    rows, seen = [], {}
    for run in grid.floor_text():
        if (name := arm(run)) is None:
            continue
        place = seen.setdefault(name, len(seen)) % len(environments)
        loss = LOSSES[name] + 0.001 * ((7 * run.seed + len(name)) % 5)
        rows.append(
            outcome(
                run,
                metrics={"test_on_loss": loss, "test_off_loss": loss, "test_on_ppl": 9.0},
                when=when,
                environment=environments[place],
            )
        )
    return results.named(pd.DataFrame([results._flat(row) for row in rows]))


def test_claims_are_judged_by_the_control_and_say_whether_they_were_there_before():
    claims = {claim.name: claim for claim in all_claims(world(), ["floor"])}
    verdicts = {name: claim.verdict for name, claim in claims.items()}
    assert verdicts == {
        "Z1": "supported",
        "Z2": "supported",
        "Z3": "supported",
        "Z6": "supported",
        "Z7": "supported",
    }
    (tied, untied) = claims["Z1"].effects
    assert sum(tied.values) / 3 == pytest.approx(-0.7, abs=0.01) and len(untied.values) == 3
    gained = claims["Z2"].effects[0].values
    assert gained == pytest.approx([0.2 - 0.5 * 0.3] * 3, abs=0.01)
    assert claims["Z1"].origin == "registered, commit bacd491"
    for when in (BEFORE, None):
        (again, *_) = all_claims(world(when), ["floor"])
        assert again.origin == EXPLORED


def test_pairs_are_formed_within_one_environment():
    there = HERE | {"processor": "there"}
    frame = world(environments=(HERE, there))
    assert "Runs come from 2 environments" in results.mixed_surroundings(frame)
    assert not results.mixed_surroundings(world())
    values = {
        effect.what: len(effect.values)
        for claim in all_claims(frame, ["floor"])
        for effect in claim.effects
    }
    assert 0 in values.values() or len(values) < sum(
        len(claim.effects) for claim in all_claims(world(), ["floor"])
    )


def test_the_report_draws_the_worth_of_every_setting():
    frame = world()
    figure = KINDS["worth_kept"](frame, pd.DataFrame())
    assert figure is not None
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert (
        len(names)
        == frame.method.nunique()
        - frame.method.str.startswith("dense").groupby(frame.method).any().sum()
    )
    assert any(name.startswith("gradients: TopK 10 %") for name in names)
    plt.close(figure)
    without = frame[frame["bwd.compressor.kind"] != "zero"]
    assert KINDS["worth_kept"](without, pd.DataFrame()) is None and floor.rows(without).empty


def test_every_sweep_has_dense_and_its_control():
    for name, sweep in grid.SWEEPS.items():
        kinds = {}
        for run in sweep():
            training = (run.model, run.data, run.seed)
            kinds.setdefault(training, set()).add(run.bwd.compressor.kind)
        assert all({"none", "zero"} <= sent for sent in kinds.values()), name
