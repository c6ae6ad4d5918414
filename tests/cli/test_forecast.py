"""`commsweep forecast`: the page from recorded files, and forecasts before trainings."""

from __future__ import annotations

import shutil
from pathlib import Path

import pandas as pd
import pytest

from commsweep.cli.main import main

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_page_follows_from_the_recorded_files(tmp_path, capsys):
    folder = tmp_path / "forecast"
    shutil.copytree(DOCS / "forecast", folder)
    page = (folder / "README.md").read_text()
    (folder / "README.md").unlink()
    assert main(["forecast", str(folder), "--store", str(tmp_path / "store")]) == 0
    assert (folder / "README.md").read_text() == page
    assert "activations: rank correlation" in capsys.readouterr().out
    rows = pd.read_csv(folder / "rows.csv")
    rows[rows["codec"] != "eden:2"].to_csv(folder / "rows.csv", index=False)
    assert main(["forecast", str(folder), "--store", str(tmp_path / "store")]) == 0
    assert "Of 100 trainings" in (folder / "README.md").read_text()


def test_a_folder_without_studies_is_one_line(tmp_path, capsys):
    assert main(["forecast", str(tmp_path)]) == 2
    assert "is no forecast: it has no file studies.csv" in capsys.readouterr().err
    assert main(["forecast", str(tmp_path / "nowhere")]) == 2
    assert "no such folder" in capsys.readouterr().err


@pytest.mark.slow
def test_a_training_is_foretold_before_it_runs_and_never_after(tmp_path, capsys):
    shutil.copytree(DOCS / "results" / "floor_digits", tmp_path / "floor_digits")
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "studies.csv").write_text(
        "study,part,source,settings\n"
        "floor_digits,seen,../floor_digits/rows.csv,\n"
        "small,unseen,synthetic,epochs=1 eval_every=1\n"
    )
    (folder / "codecs.csv").write_text("codec\nuniform:4\nsign\n")
    command = ["forecast", str(folder), "--store", str(tmp_path / "store"), "--seeds", "1"]
    assert main([*command, "--train"]) == 2  # nothing was measured
    assert "measure the seen trainings with --watch" in capsys.readouterr().err
    assert main([*command, "--watch"]) == 0
    foretold = (folder / "predictions.csv").read_text()
    assert foretold.count("\n") == 1 + 2 * 2
    assert main([*command, "--watch", "--train"]) == 0
    assert (folder / "predictions.csv").read_text() == foretold
    assert len(pd.read_csv(folder / "rows.csv")) == 1 + 2 * (1 + 2)  # dense, nothing, two codecs
    (folder / "predictions.csv").unlink()
    capsys.readouterr()
    assert main([*command, "--watch"]) == 2
    assert "was trained before its forecast" in capsys.readouterr().err
