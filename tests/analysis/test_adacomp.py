"""Gradient tables and claims over made-up rows whose truth is known."""

from __future__ import annotations

import pytest

from commsweep.config import labels, record, run_id
from commsweep.config.run import SCHEMA
from commsweep.launching.launch import register
from commsweep.registry import content, sweep
from commsweep.reporting import report_parts, results
from commsweep.reporting.claim import CONTRADICTED, SUPPORTED
from commsweep.store import Store
from tests.helpers import scatter

adacomp = content("analysis.adacomp")


def fill(store: Store, quality, statuses=None):
    """Rows of demo-gradients whose accuracy (loss for GPT-2) is quality(run), with plausible
    bytes.
    """
    runs = sweep("demo-gradients")
    register("demo-gradients", runs, store)
    for run in runs:
        status = (statuses or {}).get(run_id(run), "finished")
        if status == "missing":
            continue
        text = run.model.name.startswith("gpt2")
        score = quality(run) + 0.0001 * run.seed + scatter(run)
        metrics = {
            f"test_{mode}_{name}": value
            for mode in ("on", "off")
            for name, value in (
                {"loss": score, "ppl": 2.7**score} if text else {"acc": score, "loss": 1.0}
            ).items()
        }
        rate = {"none": 1.0, "adacomp": 60.0}.get(run.grad.compressor.kind, 30.0) + scatter(run)
        up, n = 60_000 / rate, run.grad.learners
        factor = {"allreduce": 2 * (n - 1) / n, "allgather": n - 1, "server": 1}[run.grad.exchange]
        kinds = (
            ("fc", "embedding") if text else ("fc",) if run.model.name == "mlp" else ("conv", "fc")
        )
        folder = store.folder(run_id(run))
        folder.begin(run, {})
        folder.append({"epoch": 1, "step": 10, **metrics, "rates": {"a": rate, "b": 2 * rate}})
        folder.append({"epoch": 2, "step": 20, **metrics, "rates": {"a": rate, "b": 2 * rate}})
        folder.finish(
            {
                "schema": SCHEMA,
                "id": run_id(run),
                "status": status,
                "error": None,
                "run": record(run),
                "seconds": {},
                "metrics": metrics if status == "finished" else {},
                "bytes": {"ratio": 1.0},
                "speed": {},
                "steps": 20,
                "gradients": {}
                if n == 1 and rate == 1
                else {
                    "up": up,
                    "bound": up / 2,
                    "dense": 60_000,
                    "total": n * factor * up,
                    "rate": rate,
                    "learner_sends": factor * up,
                    "learner_receives": factor * up,
                    **{f"{kind}.rate": rate for kind in kinds},
                },
            }
        )
    return results.load(store.root, "demo-gradients")


def good(run):
    """AdaComp loses nothing, everything else loses two points; a boundary at 10 % loses ten
    more.
    """
    kind = run.grad.compressor.kind
    if run.model.name.startswith("gpt2"):
        return 2.4
    linked = 0.1 if getattr(run.fwd.compressor, "ratio", 1) == 0.1 else 0.0
    return (0.97 if kind in ("none", "adacomp") else 0.95) - linked


def bad(run):
    """AdaComp loses five points (0.5 nats), the others nothing."""
    lost = run.grad.compressor.kind == "adacomp"
    return 2.4 + 0.5 * lost if run.model.name.startswith("gpt2") else 0.97 - 0.05 * lost


def test_claims_follow_the_rows(store):
    frame = fill(store, good)
    assert {claim.name: claim.verdict for claim in report_parts.all_claims(frame)} == dict.fromkeys(
        ("A1", "A2", "A3", "A4"), SUPPORTED
    )
    a3 = adacomp.a3(frame)
    assert len(a3.effects) == 5 and all(
        len(effect.values) == 3 and len(effect.ids) == 6 for effect in a3.effects
    )


def test_claims_are_contradicted_where_the_rows_do(store):
    frame = fill(store, bad)
    for claim in report_parts.all_claims(frame):
        assert CONTRADICTED in {effect.verdict for effect in claim.effects}, claim
        assert claim.verdict != SUPPORTED


def test_without_runs_there_is_no_claim(store):
    runs = {
        run_id(run): "missing"
        for run in sweep("demo-gradients")
        if run.grad.compressor.kind == "adacomp"
    }
    frame = fill(store, good, runs)
    assert report_parts.all_claims(frame) == []
    cells = [cell for row in adacomp.methods(frame).texts() for cell in row if "AdaComp" in row[1]]
    assert "missing" in cells


def test_tables_show_what_was_asked(store):
    frame = fill(store, good)
    tables = {table.name: table for table in report_parts.all_tables(frame)}
    assert list(tables) == ["methods", "classes", "robustness", "exchanges", "both", "settings"]
    methods = {(row[0], row[1]): row for row in tables["methods"].texts()}
    assert methods["mlp", "AdaComp, 4 learners"][2:7] == ["97.0 ± 0.0", "3", "60.0", "-", "1,000"]
    assert len(tables["methods"].rows) == 23 + 3 + 2
    exchanges = {tuple(row[:4]): row for row in tables["exchanges"].texts()}
    assert exchanges["mlp", "AdaComp", "allgather", "8"][4:] == ["7,000", "56,000"]
    assert exchanges["mlp", "dense", "allreduce", "4"][4:] == ["90,000", "360,000"]
    both = {tuple(row[:2]): row for row in tables["both"].texts()}
    assert both["TopK 10 %", "AdaComp, 4 learners"][4:] == ["10.0", "10.0"]
    assert [cell.strip("-") for cell in both["TopK 30 %", "AdaComp, 4 learners"][4:]] == ["0.0"] * 2
    robust = [row[:2] for row in tables["robustness"].texts()]
    assert robust == [["1", "64"], ["4", "32"], ["4", "64"], ["4", "128"], ["8", "64"]]


def test_figures_draw_from_whole_and_from_partial_rows(store):
    frame = fill(store, good)
    curves = results.curves(store.root, list(frame.id))
    assert [name for name, *_ in report_parts.all_figures(frame, curves)] == [
        "convergence",
        "score_k",
        "score_bytes",
        "layers",
        "scaling",
    ]
    for part, count in (
        (frame.head(9), 5),
        (frame[frame["model.name"] == "gpt2-nano"], 4),
        (frame.assign(status="missing"), 0),
    ):
        assert len(list(report_parts.all_figures(part, curves[curves.id.isin(part.id)]))) == count
        report_parts.all_tables(part)
        report_parts.all_claims(part)


@pytest.mark.parametrize(
    "row, text",
    [
        ({"grad.learners": 1}, ""),
        ({"grad.learners": 4}, "4 learners"),
        ({"grad.learners": 2, "grad.local_steps": 4}, "2 learners, 4 local steps"),
        (
            {
                "grad.learners": 8,
                "grad.compressor.kind": "sign",
                "grad.feedback.kind": "none",
                "grad.schedule.kind": "steady",
                "grad.vote": True,
            },
            "sign, vote, 8 learners",
        ),
    ],
)
def test_exchanges_have_names(row, text):
    assert labels.exchange(row) == text
