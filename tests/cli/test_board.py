"""`commsweep board` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from commsweep.cli.main import main
from commsweep.config import override, run_id
from commsweep.registry import preset
from commsweep.scoring import board as boards
from commsweep.scoring import speed
from commsweep.scoring.training import Setup


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    """Trainings of a second, and a small message to time."""

    def setups(role: str, scale: int = 1, width: int = 1) -> list[Setup]:
        dense = override(preset("synthetic"), {"epochs": scale * 2})
        control = override(dense, {"bwd.compressor.kind": "zero"})
        return [Setup(role, "tiny", dense, control, "zeros", 2.3, "guessing")]

    monkeypatch.setattr(boards, "setups", setups)
    monkeypatch.setattr(speed, "NUMBERS", 2**14)
    monkeypatch.chdir(tmp_path)
    Path("board").mkdir()
    Path("board", "mine.py").write_text(
        "class Half:\n    def encode(self, x, seed): return {'x': x.half()}\n"
        "    def decode(self, parts, like): return parts['x'].to(like.dtype)\n"
    )
    Path("board", "entries.csv").write_text(
        "codec,feedback,roles\nmine.py:Half,none,gradients\nsign,ef,gradients\n"
    )


def test_a_board_is_trained_written_and_checked(capsys):
    ask = ["board", "board", "--store", "st", "--seeds", "1", "--workers", "1"]
    assert main([*ask, "--train", "--role", "gradients"]) == 0
    assert "2 entries, 2 places in 1 trainings" in capsys.readouterr().out
    rows = pd.read_csv("board/rows.csv")
    assert sorted(rows.codec) == ["dense", "ef + sign", "mine.py:Half", "nothing sent"]
    page = Path("board/README.md").read_text()
    assert "[mine.py:Half](cards/mine-py-half.md)" in page
    assert "gradients of activations at a boundary" in page
    assert "laws hold" in Path("board/cards/mine-py-half.md").read_text()
    measures = Path("board/measures.json").read_text()
    assert main(ask) == 0  # nothing is measured again
    assert Path("board/measures.json").read_text() == measures
    assert len(json.loads(measures)) == 2
    assert main([*ask, "--check", "mine.py:Half"]) == 0
    said = capsys.readouterr().out
    assert "1 of 1 trainings repeated with the same loss; 0 were not tried" in said
    rows.loc[rows.codec == "mine.py:Half", "loss"] = 0.0
    rows.to_csv("board/rows.csv", index=False)
    assert main([*ask, "--check", "mine.py:Half"]) == 1
    assert "recorded loss 0, this training's " in capsys.readouterr().out
    pd.concat([rows, rows]).to_csv("board/rows.csv", index=False)
    assert main([*ask, "--check", "mine.py:Half"]) == 2
    assert "two rows have the id" in capsys.readouterr().err


def test_the_trainings_to_repeat_follow_from_all_rows_of_an_entry():
    entry = boards.Entry("sign", "ef", ("gradients", "activations"))
    cells = boards.entry_cells([entry], 3)
    scores = {name: boards.Score(0.5, 1.0) for name in cells}
    board = boards.Board(Path(), [entry], scores, {})
    drawn = [cell.run for cell in boards.draw(board, cells, 6)]
    assert len(drawn) == len(set(map(run_id, drawn))) == len(cells)
    firsts = set()
    for loss in range(40):
        scores[next(iter(cells))] = boards.Score(float(loss), 1.0)
        firsts.add(run_id(boards.draw(board, cells, 1)[0].run))
    assert firsts == set(cells)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["elsewhere"], "'elsewhere': no such folder; name one that has entries.csv"),
        (["."], "is no board: it has no file entries.csv"),
        (["board", "--role", "learner"], "--role learner: not one of activations"),
        (["board", "--check", "sgin"], "'sgin' is no entry of this board"),
    ],
)
def test_a_mistake_is_one_line(words, message, capsys):
    assert main(["board", *words]) == 2
    assert message in capsys.readouterr().err
