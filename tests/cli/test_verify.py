"""Published rows are repeated: the same here, and what is outside two seeds' spread is named."""

from __future__ import annotations

import json

import pandas as pd
import pytest

from commsweep.cli import verify
from commsweep.cli.main import main

GRID = """
from commsweep.launching.grid import seeds
from commsweep.registry import preset


def grid():
    return seeds([preset("synthetic")], 2)
"""


@pytest.fixture
def published(tmp_path, monkeypatch, capsys):
    """A folder with the rows of two runs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "grid.py").write_text(GRID)
    store = ["--store", "store"]
    assert main(["sweep", "launch", "grid.py:grid", "--workers", "1", *store]) == 0
    assert main(["report", "grid.py:grid", "--out", "out", "--no-page", *store]) == 0
    capsys.readouterr()
    return tmp_path / "out"


def test_rows_are_repeated_and_a_changed_one_is_named(published, capsys):
    asked = ["verify", str(published), "--sweep", "grid.py:grid", "--runs", "2"]
    assert main([*asked, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert len(answer["rows"]) == 2 and all(row["equal"] for row in answer["rows"])
    frame = pd.read_csv(published / "rows.csv", dtype={"id": str})
    mean = frame.test_on_acc.mean()
    frame.loc[0, "test_on_acc"] = mean + 100  # far outside, whatever the spread
    frame.loc[1, "test_on_acc"] = mean + 100
    frame.to_csv(published / "rows.csv", index=False)
    assert main(asked) == 1
    printed = capsys.readouterr().out
    assert printed.count("OUTSIDE") == 2 and "0 of 2 rows hold" in printed


def test_a_sweep_of_ones_own_does_not_lead_with_claims_it_has_no_seeds_for(published, capsys):
    """The claims of papers about these rows are listed by the command that asks for them."""
    short = ["epochs=1", "schedule.t_max=1", "data.train_size=128"]
    roles = ["--role", "activations", "--role", "gradients"]
    chosen = ["mine", "--base", "digits", *short, "--codecs", "topk:0.1", *roles]
    assert main(["sweep", "launch", *chosen, "--store", "store", "--workers", "1"]) == 0
    capsys.readouterr()
    assert main(["report", "mine", "--out", "mine", "--no-page", "--store", "store"]) == 0
    assert "No claim of the papers has enough runs" in capsys.readouterr().out
    assert json.loads((published.parent / "mine/claims.json").read_text())["claims"] == []
    assert main(["claims", "mine", "--store", "store", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)


def test_the_spread_is_that_of_two_seeds():
    def row(seed, score):
        from commsweep.config import record
        from commsweep.registry import preset

        return {"run": record(preset("synthetic", seed=seed)), "metrics": {"acc": score}}

    rows = [row(0, 0.90), row(1, 0.92), row(2, 0.94)]
    assert verify._spread(rows, "acc") == pytest.approx(1.96 * 2**0.5 * 0.02)
    assert verify._spread(rows[:1], "acc") == 0.0


def test_a_folder_without_rows_is_one_line(tmp_path, capsys):
    assert main(["verify", str(tmp_path)]) == 2
    printed = capsys.readouterr().err
    assert "has no rows.csv" in printed and printed.count("\n") == 1
