"""Tables, figures and claims of sparse training over made-up runs whose truth is known."""

from __future__ import annotations

import pandas as pd
import pytest

from commsweep.config import flatten, labels, override, record, run_id
from commsweep.config.run import SCHEMA
from commsweep.launching.launch import register
from commsweep.registry import content, preset, sweep
from commsweep.reporting import report_parts, results
from commsweep.reporting.claim import CONTRADICTED, PARTLY, SUPPORTED
from commsweep.sparsity import predicted_cost
from tests.helpers import scatter

mst = content("analysis.mst")


def name_of(run):
    return labels.levelless(labels.sparse(flatten(record(run)))) or (
        mst.NARROW if run.model.width else mst.DENSE
    )


def fill(store, loss, saves=lambda run: 1.0):
    """Rows of demo-sparse that end at loss(run); FLOPs as planned; live gradients cost `saves` of
    what lives.
    """
    runs = sweep("demo-sparse")
    register("demo-sparse", runs, store)
    for run in runs:
        totals, steps = predicted_cost.of_run(run), len(predicted_cost.rows(run))
        final = loss(run) + 0.0001 * run.seed + scatter(run)
        folder = store.folder(run_id(run))
        folder.begin(run, {})
        history = {
            "layers": ["transformer.h.0.attn.c_attn", "transformer.h.1.attn.c_attn"],
            "ever": [0.5, 0.5],
            "steps": [8, 16],
            "density": [[0.5, 0.4], [0.3, 0.2]],
            "turnover": [[0.1, 0.1], [0.0, 0.0]],
        }
        folder.append(
            {
                "epoch": 1,
                "step": steps,
                "train_loss": final,
                "test_on_loss": final,
                "masks": history,
                "flops": totals["total"],
            }
        )
        live = run.grad.compressor.kind == "live"
        gradients = (
            {}
            if run.grad.learners == 1
            else {
                "up": saves(run) * (800_000 - 4 * 150_000 * 0.75) if live else 800_000,
                "dense": 800_000,
                "rate": 1.0,
            }
        )
        folder.finish(
            {
                "schema": SCHEMA,
                "id": run_id(run),
                "status": "finished",
                "error": None,
                "run": record(run),
                "steps": steps,
                "seconds": {"train": 8.0},
                "bytes": {"ratio": 1.0},
                "speed": {},
                "metrics": {
                    "test_on_loss": final,
                    "test_on_ppl": 10.0,
                    "test_off_loss": final,
                    "test_off_ppl": 10.0,
                },
                "gradients": gradients,
                "flops": totals,
                "masks": {"ever": 0.5, "mean_density": 0.25, "weights": 150_000, "density": 0.25},
            }
        )
    frame = results.load(store.root, "demo-sparse")
    return frame, results.curves(store.root, list(frame.id))


def as_claimed(run):
    """MST as good as dense, better than all others at its FLOPs."""
    short = name_of(run) == "dense" and run.data.train_blocks < 3840
    return 2.0 if name_of(run) in ("dense", "MST", "MST, dense attention") and not short else 2.3


def test_claims_follow_the_rows(store):
    frame, _ = fill(store, as_claimed)
    found = {one.name: one for one in report_parts.all_claims(frame)}
    assert {name: one.verdict for name, one in found.items()} == {
        f"M{n}": SUPPORTED for n in range(1, 6)
    }
    assert "head counted, dense; 7.1 % of the dense run" in found["M1"].statement
    assert [len(one.values) for one in found["M2"].effects] == [3, 3, 3]
    assert found["M5"].effects[1].values == pytest.approx([0.0] * 3)


def test_opposite_rows_contradict(store):
    frame, _ = fill(
        store,
        lambda run: (
            2.6 if name_of(run) == "MST" else 2.3 + 0.3 * (name_of(run) == "MST, dense attention")
        ),
        lambda run: 1.05,
    )
    verdicts = {one.name: one.verdict for one in report_parts.all_claims(frame)}
    assert verdicts == {
        "M1": CONTRADICTED,
        "M2": CONTRADICTED,
        "M3": SUPPORTED,
        "M4": CONTRADICTED,
        "M5": PARTLY,  # the losses are as good, the bytes are not
    }


def test_arms_have_one_name_each_and_the_tables_show_them(store):
    frame, curves = fill(store, as_claimed)
    ((title, alone),) = mst.trainings(frame)
    names = [name for name, _ in mst.arms(alone)]
    assert (
        title == ""
        and names[:3] == [mst.DENSE, mst.SHORT, mst.NARROW]
        and len(names) == len(set(names)) == 12
    )
    assert {
        "MST",
        "RigL",
        "SET",
        "static",
        "GraNet",
        *(f"MST, without {one}" for one in mst.WITHOUT),
    } <= set(names)
    tables = {table.name: table for table in report_parts.all_tables(frame)}
    rows = {row[0]: row for row in tables["flops"].rows}
    assert (
        rows["dense"][3] == "100.0"
        and 24.5 < float(rows["MST"][3]) <= 25
        and rows["MST"][1] == "96.0"
    )
    assert rows["MST"][5] == "2.000 ± 0.000" and rows["MST"][7] == "+0.000"
    for row in tables["parts"].rows:
        assert sum(map(float, row[1:-1])) == pytest.approx(float(row[-1]), abs=0.05)
    said = {(row[0], row[1]): row for row in tables["wire"].rows}
    assert float(said["MST", "live, 4 learners"][4]) == pytest.approx(43.8, abs=0.1)
    drawn = {name for name, figure, caption in report_parts.all_figures(frame, curves) if caption}
    assert {"front", "bytes", "masks", "ever"} <= drawn


