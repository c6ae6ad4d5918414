"""Rows and curves as pandas wants them, from every source; and every setting beside one."""

from __future__ import annotations

import math
import shutil

import pandas as pd
import pytest

import commsweep as cs
from commsweep.config import override, run_id
from commsweep.errors import UserError
from commsweep.launching.grid import seeds
from commsweep.launching.launch import register
from commsweep.registry import preset
from commsweep.reporting import against, results
from commsweep.reporting.claim import CONTRADICTED, SUPPORTED, UNDECIDED, adjust
from commsweep.reporting.statistics import interval
from commsweep.store import POINTS, Store
from tests.helpers import outcome, scatter
from tests.test_layout import ROOT

RESULTS = ROOT / "docs" / "results"
BASE = preset("sotu_nano")
BYTES = ("total", "ratio", "fwd_ratio", "bwd_ratio", "fwd_per_step", "bwd_per_step")
ARMS = {
    "dense": (BASE, 2.0),
    "fwd=ef+topk:0.1": (override(BASE, {"fwd": "ef+topk:0.1"}), 2.4),
    "bwd=uniform:2": (override(BASE, {"bwd": "uniform:2"}), 2.2),
    "fwd=topk:0.2,values.kind=uniform,values.bits=3 bwd=forward_mask": (
        override(
            BASE, {"fwd": "topk:0.2,values.kind=uniform,values.bits=3", "bwd": "forward_mask"}
        ),
        2.4,
    ),
}


@pytest.fixture
def store(tmp_path):
    """Four settings with three seeds and two points a run; scores are made up."""
    store = Store(tmp_path / "store")
    runs = seeds([run for run, _ in ARMS.values()], 3)
    register("four", runs, store)
    losses = {loss: run for run, loss in ARMS.values()}
    assert len(losses) == 3
    for run in runs:
        loss = next(
            loss for arm, loss in ARMS.values() if arm.model_copy(update={"seed": run.seed}) == run
        )
        score = loss + 0.01 * run.seed + 1e5 * scatter(run)
        folder = store.folder(run_id(run))
        folder.begin(run, {})
        for step in (50, 100):
            point = {"epoch": step / 100, "step": step, "val_on_loss": round(score + 10 / step, 4)}
            folder.append(point, POINTS)
        metrics = {"test_on_loss": score, "test_on_ppl": 9.0, "test_off_ppl": 9.0}
        folder.finish(outcome(run, metrics=metrics, bytes=dict.fromkeys(BYTES, 1.0)))
    return store


def test_codecs_k_bits_and_feedback_are_columns(store):
    rows = cs.load_rows(store.root, "four")
    assert list(rows)[:3] == ["id", "setting", "seed"]
    table = rows.drop_duplicates("setting").set_index("codec")
    assert set(table.index) == set(ARMS)
    assert table.loc["fwd=ef+topk:0.1", ["K", "feedback", "fwd.codec", "bwd.codec"]].tolist() == [
        0.1,
        "ef",
        "ef+topk:0.1",
        "none",
    ]
    assert table.loc["bwd=uniform:2", "bits"] == 2
    assert table.loc["fwd=topk:0.2,values.kind=uniform,values.bits=3 bwd=forward_mask", "bits"] == 3
    assert (rows.groupby("setting").seed.nunique() == 3).all()


def test_a_report_brings_the_same_rows_and_curves(store, tmp_path):
    out = tmp_path / "out"
    assert cs.load_rows(store.root).codec.nunique() == 4
    assert _report(store, out) == 0
    of_store, of_folder = cs.load_curves(store.root, "four"), cs.load_curves(out)
    keys = ["id", "step"]
    left, right = (
        frame.sort_values(keys).reset_index(drop=True) for frame in (of_store, of_folder)
    )
    pd.testing.assert_frame_equal(left[right.columns], right, check_dtype=False)
    assert (of_folder.groupby("id").step.max() == 100).all() and "codec" in of_folder
    rows = cs.load_rows(out)
    pd.testing.assert_frame_equal(rows, cs.load_rows(out / "rows.csv"))
    assert set(rows.codec) == set(ARMS)
    (out / "curves.csv.gz").unlink()
    with pytest.raises(cs.UserError, match=r"has no curves.csv.gz.*--points 10"):
        cs.load_curves(out)


