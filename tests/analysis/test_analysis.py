"""Law 7: numbers lead to run folders, gaps show as gaps. Law 8: pure functions of files."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from commsweep.analysis import claims, contents, figures, results, tables
from commsweep.analysis.claims import CONTRADICTED, NOT_ENOUGH, SUPPORTED, Claim, Effect
from commsweep.experiments.config import override, run_id
from commsweep.experiments.errors import UserError
from commsweep.experiments.store import Store
from commsweep.sweeps.launch import register
from commsweep.sweeps.papers import rudakov
from commsweep.sweeps.papers.rudakov import demo


def fill(store: Store, score, runs=None, statuses=None):
    """A store whose rows are made up by `score(run) -> (on, off)`: tests of arithmetic, never shown as results."""
    runs = demo() if runs is None else runs
    register("demo", runs, store)
    for run in runs:
        status = (statuses or {}).get(run_id(run), "finished")
        if status == "missing":
            continue
        on, off = score(run)
        folder = store.folder(run_id(run))
        folder.begin(run, {})
        for epoch in (5, 10):
            folder.append({"epoch": epoch, "test_on_acc": on * epoch / 10, "test_off_acc": off * epoch / 10})
        folder.finish({"id": run_id(run), "status": status, "error": None, "run": run.model_dump(mode="json"),
                       "metrics": {"test_on_acc": on, "test_off_acc": off} if status == "finished" else {},
                       "bytes": {"fwd_per_step": 1000.0, "bwd_per_step": 2000.0, "ratio": 0.25},
                       "seconds": {"wall": 4.0}})
    return results.load(store.root, "demo")


def flat_score(run):
    return 0.9 + run.seed / 100, 0.8 + run.seed / 100


def test_cells_are_mean_sd_and_n_and_lead_to_their_runs(store):
    frame = fill(store, flat_score)
    table = tables.topk(frame)
    row = next(row for row in table.rows if row[0] == "30 %")
    on = row[1]
    assert on.mean == pytest.approx(np.mean([0.90, 0.91, 0.92]))
    assert on.sd == pytest.approx(np.std([0.90, 0.91, 0.92], ddof=1))
    assert on.text() == "91.0 ± 1.0" and row[3] == "3"
    expected = {run_id(r) for r in demo() if r.fwd.compressor.kind == "topk" and r.fwd.compressor.ratio == 0.3
                and r.fwd.feedback.kind == "none"}
    assert set(on.ids) == expected
    line = next(line for line in table.csv().splitlines() if line.startswith("30 % | 3,compressed"))
    assert all(name in line for name in expected) and ",3," in line


def test_missing_diverged_and_failed_cells_show_as_such(store):
    runs = [r for r in demo() if r.fwd.compressor.kind == "topk" and r.fwd.feedback.kind == "none"]
    by_level = {ratio: [run_id(r) for r in runs if r.fwd.compressor.ratio == ratio] for ratio in (0.5, 0.3, 0.2, 0.02)}
    statuses = dict.fromkeys(by_level[0.5], "missing") | dict.fromkeys(by_level[0.3], "diverged")
    statuses |= dict.fromkeys(by_level[0.02], "failed") | {by_level[0.2][0]: "diverged"}
    frame = fill(store, flat_score, statuses=statuses)
    shown = {row[0]: row[1].text() for row in tables.topk(frame).rows}
    assert shown["50 %"] == "missing" and shown["30 %"] == "diverged" and shown["2 %"] == "failed"
    assert shown["20 %"].endswith("(1 diverged)") and shown["20 %"].startswith("91.5")


def test_quantization_grid_puts_forward_bits_down_and_backward_bits_across(store):
    def score(run):
        f, b = (getattr(link.compressor, "bits", 16) for link in (run.fwd, run.bwd))
        return (f * 100 + b) / 10000, 0.5

    grid = next(t for t in tables.quantization(fill(store, score)) if t.name == "quantization_tensor_on")
    assert grid.header == ["fwd \\ bwd", "dense", "8 bit", "4 bit", "2 bit"]
    shown = {(row[0], name): cell.mean for row in grid.rows for name, cell in zip(grid.header, row, strict=True)
             if isinstance(cell, tables.Cell)}
    assert shown["2 bit", "8 bit"] == pytest.approx(0.0208)
    assert shown["4 bit", "dense"] == pytest.approx(0.0416)
    assert shown["dense", "2 bit"] == pytest.approx(0.1602)


def test_all_the_papers_tables_are_there(store):
    names = [table.name for table in contents.all_tables(fill(store, flat_score))]
    assert names == ["topk", "quantization_group_on", "quantization_group_off", "quantization_tensor_on",
                     "quantization_tensor_off", "feedback", "aqsgd"]


def test_the_same_rows_give_the_same_bytes(store, tmp_path):
    frame = fill(store, flat_score)
    curves = results.curves(store.root, list(frame.id))
    for name, draw in figures.IMAGES.items():
        for out in ("a", "b"):
            figures.save(draw(frame, curves), tmp_path / out, name)
        for suffix in ("png", "pdf", "svg"):
            assert (tmp_path / "a" / f"{name}.{suffix}").read_bytes() == (
                tmp_path / "b" / f"{name}.{suffix}").read_bytes()


def test_latex_is_booktabs_and_escapes(store):
    text = tables.topk(fill(store, flat_score)).latex()
    assert r"\toprule" in text and r"30 \%" in text and r"91.0 $\pm$ 1.0" in text
    assert " % " not in text.replace(r"\%", "")


def test_markdown_columns_align(store):
    lines = tables.topk(fill(store, flat_score)).markdown().splitlines()[2:]
    assert len({len(line) for line in lines}) == 1


def test_pareto_keeps_exactly_what_nothing_dominates():
    generator = np.random.default_rng(0)
    points = pd.DataFrame({"bytes.ratio": generator.random(60), "mean": generator.random(60)})
    kept = set(figures.pareto(points).index)
    for i, p in points.iterrows():
        dominated = ((points["bytes.ratio"] <= p["bytes.ratio"]) & (points["mean"] >= p["mean"])
                     & ((points["bytes.ratio"] < p["bytes.ratio"]) | (points["mean"] > p["mean"]))).any()
        assert (i in kept) == (not dominated)


def effect(values, **region):
    return Effect("x", region.get("above"), region.get("below"), list(values))


@pytest.mark.parametrize("values,region,verdict", [
    ([3, 3.1, 2.9], {"above": 2}, SUPPORTED),
    ([1, 1.1, 0.9], {"above": 2}, CONTRADICTED),
    ([1, 3, 2], {"above": 2}, NOT_ENOUGH),
    ([9, 9], {"above": 2}, NOT_ENOUGH),
    ([], {"above": 2}, NOT_ENOUGH),
    ([0.1, 0.2, 0.1], {"below": 2}, SUPPORTED),
    ([5, 5.2, 5.1], {"below": 2}, CONTRADICTED),
])
def test_verdicts_follow_the_interval(values, region, verdict):
    assert effect(values, **region).verdict == verdict


def test_the_interval_is_students():
    values = [1.0, 2.0, 4.0, 4.5]
    lo, hi = effect(values, above=0).interval
    want = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert (lo, hi) == pytest.approx((want.low, want.high))


def test_a_claim_is_contradicted_by_one_effect_and_supported_only_by_all():
    good, bad, open_ = effect([3, 3, 3.1], above=2), effect([0, 0, 0.1], above=2), effect([1, 3, 2], above=2)
    for effects, verdict in (([good, good], SUPPORTED), ([good, open_], NOT_ENOUGH), ([bad, open_], CONTRADICTED)):
        assert Claim("x", "", effects).verdict == verdict


def paper_world(run):
    """Scores in which every claim of the paper is true."""
    noise = 0.001 * run.seed
    f, b = run.fwd, run.bwd
    if f.feedback.kind == "aqsgd":
        return 0.5 + noise, (0.95 if f.compressor.ratio >= 0.3 else 0.7) + noise
    if f.feedback.kind != "none":
        return 0.93 + noise, 0.945 + noise
    if f.compressor.kind == "topk":
        harm = {0.5: 0, 0.3: 0, 0.2: 0, 0.1: 0.01, 0.05: 0.1, 0.02: 0.3}[f.compressor.ratio]
        return 0.95 - harm + noise, 0.95 - 2 * harm - 0.05 + noise
    if "uniform" in (f.compressor.kind, b.compressor.kind):
        return 0.95 - (0.1 if b.compressor.kind == "uniform" else 0.0) + noise, 0.75 + noise
    return 0.95 + noise, 0.95 + noise


def test_claims_are_supported_in_a_world_made_to_the_papers_findings_and_not_in_its_opposite(store, tmp_path):
    verdicts = {c.name: c.verdict for c in contents.all_claims(fill(store, paper_world))}
    assert verdicts == dict.fromkeys(verdicts, SUPPORTED), verdicts
    assert list(verdicts) == ["C1", "C1-group", "C2", "C3", "C4", "C5", "C6"]

    def opposite(run):  # compression never matters, except that feedback ruins and TopK 10 % harms
        noise = 0.001 * run.seed
        ruined = run.fwd.feedback.kind in ("ef", "ef21") or (run.fwd.compressor.kind == "topk" and (
            run.fwd.compressor.ratio == 0.1 and run.fwd.feedback.kind == "none"))
        return (0.5 if ruined else 0.9) + noise, (0.5 if ruined else 0.9) + noise

    verdicts = {c.name: c.verdict for c in contents.all_claims(fill(Store(tmp_path / "o"), opposite))}
    assert verdicts == dict.fromkeys(verdicts, CONTRADICTED), verdicts


def test_effects_are_paired_by_seed_and_diverged_runs_count_as_guessing(store):
    runs = [r for r in demo() if r.fwd.compressor.kind in ("none", "topk") and r.bwd.compressor.kind != "uniform"]
    ten = [run_id(r) for r in runs if r.fwd.compressor.kind == "topk" and r.fwd.compressor.ratio == 0.1
           and r.fwd.feedback.kind == "none"]
    frame = fill(store, flat_score, runs, {ten[0]: "diverged"})
    first = claims.c2(frame).effects[0]
    assert first.values == pytest.approx([80.0, 0, 0, 0, 0])  # 90 % against guessing, then equal by pairing
    assert math.isclose(len(first.ids), 10)


def test_an_empty_store_and_an_unknown_sweep(store):
    assert results.load(store.root).empty
    with pytest.raises(UserError, match="knows no sweep 'demo'"):
        results.load(store.root, "demo")


def test_descriptions_name_what_differs():
    runs = [run for run in rudakov.resnet18_paper() if run.seed == 0]
    names = [results.describe(results.flatten(run.model_dump(mode="json"))) for run in runs]
    assert len(set(names)) == len(runs) - 6  # the six AQ-SGD cells with fixed augmentation share names
    assert {"dense", "EF21 + TopK 10 %", "activations: min-max 4 bit", "gradients: min-max 2 bit, group scale",
            "AQ-SGD + TopK 5 % / TopK 5 %", "min-max 4 bit / min-max 8 bit"} <= set(names)
    own = override(runs[0], {"fwd.compressor.kind": "topk", "at.layer1_0.fwd.compressor.ratio": 0.5})
    assert results.describe(results.flatten(own.model_dump(mode="json"))) == (
        "activations: TopK 10 %; layer1_0: activations: TopK 50 %")


@pytest.mark.parametrize("module", [
    *(f"analysis.{name}" for name in ("results", "tables", "claims", "figures", "report")), "experiments.store",
    "experiments.config", "sweeps.launch", "sweeps.papers", "main"])
def test_these_import_without_torch_or_any_service(module):
    code = (f"import sys, commsweep.{module}; "
            "print(sorted({'torch', 'pytorch_lightning', 'wandb', 'optuna', 'ray', 'datasets'} & set(sys.modules)))")
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"
