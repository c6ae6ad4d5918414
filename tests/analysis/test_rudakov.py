"""Law 7: numbers lead to run folders, gaps show as gaps. Law 8: pure functions of files."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from commsweep.cli.main import main
from commsweep.config import labels, override, record, run_id
from commsweep.errors import UserError
from commsweep.launching.launch import register
from commsweep.registry import content
from commsweep.reporting import figure, report_parts, results, style
from commsweep.reporting import table as table_
from commsweep.reporting.claim import (
    CONTRADICTED,
    NOT_ENOUGH,
    NOT_EVALUABLE,
    PARTLY,
    SUPPORTED,
    UNDECIDED,
    Claim,
    Effect,
)
from commsweep.store import Store
from tests.helpers import linked, outcome, tiny

rudakov = content("analysis.rudakov")
sweeps = content("sweeps.rudakov")
demo = content("sweeps.rudakov").digits_methods


def fill(store: Store, score, runs=None, statuses=None):
    """A store whose rows are made up by `score(run) -> (on, off)`: tests of arithmetic, never shown
    as results.
    """
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
            folder.append(
                {
                    "epoch": epoch,
                    "step": 10 * epoch,
                    "bytes": 99 * epoch,
                    "seconds": epoch / 5,
                    "train_loss": 0.5,
                    "test_on_loss": 1 - on,
                    "test_on_acc": on * epoch / 10,
                    "test_off_acc": off * epoch / 10,
                }
            )
        folder.finish(
            outcome(
                run,
                status,
                metrics={"test_on_acc": on, "test_off_acc": off, "test_on_loss": 1 - on}
                if status == "finished"
                else {},
                bytes={"fwd_per_step": 1000.0, "bwd_per_step": 2000.0, "ratio": 0.25},
                boundaries={cut: {"fwd": 900, "bwd": 500, "calls": 10} for cut in run.model.cuts},
                seconds={"wall": 4.0},
            )
        )
    return results.load(store.root, "demo")


def flat_score(run):
    return 0.9 + run.seed / 100, 0.8 + run.seed / 100


def test_cells_are_mean_sd_and_n_and_lead_to_their_runs(store):
    frame = fill(store, flat_score)
    table = rudakov.topk(frame)
    row = next(row for row in table.rows if row[0] == "30 %")
    on = row[1]
    assert on.mean == pytest.approx(np.mean([0.90, 0.91, 0.92]))
    assert on.sd == pytest.approx(np.std([0.90, 0.91, 0.92], ddof=1))
    assert on.text() == "91.0 ± 1.0" and row[3] == "3"
    expected = {
        run_id(r)
        for r in demo()
        if r.fwd.compressor.kind == "topk"
        and r.fwd.compressor.ratio == 0.3
        and r.fwd.feedback.kind == "none"
    }
    assert set(on.ids) == expected
    line = next(line for line in table.csv().splitlines() if line.startswith("30 %,3,compressed"))
    assert all(name in line for name in expected) and ",3," in line


def test_missing_diverged_and_failed_cells_show_as_such(store):
    runs = [r for r in demo() if r.fwd.compressor.kind == "topk" and r.fwd.feedback.kind == "none"]
    by_level = {
        ratio: [run_id(r) for r in runs if r.fwd.compressor.ratio == ratio]
        for ratio in (0.5, 0.3, 0.2, 0.02)
    }
    statuses = dict.fromkeys(by_level[0.5], "missing") | dict.fromkeys(by_level[0.3], "diverged")
    statuses |= dict.fromkeys(by_level[0.02], "failed") | {by_level[0.2][0]: "diverged"}
    frame = fill(store, flat_score, statuses=statuses)
    shown = {row[0]: row[1].text() for row in rudakov.topk(frame).rows}
    assert shown["50 %"] == "missing" and shown["30 %"] == "diverged" and shown["2 %"] == "failed"
    assert shown["20 %"].endswith("(1 diverged)") and shown["20 %"].startswith("91.5")


def test_quantization_grid_puts_forward_bits_down_and_backward_bits_across(store):
    def score(run):
        f, b = (getattr(link.compressor, "bits", 16) for link in (run.fwd, run.bwd))
        return (f * 100 + b) / 10000, 0.5

    grid = next(
        t for t in rudakov.quantization(fill(store, score)) if t.name == "quantization_tensor_on"
    )
    assert grid.header == ["fwd \\ bwd", "dense", "8 bit", "4 bit", "2 bit"]
    shown = {
        (row[0], name): cell.mean
        for row in grid.rows
        for name, cell in zip(grid.header, row, strict=True)
        if isinstance(cell, table_.Cell)
    }
    assert shown["2 bit", "8 bit"] == pytest.approx(0.0208)
    assert shown["4 bit", "dense"] == pytest.approx(0.0416)
    assert shown["dense", "2 bit"] == pytest.approx(0.1602)


def test_all_the_papers_tables_are_there(store):
    names = [table.name for table in report_parts.all_tables(fill(store, flat_score))]
    assert names == [
        "topk",
        "quantization_group_on",
        "quantization_group_off",
        "quantization_tensor_on",
        "quantization_tensor_off",
        "feedback",
        "aqsgd",
        "settings",
    ]


@pytest.mark.slow
def test_the_same_rows_give_the_same_bytes(store, tmp_path):
    frame = fill(store, flat_score)
    curves = results.curves(store.root, list(frame.id))
    for name, draw in (rudakov.FIGURES | figure.KINDS).items():
        if draw(frame, curves) is None:
            continue
        for out in ("a", "b"):
            if name in ("score_bytes", "convergence"):
                style.save(draw(frame, curves), tmp_path / out, name)
        if name not in ("score_bytes", "convergence"):
            assert style.tag(draw(frame, curves), "x") == style.tag(draw(frame, curves), "x")
            continue
        for suffix in ("png", "pdf", "svg"):
            assert (tmp_path / "a" / f"{name}.{suffix}").read_bytes() == (
                tmp_path / "b" / f"{name}.{suffix}"
            ).read_bytes()


def test_latex_is_booktabs_and_escapes(store):
    text = rudakov.topk(fill(store, flat_score)).latex()
    assert r"\toprule" in text and r"30 \%" in text and r"& 91.0 & [\num{" in text
    assert " % " not in text.replace(r"\%", "") and "table*" in text  # it is wide


def test_markdown_columns_align(store):
    lines = rudakov.topk(fill(store, flat_score)).markdown().splitlines()[2:]
    assert len({len(line) for line in lines}) == 1


def test_pareto_keeps_exactly_what_nothing_dominates():
    generator = np.random.default_rng(0)
    points = pd.DataFrame({"bytes.ratio": generator.random(60), "mean": generator.random(60)})
    kept = set(style.pareto(points).index)
    for i, p in points.iterrows():
        dominated = (
            (points["bytes.ratio"] <= p["bytes.ratio"])
            & (points["mean"] >= p["mean"])
            & ((points["bytes.ratio"] < p["bytes.ratio"]) | (points["mean"] > p["mean"]))
        ).any()
        assert (i in kept) == (not dominated)


def effect(values, **region):
    return Effect("x", region.get("above"), region.get("below"), list(values))


@pytest.mark.parametrize(
    "values,region,verdict",
    [
        ([3, 3.1, 2.9], {"above": 2}, SUPPORTED),
        ([1, 1.1, 0.9], {"above": 2}, CONTRADICTED),
        ([1, 3, 2], {"above": 2}, UNDECIDED),
        ([9, 9], {"above": 2}, NOT_ENOUGH),
        ([], {"above": 2}, NOT_ENOUGH),
        ([0.1, 0.2, 0.1], {"below": 2}, SUPPORTED),
        ([5, 5.2, 5.1], {"below": 2}, CONTRADICTED),
    ],
)
def test_verdicts_follow_the_interval(values, region, verdict):
    assert effect(values, **region).verdict == verdict


def test_the_interval_is_students():
    values = [1.0, 2.0, 4.0, 4.5]
    lo, hi = effect(values, above=0).interval
    want = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert (lo, hi) == pytest.approx((want.low, want.high))


def test_a_claim_is_contradicted_by_one_effect_and_supported_only_by_all():
    good, bad, open_ = (
        effect([3, 3, 3.1], above=2),
        effect([0, 0, 0.1], above=2),
        effect([1, 3, 2], above=2),
    )
    for effects, verdict in (
        ([good, good], SUPPORTED),
        ([good, open_], PARTLY),
        ([good, bad], PARTLY),
        ([open_], UNDECIDED),
        ([bad, open_], CONTRADICTED),
    ):
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


def test_claims_are_supported_in_a_world_made_to_the_papers_findings_and_not_in_its_opposite(
    store, tmp_path
):
    verdicts = {c.name: c.verdict for c in report_parts.all_claims(fill(store, paper_world))}
    assert verdicts == dict.fromkeys(verdicts, SUPPORTED), verdicts
    assert list(verdicts) == [
        "C1, 2 bit",
        "C1, 4 bit",
        "C1-group, 2 bit",
        "C2",
        "C3",
        "C4",
        "C5",
        "C6",
    ]

    def opposite(run):  # compression never matters, except that feedback ruins and TopK 10 % harms
        noise = 0.001 * run.seed
        ruined = run.fwd.feedback.kind in ("ef", "ef21") or (
            run.fwd.compressor.kind == "topk"
            and (run.fwd.compressor.ratio == 0.1 and run.fwd.feedback.kind == "none")
        )
        return (0.5 if ruined else 0.9) + noise, (0.5 if ruined else 0.9) + noise

    claims = report_parts.all_claims(fill(Store(tmp_path / "o"), opposite))
    assert len(claims) == len(verdicts)
    for claim in claims:
        assert claim.verdict in (CONTRADICTED, PARTLY)
        assert CONTRADICTED in {effect.verdict for effect in claim.effects}, claim


def test_effects_are_paired_by_seed_and_diverged_runs_count_as_guessing(store):
    runs = [
        r
        for r in demo()
        if r.fwd.compressor.kind in ("none", "topk") and r.bwd.compressor.kind != "uniform"
    ]
    ten = [
        run_id(r)
        for r in runs
        if r.fwd.compressor.kind == "topk"
        and r.fwd.compressor.ratio == 0.1
        and r.fwd.feedback.kind == "none"
    ]
    frame = fill(store, flat_score, runs, {ten[0]: "diverged"})
    first = rudakov.c2(frame).effects[0]
    # 90 % against guessing, then equal by pairing
    assert first.values == pytest.approx([80.0, 0, 0, 0, 0])
    assert math.isclose(len(first.ids), 10)


def test_an_empty_store_and_an_unknown_sweep(store):
    assert results.load(store.root).empty
    with pytest.raises(UserError, match="knows no sweep 'demo'"):
        results.load(store.root, "demo")


def test_descriptions_name_what_differs():
    runs = [run for run in sweeps.resnet18_paper() if run.seed == 0]
    names = [labels.describe(results.flatten(record(run))) for run in runs]
    # the six AQ-SGD cells with fixed augmentation share names, so far
    assert len(set(names)) == len(runs) - 6
    frame = results.named(
        pd.DataFrame(
            [
                results._flat({"id": run_id(run), "status": "missing", "run": record(run)})
                for run in runs
            ]
        )
    )
    assert frame.method.nunique() == len(runs)
    assert "AQ-SGD + TopK 5 % / TopK 5 % (data fixed_augment True)" in set(frame.method)
    assert {
        "dense",
        "EF21 + TopK 10 %",
        "activations: min-max 4 bit",
        "gradients: min-max 2 bit, group scale",
        "AQ-SGD + TopK 5 % / TopK 5 %",
        "min-max 4 bit / min-max 8 bit",
    } <= set(names)
    own = override(
        runs[0], {"fwd.compressor.kind": "topk", "at.layer1_0.fwd.compressor.ratio": 0.5}
    )
    assert labels.describe(results.flatten(record(own))) == (
        "activations: TopK 10 %; layer1_0: activations: TopK 50 %"
    )


# What audits found.


PAIRS = {  # settings that one word once stood for, and what tells them apart
    "levels": (
        {"grad.compressor.kind": "qsgd", "grad.compressor.levels": 4},
        {"grad.compressor.bucket": 64},
    ),
    "type": (
        {"fwd.compressor.kind": "cast", "fwd.compressor.to": "float16"},
        {"fwd.compressor.to": "bfloat16"},
    ),
    "scope": ({"fwd.compressor.kind": "topk"}, {"fwd.compressor.scope": "tensor"}),
    "strict": ({"fwd.compressor.kind": "topk"}, {"fwd.compressor.kind": "topk_strict"}),
    "key": (
        {"fwd.compressor.kind": "topk", "fwd.feedback.kind": "ef"},
        {"fwd.feedback.key": "sample"},
    ),
    "start": ({"fwd.compressor.kind": "topk"}, {"fwd.start_epoch": 1}),
    "scale": ({"fwd.compressor.kind": "sign"}, {"fwd.compressor.scale": "l2"}),
    "rate": ({"fwd.compressor.kind": "topk"}, {"optim.lr": 0.01}),
    "momentum": ({"fwd.compressor.kind": "topk"}, {"optim.momentum": 0.5}),
    "digits": ({"fwd.compressor.kind": "topk"}, {"optim.lr": 0.05000001}),
    "group": (
        {"fwd.compressor.kind": "uniform", "fwd.compressor.scale": "group"},
        {"fwd.compressor.group": 32},
    ),
}


@pytest.mark.parametrize("what", PAIRS)
def test_no_number_pools_two_settings(what, store):
    first, more = PAIRS[what]
    base = (
        tiny()
        if "grad.compressor.kind" not in first
        else override(tiny(), {"grad.exchange": "allgather"} | first)
    )
    one = override(base, first)
    other = override(override(base, first), more)
    runs = [
        run.model_copy(update={"seed": seed}) for run in (tiny(), one, other) for seed in range(3)
    ]
    frame = fill(store, lambda run: (0.5 + 0.1 * (run in runs[6:]), 0.5), runs)
    assert (
        frame.method.nunique() == frame.setting_id.nunique() == len({run_id(r) for r in runs}) // 3
    )
    for table in report_parts.all_tables(frame):
        for cell in (
            cell
            for row in table.rows
            for cell in row
            if isinstance(cell, table_.Cell) and cell.values
        ):
            assert len(cell.values) <= 3 and cell.sd in (None, 0.0)
    shown = {row[0]: row[1].text() for row in table_.settings_table(frame).rows}
    assert sorted(shown.values())[-1] == "60.0 ± 0.0" and len(shown) == frame.setting_id.nunique()


def test_a_cell_of_two_settings_is_refused(store):
    frame = fill(store, flat_score)
    with pytest.raises(ValueError, match="settings in one cell"):
        table_.cell(frame, "test_on_acc")


def test_claims_pair_by_everything_that_is_not_compared(store):
    """Runs with learners, own links, a later start or microbatches are other trainings; none enters
    as if equal.
    """
    topk = {
        f"{side}.compressor.{key}": value
        for side in ("fwd", "bwd")
        for key, value in (("kind", "topk"), ("ratio", 0.1))
    }
    others = (
        {"grad.learners": 2, "grad.exchange": "allgather", "grad.compressor.kind": "sign"},
        {"at.layer1.fwd.compressor.kind": "none", "at.layer1.fwd.compressor.ratio": None},
        {"fwd.start_epoch": 1, "bwd.start_epoch": 1},
        {"microbatches": 2},
    )
    base = tiny()
    plain = [base, override(base, topk)]
    odd = [
        override(
            override(base, topk), {key: value for key, value in more.items() if value is not None}
        )
        for more in others
    ]
    runs = [run.model_copy(update={"seed": seed}) for run in plain + odd for seed in range(3)]
    frame = fill(
        store,
        lambda run: (
            0.9
            - 0.01 * (run.fwd.compressor.kind == "topk")
            - 0.5 * (run.model_copy(update={"seed": 0}) in odd),
            0.5,
        ),
        runs,
    )
    (effect,) = [one for one in rudakov.c2(frame).effects if one.values]
    assert effect.values == pytest.approx([1.0, 1.0, 1.0]) and len(effect.ids) == 6


def test_two_trainings_are_two_effects_named_by_what_tells_them_apart(store):
    topk = {
        f"{side}.compressor.{key}": value
        for side in ("fwd", "bwd")
        for key, value in (("kind", "topk"), ("ratio", 0.1))
    }
    runs = [
        override(tiny(seed=seed), more | rate)
        for seed in range(3)
        for more in ({}, topk)
        for rate in ({}, {"optim.lr": 0.2})
    ]
    frame = fill(
        store, lambda run: (0.9 - run.optim.lr * (run.fwd.compressor.kind == "topk"), 0.5), runs
    )
    effects = [one for one in rudakov.c2(frame).effects if one.values]
    assert [one.what.partition("%")[2] for one in effects] == [
        " (optim lr 0.05)",
        " (optim lr 0.2)",
    ]
    assert [round(one.values[0]) for one in effects] == [5, 20]


def test_what_diverged_on_both_sides_is_no_evidence(store):
    runs = [
        r
        for r in demo()
        if r.fwd.compressor.kind in ("none", "topk") and r.bwd.compressor.kind != "uniform"
    ]
    five = [
        run_id(r)
        for r in runs
        if r.fwd.compressor.kind == "topk" and r.fwd.compressor.ratio == 0.05
    ]
    frame = fill(store, flat_score, runs, dict.fromkeys(five, "diverged"))
    effect = rudakov.c3(frame).effects[1]
    assert effect.values == [] and effect.lost == 5 and effect.verdict == NOT_EVALUABLE
    assert (
        "5 diverged, nothing to compare" in effect.text()
        and [effect.verdict for effect in rudakov.c3(frame).effects].count(NOT_EVALUABLE) == 1
    )
    some = fill(
        Store(store.root.parent / "some"), flat_score, runs, dict.fromkeys(five[:1], "diverged")
    )
    effect = rudakov.c3(some).effects[1]
    assert len(effect.values) == 4 and effect.lost == 1


@pytest.mark.slow
def test_seeds_added_to_some_cells_only_are_said(store, tmp_path):
    frame = fill(store, flat_score)
    whole = results.uneven(frame)
    assert whole.startswith("Most settings have 3 seeds; 5 seeds: dense, TopK 10 %")
    assert results.uneven(frame[frame.seed < 3]) == ""
    many = [name for name in dict.fromkeys(frame.method) if name != "dense"][: results.NAMED + 1]
    part = frame[(frame.seed < 1) | (frame.method.isin(many) & (frame.seed < 2))]
    assert (
        results.uneven(part) == f"Most settings have 1 seed; 2 seeds: {results.NAMED + 1} settings."
    )
    assert main(["report", "demo", "--store", str(store.root), "--out", str(tmp_path / "o")]) == 0
    assert whole in (tmp_path / "o" / "claims.md").read_text()
    assert "95 % intervals" in (tmp_path / "o" / "figures" / "score_k.txt").read_text()


@pytest.mark.parametrize(
    "keep",
    [
        "one",
        *(
            pytest.param(keep, marks=pytest.mark.slow)
            for keep in ("mixed", "none finished but one", "qsgd")
        ),
    ],
)
def test_any_sweep_has_a_report(keep, store, tmp_path):
    """Of one cell, of other settings than the papers', of images and text together: tables,
    figures, no traceback.
    """
    text = override(
        tiny(), {"model.name": "gpt2-nano", "data.name": "synthetic-text", "optim.kind": "adamw"}
    )
    signs = {"grad.learners": 2, "grad.exchange": "server", "grad.compressor.kind": "sign"}
    runs = {
        "one": [tiny()],
        "none finished but one": demo()[:9],
        "qsgd": [linked({"kind": "qsgd"}), tiny(optim__lr=0.1)],
        "mixed": [tiny(), linked({"kind": "topk"}, {"kind": "topk"}), override(tiny(), signs)],
    }
    lost = {run_id(run): "diverged" for run in demo()[1:9]} if keep.startswith("none") else {}
    fill(store, flat_score, runs[keep], lost)
    if keep == "mixed":
        register("demo", [*runs[keep], text], store)
        store.folder(run_id(text)).begin(text, {})
        store.folder(run_id(text)).finish(
            outcome(text, metrics={"test_on_ppl": 9.0, "test_off_ppl": 9.5, "test_on_loss": 2.2})
        )
    assert main(["report", "demo", "--store", str(store.root), "--out", str(tmp_path / "o")]) == 0
    table = (tmp_path / "o" / "tables" / "settings.md").read_text()
    assert table.count("\n|") == 2 + results.load(store.root, "demo").setting_id.nunique()
    if keep == "mixed":
        assert "perplexity" in table and "9.00" in table
    assert (tmp_path / "o" / "report.html").exists()


def test_every_figure_says_what_it_shows(store):
    frame = fill(store, flat_score)
    drawn = list(report_parts.all_figures(frame, results.curves(store.root, list(frame.id))))
    names = [name for name, *_ in drawn]
    assert names == ["convergence", "score_k", "bits", "boundaries", "on_off"]
    assert all("n = " in caption and "interval" in caption for *_, caption in drawn)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "module",
    [
        *(
            f"reporting.{name}"
            for name in ("results", "table", "claim", "figure", "report", "report_parts")
        ),
        "timing.timeline.pipelines",
        "store",
        "config",
        "launching.launch",
        "registry",
        "cli.main",
    ],
)
def test_these_import_without_torch_or_any_service(module):
    code = (
        f"import sys, commsweep.{module}; "
        "print(sorted({'torch', 'pytorch_lightning', 'wandb', 'optuna', 'ray', 'datasets'} & "
        "set(sys.modules)))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert out.strip() == "[]"
