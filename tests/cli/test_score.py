"""`commsweep score` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

import commsweep
from commsweep.cli.main import main
from commsweep.config import override
from commsweep.registry import preset
from commsweep.scoring import speed, training
from commsweep.scoring.training import Setup

TEMPLATE = Path(commsweep.__file__).parent / "template" / "codec.py"


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    """Trainings of a second, and a small message to time."""

    def setups(role: str, scale: int = 1) -> list[Setup]:
        dense = preset("synthetic")
        control = override(dense, {"bwd.compressor.kind": "zero"})
        return [Setup(role, "tiny", dense, control, "zeros", 2.3, "guessing")]

    monkeypatch.setattr(training, "setups", setups)
    monkeypatch.setattr(speed, "NUMBERS", 2**14)
    monkeypatch.chdir(tmp_path)


def test_a_card_in_one_command(tmp_path, capsys):
    ask = ["score", "uniform:4", "--store", "st", "--seeds", "2", "--workers", "2"]
    assert main([*ask, "--minutes", "0.000001"]) == 0
    assert "the same command goes on" in capsys.readouterr().out
    assert main(ask) == 0
    first = capsys.readouterr().out
    assert "Worth kept in training" in first and "tiny: this training cannot tell" in first
    card = json.loads((tmp_path / "score" / "card.json").read_text())
    assert [entry["codec"] for entry in card] == ["uniform:4"]
    assert card[0]["training"][0]["worth_kept"]["n"] == 2
    rows = pd.read_csv(tmp_path / "score" / "rows.csv")
    assert len(rows) == 6 and set(rows.role) == {"gradients"}
    assert all((tmp_path / "score" / f"card.{kind}").exists() for kind in ("md", "png", "svg"))
    # nothing is trained again
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "st").glob("*/done.json")}
    assert main([*ask, "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again[0]["training"] == card[0]["training"]
    assert len(stamps) == 8
    assert stamps == {path: path.stat().st_mtime_ns for path in stamps}


def test_a_code_of_ones_own_quickly(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(TEMPLATE.read_text())
    assert main(["score", "mine.py:RowSigns,k=4", "--quick", "--role", "activations"]) == 0
    text = capsys.readouterr().out
    assert "mine.py:RowSigns,k=4 as activations" in text and "bits a byte" in text
    assert not (tmp_path / "store").exists()


def test_a_broken_law_ends_with_1_and_trains_nothing(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(
        "class Code:\n"
        "    def encode(self, x, seed): return {'x': x / x.std()}\n"
        "    def decode(self, parts, like): return parts['x'].to(like.dtype)\n"
    )
    assert main(["score", "mine.py:Code", "--store", "st"]) == 1
    text = capsys.readouterr().out
    assert "no verdict" in text and "BROKEN" in text
    assert list((tmp_path / "st").glob("*/done.json")) == []


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["topq:0.1"], "did you mean 'topk'"),
        (["topk:0.1", "--role", "gradient"], "did you mean 'gradients'"),
        (["topk:0.1", "topk:0.1"], "named twice"),
        (["nowhere.py:Code"], "there is no file 'nowhere.py'"),
        (["topk:0.1", "--minutes", "0"], "--minutes"),
    ],
)
def test_mistakes_end_in_one_line(arguments, line, capsys):
    assert main(["score", *arguments]) == 2
    error = capsys.readouterr().err
    assert line in error and len(error.strip().splitlines()) == 1
