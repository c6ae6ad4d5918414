"""The language-model section over made-up rows: tests of arithmetic and drawing, never shown as
results.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from commsweep.config import record, run_id
from commsweep.config.run import SCHEMA
from commsweep.launching.launch import register
from commsweep.registry import content, sweep
from commsweep.reporting import report, report_parts, results, style
from commsweep.reporting.claim import CONTRADICTED, NOT_ENOUGH, SUPPORTED
from commsweep.store import Store

rudakov_text = content("analysis.rudakov_text")


def fill(store: Store, loss, statuses=None):
    """Rows of demo-text whose losses are `loss(run) -> (on, off)`."""
    runs = sweep("demo-text")
    register("demo-text", runs, store)
    for run in runs:
        status = (statuses or {}).get(run_id(run), "finished")
        if status == "missing":
            continue
        on, off = loss(run)
        scores = {
            "test_on_loss": on,
            "test_off_loss": off,
            "test_on_ppl": math.exp(on),
            "test_off_ppl": math.exp(off),
        }
        share = (
            run.fwd.compressor.ratio
            if hasattr(run.fwd.compressor, "ratio")
            else (1.0 if run.fwd.compressor.kind == "none" else 0.125)
        )
        folder = store.folder(run_id(run))
        folder.begin(run, {})
        folder.append({"epoch": 1, **scores})
        folder.finish(
            {
                "schema": SCHEMA,
                "id": run_id(run),
                "status": status,
                "error": None,
                "run": record(run),
                "metrics": scores if status == "finished" else {},
                "bytes": {"ratio": share},
                "speed": {"fwd_bytes_per_token": 256 * share, "bwd_bytes_per_token": 128 * share},
                "seconds": {"wall": 4.0},
            }
        )
    return results.load(store.root, "demo-text")


def paper_world(run):
    """Losses in which both claims are true."""
    noise, compressor = 0.001 * run.seed, run.fwd.compressor
    if compressor.kind == "topk" and compressor.scope == "sample":
        harm = 0.0 if compressor.ratio >= 0.3 else 0.1
        harm += 0.5 if run.bwd.compressor.kind == "topk" else 0.0
        return 2.4 + harm + noise, 2.5 + harm + noise
    return 2.4 + noise, 2.4 + noise


def test_both_claims_hold_in_the_papers_world_and_fail_in_its_opposite(store, tmp_path):
    verdicts = {c.name: c.verdict for c in report_parts.all_claims(fill(store, paper_world))}
    assert verdicts == {"C7": SUPPORTED, "C8": SUPPORTED}

    def opposite(run):  # 30 % harms already, and a mask of one's own is better
        ratio = getattr(run.fwd.compressor, "ratio", 1.0)
        better = run.bwd.compressor.kind == "topk"
        return (2.4 + 0.001 * run.seed + (0.2 if ratio <= 0.3 else 0) - (0.1 if better else 0),) * 2

    claims = report_parts.all_claims(fill(Store(tmp_path / "o"), opposite))
    found = {claim.name: [effect.verdict for effect in claim.effects] for claim in claims}
    assert found == {"C7": [SUPPORTED, CONTRADICTED], "C8": [CONTRADICTED] * 2}


def test_a_diverged_run_counts_as_guessing_among_all_tokens(store):
    lost = [
        run_id(r)
        for r in sweep("demo-text")
        if r.bwd.compressor.kind == "topk"
        and r.seed == 0
        and r.fwd.compressor.ratio == 0.1
        and r.fwd.compressor.scope == "sample"
    ]
    frame = fill(store, paper_world, dict.fromkeys(lost, "diverged"))
    effect = report_parts.all_claims(frame)[1].effects[1]
    assert effect.values == pytest.approx([math.log(256) - 2.5, 0.5, 0.5])
    assert f"{np.mean(effect.values):+.3f}" in effect.text()
    assert report_parts.all_claims(frame)[0].verdict == SUPPORTED
    row = next(
        row for row in rudakov_text.topk(frame).rows if row[:2] == ["separate masks", "10 %"]
    )
    assert row[2].text().endswith("(1 diverged)")


def test_tables_show_perplexity_bytes_and_gaps(store):
    gone = [
        run_id(r) for r in sweep("demo-text") if getattr(r.fwd.compressor, "ratio", None) == 0.02
    ]
    frame = fill(store, paper_world, dict.fromkeys(gone, "missing"))
    table = rudakov_text.topk(frame)
    assert [row[:2] for row in table.rows] == [
        ["dense", "100 %"],
        *(["shared mask", f"{k} %"] for k in (50, 30, 20, 10, 5, 2)),
        *(["separate masks", f"{k} %"] for k in (50, 30, 20, 10)),
    ]  # byte-matched levels are not the paper's
    thirty = table.rows[2]
    expected = [math.exp(2.4 + 0.001 * seed) for seed in range(5)]
    assert thirty[2].mean == pytest.approx(np.mean(expected)) and thirty[4] == "5"
    assert thirty[2].text() == f"{np.mean(expected):.2f} ± {np.std(expected, ddof=1):.2f}"
    assert thirty[5].text() == "76.8"
    assert table.rows[6][2].text() == "missing"
    names = [row[0] for row in rudakov_text.methods(frame).rows]
    assert len(names) == len(set(names)) == frame.method.nunique() == 21
    assert names[-1] == "TopK 2 %, shared mask"  # missing cells come last, and are there
    assert {
        "dense",
        "subspace 8",
        "bottleneck 8",
        "low rank 7",
        "TAH",
        "TopK 10 %, shared mask",
        "TopK 10 %",
        "RandTopK 10.94 % per token, shared mask",
    } <= set(names)


def test_figures_draw_from_partial_rows_and_always_the_same(store, tmp_path):
    frame = fill(store, paper_world, {run_id(r): "missing" for r in sweep("demo-text") if r.seed})
    curves = results.curves(store.root, [])
    for name, drawn, _ in report_parts.all_figures(frame, curves):
        style.save(drawn, tmp_path / "a", name)
    rows = rudakov_text.rows(frame)
    for name, draw in rudakov_text.FIGURES.items():
        style.save(draw(rows, curves), tmp_path / "b", name)
    for name in rudakov_text.FIGURES:
        assert (tmp_path / "a" / f"{name}.png").read_bytes() == (
            tmp_path / "b" / f"{name}.png"
        ).read_bytes()
    # an analysis goes by its own name and by that of its file
    titles = [
        [table.name for table in report_parts.all_tables(frame, [name])]
        for name in ("text", "rudakov_text")
    ]
    assert titles[0] == titles[1]
    none = frame.assign(status="missing")
    assert list(report_parts.all_figures(none, results.curves(store.root, []))) == []


def test_families_join_the_levels_of_a_method():
    family = rudakov_text.family
    assert (
        family("TopK 10 %, shared mask") == family("TopK 50 %, shared mask") == "TopK shared mask"
    )
    assert rudakov_text.family("TopK 10 %") == "TopK separate masks"
    assert rudakov_text.family("low rank 7") == "low rank"


@pytest.mark.slow
def test_the_page_shows_language_models(store, tmp_path):
    fill(store, paper_world)
    made = report.write(store.root, "demo-text", tmp_path / "out")
    page = made.page.read_text()
    assert {table.name for table in made.tables} == {"topk", "methods", "settings"}
    assert page.count('alt="figure ') == 3 and "perplexity" in page
    assert (
        '<span class="badge supported">supported</span> <b>C8.</b>' in page
        and NOT_ENOUGH not in page
    )
