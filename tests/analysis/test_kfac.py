"""Tables and claims of K-FAC over made-up runs whose truth is known."""

from __future__ import annotations

import pytest

from commsweep.config import labels, record, run_id
from commsweep.config.run import SCHEMA
from commsweep.launching.launch import register
from commsweep.registry import content, sweep
from commsweep.reporting import report_parts, results
from tests.helpers import scatter

kfac = content("analysis.kfac")
FACTORS = content("sweeps.kfac").FACTORS
RATES = content("sweeps.kfac").RATES


def fill(store, quality, pace, outcome=lambda run: "finished"):
    """Rows of demo-kfac that end at quality(run), and reach 0.96 in epoch pace(run)."""
    runs = sweep("demo-kfac")
    register("demo-kfac", runs, store)
    for run in runs:
        final = quality(run) + 0.0001 * run.seed + scatter(run)
        status = outcome(run)
        folder = store.folder(run_id(run))
        folder.begin(run, {})
        for epoch in range(1, run.epochs + 1):
            score = final if epoch >= pace(run) else 0.5
            folder.append(
                {"epoch": epoch, "step": 10 * epoch, "test_on_acc": score, "test_on_loss": 1.0}
            )
        metrics = {
            f"{part}_{mode}_{name}": value
            for part in ("test", "val")
            for mode in ("on", "off")
            for name, value in (("acc", final), ("loss", 1.0))
        }
        kind = run.kfac and run.kfac.compressor.kind
        up = (
            0.0
            if run.kfac is None or run.kfac.statistics == "owner"
            else {"none": 4e5, "cast": 2e5}.get(kind, 1e5)
        )
        folder.finish(
            {
                "schema": SCHEMA,
                "id": run_id(run),
                "status": status,
                "error": None,
                "run": record(run),
                "steps": 80,
                "seconds": {"train": 8.0 if run.kfac is None else 12.0},
                "bytes": {},
                "speed": {},
                "metrics": metrics if status == "finished" else {},
                "gradients": {"up": 1e5, "rate": 1.0},
                **(
                    {}
                    if run.kfac is None
                    else {"kfac": {"factors_up": up, "inverses_balanced": 2e5}}
                ),
            }
        )
    frame = results.load(store.root, "demo-kfac")
    return frame, results.curves(store.root, list(frame.id[frame.status == "finished"]))


def best_at(run):
    """Tuned at the middle rate."""
    return 0.98 - 0.05 * (run.optim.lr != RATES[1])


def test_claims_and_targets_follow_the_rows(store):
    frame, curves = fill(store, best_at, lambda run: 3 if run.kfac else 5 + run.seed % 2)
    claim = kfac.k4(frame, curves)
    assert claim.verdict == "supported"
    assert claim.effects[0].values == [2.0, 3.0, 2.0, 3.0, 2.0]
    assert {one.name: one.verdict for one in report_parts.all_claims(frame)} == {"K5": "supported"}
    table = kfac.target_table(frame, curves)
    rows = {tuple(row[:2]): row for row in table.rows}
    assert set(rows) == {
        (model, way) for model in ("mlp", "resnet_small") for way in ("SGD", "K-FAC")
    }
    assert rows["mlp", "K-FAC"][2] == f"{RATES[1]:g}"
    steps = 3 * 80 / 8
    assert rows["mlp", "K-FAC"][6:10] == [
        f"{steps:.0f}",
        f"{steps * 0.1:.2f}",
        f"{steps * 0.4:.2f}",
        f"{steps * 0.2:.2f}",
    ]
    # A step on 4 learners: 12 s / 80 / 4; over 1 Gbit/s a ring of 1.5 x 500 kB, and 200 kB of
    # inverses.
    assert rows["mlp", "K-FAC"][10] == f"{steps * (12 / 320 + 8e-9 * (1.5 * 5e5 + 2e5)):.2f}"


def test_opposite_rows_contradict(store):
    def quality(run):
        return best_at(run) - 0.1 * (run.kfac is not None and run.kfac.compressor.kind == "uniform")

    frame, curves = fill(store, quality, lambda run: 5 if run.kfac else 3)
    assert kfac.k4(frame, curves).verdict == "contradicted"
    assert report_parts.all_claims(frame)[0].verdict == "contradicted"


def test_a_factor_that_breaks_counts_as_guessing(store):
    frame, _ = fill(
        store,
        best_at,
        lambda run: 3,
        lambda run: (
            "diverged" if run.kfac and getattr(run.kfac.compressor, "bits", 0) == 4 else "finished"
        ),
    )
    effects = {one.what: one for one in kfac.k5(frame).effects}
    assert effects["mlp: accuracy, float32 minus min-max 8 bit factors"].verdict == "supported"
    assert min(effects["mlp: accuracy, float32 minus min-max 4 bit factors"].values) > 80
    rows = {row[1]: row for row in kfac.ways_table(frame).rows if row[0] == "mlp"}
    assert (
        len(rows) == len(FACTORS) and rows["min-max 4 bit"][4] == "5" and rows["float32"][4] == "-"
    )
    assert rows["bfloat16"][5:] == ["200,000", "50.0"]


def test_a_target_that_is_not_reached_takes_longer_than_all_epochs(store):
    frame, curves = fill(store, best_at, lambda run: 100 if run.kfac else 3)
    slow = next(one for one in kfac.tuned(frame) if one.method == "K-FAC")
    assert set(kfac.epochs(curves, slow.runs, 0.97).values()) == {9}


def test_figures_are_drawn_and_reports_have_the_tables(store, tmp_path):
    frame, curves = fill(store, best_at, lambda run: 3)
    assert all(draw(frame, curves) is not None for draw in kfac.FIGURES.values())
    assert [table.name for table in report_parts.all_tables(frame)] == ["factors", "settings"]
    plain = frame[frame["kfac.damping"].isna()]
    assert kfac.rows(plain).empty and kfac.tuned(plain) == []


@pytest.mark.parametrize(
    "change, text",
    [
        ({}, "K-FAC"),
        (
            {"kfac.compressor.kind": "uniform", "kfac.compressor.bits": 4},
            "K-FAC, min-max 4 bit factors",
        ),
        (
            {"kfac.compressor.kind": "cast", "kfac.method": "eigen"},
            "K-FAC, eigen, bfloat16 factors",
        ),
        (
            {"kfac.statistics": "owner", "kfac.fisher": "sampled"},
            "K-FAC, owners' data, sampled Fisher",
        ),
    ],
)
def test_what_runs_are_called(change, text):
    from commsweep.config import flatten, override
    from commsweep.registry import preset

    run = override(preset("digits_kfac"), change)
    assert labels.describe(flatten(record(run))) == f"4 learners; {text}"
