"""The fit of the forecast: what it chooses, and that nothing of a left-out study reaches it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from commsweep.errors import UserError
from commsweep.integrations import forecast
from commsweep.scoring import fit, forecasts

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "forecast"


def invented(studies=6, codecs=8, harm=lambda row: 60 * row["bias"] + 12 * row["error"], seed=0):
    """Return a table in which worth follows from the features."""
    random = np.random.default_rng(seed)
    rows = []
    for study in range(studies):
        for codec in range(codecs):
            row = {"study": f"s{study}", "architecture": f"a{study // 2}", "codec": f"c{codec}"}
            bias, error = random.uniform(0, 1), random.uniform(0, 1.5)
            row |= {"message": "m", "bias": bias, "error": error, "distance": random.uniform()}
            rows.append(row | {"total": random.uniform(), "worth": 0.0})
            rows[-1]["worth"] = 100 - harm(rows[-1])
    return pd.DataFrame(rows)


def test_the_score_that_ranks_best_is_found():
    assert fit.best(invented()).text == "bias + 0.2 error"
    assert fit.best(invented(harm=lambda row: 90 * row["distance"])).text == "(1 - cosine)"


def test_left_out_studies_are_ranked_and_bounded_by_the_others_alone():
    table = invented()
    trial = fit.leave_out(table, "m", "study", None, "forecast")
    assert trial.rank > 0.99 and trial.studies == 6
    assert trial.coverage > 0.9 and trial.bounds <= len(table)
    # nothing of a strange study reaches the bounds that are tried on it
    alike = table[table["study"] != "s0"].assign(worth=lambda rows: 100 - 20 * rows["bias"])
    strange = table[table["study"] == "s0"].assign(worth=10.0)
    for share, worths in ((1.0, alike), (0.9, pd.concat([alike, strange]))):
        trial = fit.leave_out(worths, "m", "study", fit.BIAS, "bias")
        assert (trial.coverage == share) == (share == 1.0)


def test_a_constant_range_covers_without_saying_anything():
    trials = fit.trials(invented(), "m")
    constant = next(t for t in trials if t.by == fit.CONSTANT and t.left_out == "study")
    ours = next(t for t in trials if t.by == "forecast" and t.left_out == "study")
    assert constant.width > 2 * ours.width and constant.studies == 0


def test_constants_are_those_of_the_table(tmp_path):
    """The shipped file follows from the recorded table, and is the folder's."""
    table = forecasts.table(FOLDER)
    fit.write_constants(table, fit.fit_all(table), "", tmp_path / "forecast.json")
    written, shipped, kept = (
        json.loads(path.read_text())
        for path in (tmp_path / "forecast.json", forecast.FILE, FOLDER / "forecast.json")
    )
    assert written["messages"] == shipped["messages"] and shipped == kept
    assert shipped["table"] == written["table"]


def test_forecasts_of_unseen_trainings_are_older_than_their_rows():
    """Each training ran from a commit that had its forecast, the same as today's."""
    foretold = (FOLDER / "predictions.csv").read_text().splitlines()
    rows = pd.read_csv(FOLDER / "rows.csv")
    for commit, trained in rows.groupby("commit"):
        name = f"{commit}:docs/forecast/predictions.csv"
        shown = subprocess.run(["git", "show", name], cwd=FOLDER, capture_output=True, text=True)
        if shown.returncode:
            pytest.skip("no history of the repository here")
        for study in trained["training"].unique():
            lines = [line for line in foretold if f",{study}," in line]
            assert lines and set(lines) <= set(shown.stdout.splitlines())


@pytest.mark.parametrize(
    "text, line",
    [
        ("study,part,source,settings\na,old,digits,\n", "part seen or unseen"),
        ("study,part,source,settings\na,unseen,digits,width\n", "'width' is no setting"),
        ("study,part,source,settings\na,seen,rows.csv,\n", "unknown sweep 'a'"),
        ("study,part,source,settings\nfloor_gru,seen,rows.csv,\n", "no file"),
    ],
)
def test_mistakes_in_a_folder_are_one_line(text, line, tmp_path):
    (tmp_path / "studies.csv").write_text(text)
    with pytest.raises(UserError, match=line):
        forecasts.seen_studies(tmp_path)
        forecasts.unseen(tmp_path)