def _report(store, out):
    from commsweep.cli.main import main

    return main(["report", "four", "--store", str(store.root), "--out", str(out), "--no-page"])


def test_published_rows_have_words_for_their_codecs():
    for name in ("demo", "demo-gradients", "text_codes"):
        rows = cs.load_rows(RESULTS / name)
        assert len(rows) and rows.codec.notna().all()
    curves = cs.load_curves(RESULTS / "floor_warm")
    assert {"setting", "seed", "codec", "step", "val_on_loss", "bytes"} <= set(curves)


def test_every_setting_is_compared_with_one_and_judged_together(store):
    frame = results.load(store.root, "four")
    (claim,) = adjust([against.claim(frame, "ef+topk:0.1")])
    verdicts = {effect.what.partition(" over ")[0]: effect.verdict for effect in claim.effects}
    assert verdicts == {
        "dense": SUPPORTED,
        "bwd=uniform:2": SUPPORTED,
        "fwd=topk:0.2,values.kind=uniform,values.bits=3 bwd=forward_mask": UNDECIDED,
    }
    assert all(effect.tests == 3 for effect in claim.effects)
    (claim,) = adjust([against.claim(frame, "dense")])
    assert {effect.verdict for effect in claim.effects} == {CONTRADICTED}
    with pytest.raises(cs.UserError, match="no setting of the sweep is that; did you mean"):
        against.claim(frame, "uniform:3")
    both = override(BASE, {"fwd": "uniform:2"})
    for run in seeds([both], 3):
        folder = store.folder(run_id(run))
        folder.begin(run, {})
        folder.finish(outcome(run, metrics={"test_on_loss": 2.0}))
    with pytest.raises(cs.UserError, match="say which: 'bwd=uniform:2' or 'fwd=uniform:2'"):
        against.claim(results.load(store.root), "uniform:2")


def test_what_is_no_source_is_one_line(tmp_path):
    with pytest.raises(cs.UserError, match="cannot be read as rows"):
        cs.load_rows(tmp_path / "none.csv")
    shutil.copy(RESULTS / "demo" / "rows.csv", tmp_path)
    with pytest.raises(cs.UserError, match="has no curves.csv.gz"):
        cs.load_curves(tmp_path)


def test_a_summary_has_the_interval_of_the_verdicts():
    frame = pd.DataFrame({"method": ["a", "a", "a", "b"], "score": [1.0, 2.0, 4.0, 3.0]})
    table = cs.summary(frame, "method", "score")
    assert tuple(table.loc["a", ["low", "high"]]) == interval([1.0, 2.0, 4.0])
    assert table.loc["a", "n"] == 3 and table.loc["a", "mean"] == pytest.approx(7 / 3)
    assert table.loc["b", "low"] != table.loc["b", "low"] and table.loc["b", "n"] == 1


def test_a_convergence_table_counts_the_runs_that_were_lost():
    points = []
    for seed in (0, 1):
        for step in (10, 50, 100):
            nan = seed == 1 and step > 10
            point = {"id": str(seed), "setting": "s", "method": "m", "step": step}
            points.append(point | {"val_on_loss": math.nan if nan else 100.0 / step + seed})
    table = cs.convergence(pd.DataFrame(points), "val_on_loss").set_index("percent")
    assert table.loc[10, "mean"] == 10.5 and table.loc[25, "mean"] == 2.0  # the point at step 50
    assert list(table["n"]) == [2, 1, 1, 1] and list(table["lost"]) == [0, 1, 1, 1]
    with pytest.raises(UserError, match="did you mean 'val_on_loss'"):
        cs.convergence(pd.DataFrame(points), "val_on_los")


def test_what_is_needed_and_missing_is_said_in_a_line():
    with pytest.raises(UserError, match="no values in kfac.method; needed are K, kfac.method"):
        cs.load_rows(RESULTS / "floor_warm", needs=["K", "kfac.method"])
    assert UserError("one line")._render_traceback_() == ["commsweep: one line"]
