"""A report's rows.csv goes back into a store, and says there what it said where it was measured."""

from __future__ import annotations

import base64
import csv
import json
import math
import re
import shutil
import zlib

import pandas as pd
import pytest

import commsweep as cs
from commsweep.cli.main import main
from commsweep.config import run_id
from commsweep.errors import UserError
from commsweep.launching.launch import adopt
from commsweep.registry import sweep
from commsweep.reporting import interim_looks, results
from commsweep.reporting.published import outcomes
from commsweep.reporting.report_parts import all_claims, all_tables
from commsweep.store import Store
from docs.tools import renew
from tests.test_layout import ROOT

RESULTS = ROOT / "docs" / "results"
DEMO = RESULTS / "demo" / "rows.csv"


def lines(path):
    with open(path, newline="") as handle:
        return list(csv.DictReader(handle))


def written(path, rows):
    with open(path, "w", newline="") as handle:
        out = csv.DictWriter(handle, rows[0].keys())
        out.writeheader()
        out.writerows(rows)
    return path


def alike(a, b):
    """The same but for the last digits of floats, in which kinds of CPUs differ."""
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(alike(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(alike(x, y) for x, y in zip(a, b, strict=True))
    return a == b


def effects_of(claim):
    """What a claim compares, without its verdict."""
    keys = ("what", "values", "ids", "above", "below", "within")
    return [[effect[key] for key in keys] for effect in claim["effects"]]


def test_what_is_alike_differs_in_last_digits_only():
    assert alike([{"p": 0.1}], [{"p": 0.1 + 1e-12}])
    assert not alike([{"p": 0.1}], [{"p": 0.10001}]) and not alike([1.0], [1.0, 2.0])
    assert not alike({"p": "yes"}, {"p": "no"}) and not alike({"p": 1.0}, {"q": 1.0})


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", sorted(path.parent.name for path in RESULTS.glob("*/claims.json")))
def test_every_verdict_in_the_repository_follows_from_the_rows_beside_it(tmp_path, name):
    """The law of evidence: what is claimed is what the rows say, by the code of today."""
    store, runs = Store(tmp_path), sweep(name)
    rows, _ = outcomes(RESULTS / name / "rows.csv", runs)
    assert adopt(name, runs, rows, store) == len(rows) > 0
    told = json.loads((RESULTS / name / "claims.json").read_text())
    frame = results.load(tmp_path, name)
    tables = all_tables(frame)
    notes = (results.uneven(frame), results.mixed_surroundings(frame))
    assert told["note"] == " ".join(note for note in notes if note)
    assert all(table.rows for table in tables)
    titles = [table.title for table in tables]
    assert len(set(titles)) == len(titles) and all(
        title.count("(") == title.count(")") for title in titles
    )
    found = [
        one.record()
        for one in all_claims(frame, told["papers"], interim=interim_looks.read_content(told))
    ]
    from_rows = {claim["claim"] for claim in found}
    published = [claim for claim in told["claims"] if claim["claim"] in from_rows]
    if (RESULTS / name / "measurements.jsonl").exists():
        # measured claims are adjusted together with these, so only what was compared is alike
        published, found = ([effects_of(claim) for claim in part] for part in (published, found))
    else:
        assert len(published) == len(told["claims"])
    assert alike(published, json.loads(json.dumps(found))), (
        f"renew it: commsweep sweep adopt {name} docs/results/{name}/rows.csv && commsweep "
        f"report {name}"
    )
    have = {
        line["id"]: line
        for line in lines(RESULTS / name / "rows.csv")
        if line["status"] == "finished"
    }
    for row in frame[frame.status == "finished"].itertuples():
        line = have.pop(row.id)
        assert (line["setting_id"], float(line["bytes.total"])) == (
            row.setting_id,
            frame.at[row.Index, "bytes.total"],
        )
    assert not have


# Figures beside rows that no report of these makes: what does, from which files.
MADE_ELSEWHERE = {
    "demo-kfac": "commsweep links demo-kfac, from a store with its measurements",
}


@pytest.mark.slow
@pytest.mark.filterwarnings("error:constrained_layout not applied")
@pytest.mark.parametrize(
    "name",
    # shadow's rows are looks at messages, of no sweep
    sorted({path.parent.name for path in RESULTS.glob("*/rows.csv")} - {"shadow_smollm2"}),
)
def test_figures_tables_and_verdicts_of_a_folder_are_made_again_byte_for_byte(tmp_path, name):
    folder = tmp_path / name
    shutil.copytree(RESULTS / name, folder)
    figures = [path.name for path in folder.glob("*.png")]
    for figure in figures:
        (folder / figure).write_bytes(b"")
    renewed = renew.renew(folder) if name not in MADE_ELSEWHERE else renew.rejudge(folder)
    if name not in MADE_ELSEWHERE:
        assert set(figures) <= set(renewed), "a figure that nothing makes"
    for file in renewed:
        assert (folder / file).read_bytes() == (RESULTS / name / file).read_bytes(), file


@pytest.mark.slow
def test_a_report_of_adopted_rows_writes_the_same_rows(tmp_path, capsys):
    assert main(["sweep", "adopt", "demo", str(DEMO), "--store", str(tmp_path / "store")]) == 0
    assert capsys.readouterr().out == "demo: 104 runs adopted, 104 with their curves\n"
    assert (
        main(["report", "demo", "--store", str(tmp_path / "store"), "--out", str(tmp_path / "out")])
        == 0
    )
    assert lines(tmp_path / "out" / "rows.csv") == lines(DEMO)
    assert (tmp_path / "out" / "claims.json").read_text() == (
        RESULTS / "demo" / "claims.json"
    ).read_text()
    assert (tmp_path / "out" / "report.html").exists()
    assert (tmp_path / "out/figures/convergence.png").exists()
    assert (tmp_path / "out" / "curves.csv.gz").read_bytes() == (
        DEMO.parent / "curves.csv.gz"
    ).read_bytes()


def test_curves_that_lie_beside_rows_are_adopted_and_drawn(tmp_path, capsys):
    folder, store = RESULTS / "floor_warm", str(tmp_path / "store")
    command = ["sweep", "adopt", "floor_warm", str(folder / "rows.csv"), "--store", store]
    assert main(command) == 0
    assert "42 runs adopted, 42 with their curves" in capsys.readouterr().out
    assert main(command) == 0  # what is there stays
    assert "0 runs adopted, no curves" in capsys.readouterr().out
    out = tmp_path / "out"
    assert main(["report", "floor_warm", "--store", store, "--out", str(out)]) == 0
    published, adopted = (cs.load_curves(path) for path in (folder, out))
    keys = ["id", "step"]
    frames = [frame.sort_values(keys).reset_index(drop=True) for frame in (published, adopted)]
    pd.testing.assert_frame_equal(frames[0], frames[1][list(frames[0])], check_dtype=False)
    assert '"val_on_loss"' in page_data(out / "report.html")
    damaged = tmp_path / "rows.csv"
    shutil.copy(folder / "rows.csv", damaged)
    (tmp_path / "curves.csv.gz").write_bytes(b"no gzip")
    again = ["sweep", "adopt", "floor_warm", str(damaged), "--store", str(tmp_path / "other")]
    assert main(again) == 2 and "cannot be read as curves" in capsys.readouterr().err


def page_data(path):
    """The data of a page, unpacked."""
    packed = re.search(r'id="data"[^>]*>([^<]+)<', path.read_text())[1]
    return zlib.decompress(base64.b64decode(packed), wbits=31).decode()


def test_what_is_recorded_stays_and_the_rest_is_left_to_a_launch(tmp_path, capsys):
    rows = lines(DEMO)
    part = written(
        tmp_path / "part.csv",
        [*rows[:3], rows[3] | {"status": "failed"}, rows[4] | {"id": "0" * 12}],
    )
    store = Store(tmp_path / "store")
    command = ["sweep", "adopt", "demo", str(part), "--store", str(store.root), "--json"]
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out) == {
        "sweep": "demo",
        "adopted": 3,
        "kept": 0,
        "others": 2,
        "with_curves": 0,
    }
    folder = store.folder(rows[0]["id"])
    before = (folder.path / "done.json").read_bytes()
    changed = written(tmp_path / "changed.csv", [rows[0] | {"test_on_acc": "0.5"}])
    assert main([*command[:3], str(changed), *command[4:]]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "sweep": "demo",
        "adopted": 0,
        "kept": 1,
        "others": 0,
        "with_curves": 0,
    }
    assert (folder.path / "done.json").read_bytes() == before
    assert folder.begun_by() == "sweep" and run_id(folder.run()) == rows[0]["id"]
    assert main(["show", rows[0]["id"], "--store", str(store.root)]) == 0
    assert "measured elsewhere, taken from part.csv, sha256" in capsys.readouterr().out
    assert main(["sweep", "plan", "demo", "--store", str(store.root)]) == 0
    assert "104 cells, 101 missing" in capsys.readouterr().out


def test_further_seeds_are_the_sweeps_from_then_on(tmp_path, capsys):
    name = "cifar_small_jpeg"
    assert (
        main(["sweep", "adopt", name, str(RESULTS / name / "rows.csv"), "--store", str(tmp_path)])
        == 0
    )
    told = len(lines(RESULTS / name / "rows.csv"))
    assert told > len(sweep(name)) and len(results.load(tmp_path, name)) == told
    assert main(["sweep", "plan", name, "--store", str(tmp_path)]) == 0
    assert f"{told} cells, none missing" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda rows: [rows[0] | {"test_on_acc": "high"}],
            "line 2: test_on_acc is 'high', no number",
        ),
        (
            lambda rows: [rows[0] | {"bytes.total": "nan"}],
            "line 2: bytes.total is 'nan', no number",
        ),
        (
            lambda rows: [
                {
                    key: "" if key.startswith(("test", "val", "train", "best")) else value
                    for key, value in rows[0].items()
                }
            ],
            "line 2: a finished run without a score",
        ),
        (
            lambda rows: [{"run": "1"}],
            "has no column id, seed, status, steps: not the rows.csv of a report",
        ),
    ],
)
def test_a_table_that_is_none_is_one_line_and_nothing_is_taken(tmp_path, capsys, change, said):
    path = written(tmp_path / "rows.csv", change(lines(DEMO)))
    assert main(["sweep", "adopt", "demo", str(path), "--store", str(tmp_path / "store")]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1 and not Store(tmp_path / "store").sweeps()


@pytest.mark.parametrize(
    "cut",
    [
        lambda text: text[:-60],
        lambda text: text[: text.rstrip("\n").rindex("\n") + 40],  # the latter before its seed
        lambda text: text.replace("\n", ",1\n").replace(",1", "", 1),
    ],
)
def test_a_line_that_is_torn_is_not_taken(tmp_path, capsys, cut):
    path = tmp_path / "rows.csv"
    path.write_text(cut(DEMO.read_text()))
    assert main(["sweep", "adopt", "demo", str(path), "--store", str(tmp_path / "store")]) == 2
    err = capsys.readouterr().err
    assert "it has not as many fields as there are columns" in err and err.count("\n") == 1
    assert not Store(tmp_path / "store").ids()


def test_an_error_of_several_lines_is_one_field(tmp_path):
    rows = lines(DEMO)
    path = written(
        tmp_path / "rows.csv", [rows[0] | {"status": "failed", "error": "one\r\ntwo"}, *rows[1:3]]
    )
    taken, others = outcomes(path, sweep("demo"))
    assert [row["id"] for row in taken] == [row["id"] for row in rows[1:3]] and others == 1


def test_files_that_cannot_be_read_are_one_line(tmp_path, capsys):
    shutil.copy(RESULTS / "demo" / "score_bytes.png", tmp_path / "rows.csv")
    for path in (tmp_path / "rows.csv", tmp_path / "none.csv", tmp_path):
        assert main(["sweep", "adopt", "demo", str(path), "--store", str(tmp_path / "store")]) == 2
        err = capsys.readouterr().err
        assert "cannot be read as rows" in err and err.count("\n") == 1


def edited(path, how):
    text = DEMO.read_text(encoding="utf-8")
    path.write_bytes(how(text).encode("utf-8"))
    return path


@pytest.mark.parametrize(
    "how",
    [
        lambda text: "\ufeff" + text,
        lambda text: text.replace(",", ";"),
        lambda text: text.replace("\n", "\r\n"),
    ],
    ids=["mark", "semicolons", "line ends"],
)
def test_a_table_that_a_spreadsheet_wrote_is_read(how, tmp_path):
    wanted, left = outcomes(DEMO, sweep("demo"))
    if '"' in DEMO.read_text(encoding="utf-8") and ";" in how("a,b\n"):
        pytest.skip("quoted fields hold commas of their own")
    rows, others = outcomes(edited(tmp_path / "rows.csv", how), sweep("demo"))
    assert len(rows) == len(wanted) and others == left


def test_seeds_that_pandas_made_floats_of_are_seeds(tmp_path):
    rows = [line | {"seed": f"{line['seed']}.0"} for line in lines(DEMO)]
    found = outcomes(written(tmp_path / "rows.csv", rows), sweep("demo"))[0]
    assert len(found) == len(outcomes(DEMO, sweep("demo"))[0])


def test_ids_that_became_numbers_are_named(tmp_path):
    rows = lines(DEMO)
    rows[3]["id"] = "1E-3"
    with pytest.raises(UserError, match="line 5: id is '1E-3'"):
        outcomes(written(tmp_path / "rows.csv", rows), sweep("demo"))


def test_nothing_adopted_is_an_error(tmp_path, capsys):
    assert main(["sweep", "adopt", "smoke", str(DEMO), "--store", str(tmp_path / "s")]) == 2
    assert "no line is an outcome of a run of sweep 'smoke'" in capsys.readouterr().err


def test_one_id_with_several_scores_is_listed_with_its_sources(tmp_path, store, capsys):
    rows = [
        {key: text for key, text in row.items() if not key.startswith("environment.")}
        for row in lines(DEMO)[:3]
    ]
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    other = rows[0] | {"test_on_acc": "0.5", "environment.processor": "there"}
    written(tmp_path / "a" / "rows.csv", rows)
    written(tmp_path / "b" / "rows.csv", [other, rows[1] | {"environment.processor": "there"}])
    command = ["list", "--conflicts", str(tmp_path), "--store", str(store.root)]
    assert main([*command, "--json"]) == 0
    (name, scores), *others = json.loads(capsys.readouterr().out).items()
    assert name == rows[0]["id"] and not others
    assert scores == {
        str(tmp_path / "a" / "rows.csv"): float(rows[0]["test_on_acc"]),
        f"{tmp_path / 'b' / 'rows.csv'}, there": 0.5,
    }
    assert main(command) == 0
    assert "1 ids have several scores" in capsys.readouterr().out