def test_half_a_sweep_shows_what_is_missing(store):
    frame, curves = fill(store, as_claimed)
    part = frame.assign(status=frame.status.where(frame.seed != 0, "missing"))
    part.loc[part["sparsity.growth"] == "random", "status"] = "diverged"
    tables = {table.name: table for table in report_parts.all_tables(part)}
    assert "diverged" in tables["flops"].markdown() and list(report_parts.all_figures(part, curves))
    assert report_parts.all_tables(part.assign(status="missing"))


@pytest.mark.parametrize(
    "name, text",
    [
        ("counted", "dense"),
        ("static", "static 80 %"),
        ("set", "SET 80 %"),
        ("rigl", "RigL 80 %"),
        ("granet", "GraNet 50 to 80 %"),
        ("oneshot", "one-shot magnitude 80 %"),
        ("mst", "MST 96 %"),
        ("no_warmup", "MST 96 %, without warmup"),
        ("no_ultra", "MST 80 %, without ultra"),
        ("no_restore", "MST 96 %, without restore"),
        ("dense_attention", "MST 96 %, dense attention"),
        ("gradient_growth", "MST 96 %, gradient growth"),
        ("random_growth", "MST 96 %, random growth"),
    ],
)
def test_what_runs_are_called(name, text):
    assert labels.describe(flatten(record(preset(f"sotu_nano_{name}")))) == text


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"sparsity.phases.all.attention": "local"}, "local attention"),
        (
            {
                "sparsity.phases.all.attention": "local",
                "sparsity.phases.all.alternate_attention": "fixed",
            },
            "local / fixed by heads attention",
        ),
        (
            {"sparsity.phases.all.sparsity": 0.5, "sparsity.phases.all.shape": "linear"},
            "gradual 0 to 50 %",
        ),
        ({"sparsity.phases.all.sparsity": 0.5, "sparsity.growth": "mixed"}, "mixed growth 50 %"),
        (
            {
                "sparsity.phases.all.sparsity": 0.5,
                "sparsity.modules": "all",
                "grad.learners": 2,
                "grad.compressor.kind": "live",
            },
            "RigL 50 %, head too; live, 2 learners",
        ),
        (
            {
                "sparsity.phases.a.sparsity": 0.5,
                "sparsity.phases.a.until": 0.5,
                "sparsity.phases.all.sparsity": 0,
            },
            "50 -> 0 %",
        ),
    ],
)
def test_what_other_runs_are_called(changes, text):
    width = {"sparsity.width": 16} if any(key.endswith(".attention") for key in changes) else {}
    run = override(preset("sotu_nano"), width | changes)
    assert labels.describe(flatten(record(run))) == text


@pytest.mark.slow
def test_trainings_are_compared_apart(store):
    """Two learning rates: every effect is one of each, and the tables say which they are of."""
    frame, _ = fill(store, as_claimed)
    worse = frame.assign(
        id="x" + frame.id,
        setting_id="x" + frame.setting_id,
        test_on_loss=frame.test_on_loss + 1,
        **{"optim.lr": 0.5},
    )
    worse.loc[worse["sparsity.phases.ultra.sparsity"].notna(), "test_on_loss"] += 1
    both = results.named(pd.concat([frame, worse], ignore_index=True))
    found = {one.name: one for one in report_parts.all_claims(both)}
    assert {one.verdict for one in found["M1"].effects} == {SUPPORTED, CONTRADICTED}
    assert [len(one.values) for one in found["M1"].effects] == [3, 3]
    assert [len(one.values) for one in found["M5"].effects[:2]] == [3, 3]
    titles = [
        table.title for table in report_parts.all_tables(both) if table.name.startswith("flops")
    ]
    assert len(titles) == 2 and all("optim lr" in title for title in titles)


def test_a_sweep_without_a_dense_arm_shows_shares_of_its_own_model(store):
    frame, _ = fill(store, as_claimed)
    alone = frame[frame["sparsity.phases.ultra.sparsity"].notna()]
    tables = {table.name: table for table in report_parts.all_tables(alone)}
    rows = {row[0]: row for row in tables["flops"].rows}
    assert (
        "nan" not in tables["flops"].markdown()
        and 24.5 < float(rows["MST"][3]) <= 25
        and rows["MST"][7] == "-"
    )


def test_images_with_masks_are_no_language_models(store):
    run = override(preset("digits"), {"sparsity.phases.all.sparsity": 0.9, "sparsity.interval": 20})
    frame = pd.DataFrame(
        [
            results._flat(
                {
                    "id": run_id(run),
                    "status": "finished",
                    "run": record(run),
                    "metrics": {"test_on_acc": 0.9},
                }
            )
        ]
    )
    assert mst.rows(frame).empty and report_parts.all_tables(results.named(frame))
