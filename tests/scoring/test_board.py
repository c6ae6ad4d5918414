"""The board: places follow from rows, and rows from the code that they name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from commsweep.config import run_id
from commsweep.errors import UserError
from commsweep.launching.grid import seeds
from commsweep.scoring import board as boards
from commsweep.scoring import board_page, choice_page, training
from tests.helpers import tiny

HEADER = "codec,feedback,roles\n"
# codec: share of the dense bytes, and the loss between dense (1.0) and nothing sent (2.0)
PLANTED = {
    "sign": (0.03, 2.1),
    "eden:1": (0.04, 1.4),
    "uniform:4": (0.125, 1.5),
    "cast:to=bfloat16": (0.5, 1.0),
}


def planted(
    folder: Path, entries: str, found=PLANTED, count: int = 3, noise: float = 0.01
) -> boards.Board:
    """Return a board with made-up scores of the text training of gradients."""
    (folder / "entries.csv").write_text(HEADER + entries)
    board = boards.read(folder)
    setup = training.setups("gradients")[0]
    settings = {entry.codec: setup.coded(entry.codec, entry.feedback) for entry in board.entries}
    losses = found | {"dense": (1.0, 1.0), "control": (0.0, 2.0)}
    for name, run in (settings | {"dense": setup.dense, "control": setup.control}).items():
        share, loss = losses[name]
        draws = np.random.default_rng(len(name)).normal(size=count)
        for draw, cell in zip(draws, seeds([run], count, training.SEED), strict=True):
            away = 0.0 if name in ("dense", "control") else noise * float(draw)
            board.scores[run_id(cell)] = boards.Score(loss + away, share)
    return board


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (None, "is no board: it has no file entries.csv"),
        ("sign,none\n", "line 2: no roles; a line is codec,feedback,roles"),
        (
            "sign,none,learner\n",
            "line 2: role 'learner' is none of all, .* did you mean 'learners'",
        ),
        ("sgin,none,all\n", "line 2: 'sgin' names no codec"),
        ("sign:3,none,all\n", "line 2: 'sign:3': '3' names no setting"),
        ("sign,none,learners\nsign,none,gradients\n", "sign is entered twice"),
    ],
)
def test_a_mistake_in_the_entries_is_one_line(tmp_path, lines, message):
    if lines is not None:
        (tmp_path / "entries.csv").write_text(HEADER + lines)
    with pytest.raises(UserError, match=message):
        boards.read(tmp_path)


def test_a_rival_is_the_best_of_at_most_its_bytes_or_nothing_sent(tmp_path):
    lines = "".join(f"{codec},none,gradients\n" for codec in PLANTED)
    board = planted(tmp_path, lines)
    places = boards.standings(board, "gradients", training.setups("gradients")[0], 3)
    assert [place.entry.codec for place in places] == list(PLANTED)
    assert [place.rival for place in places] == [boards.NOTHING, boards.NOTHING, "eden:1", "eden:1"]
    assert places[1].gain.values == pytest.approx([60.0] * 3, abs=3)


def test_a_lead_is_decided_by_enough_seeds_and_few_entries(tmp_path):
    entries = "eden:1,none,gradients\ncast:to=bfloat16,none,gradients\n"
    for count, noise, decided in ((3, 1.5, False), (2, 0.01, False), (8, 0.01, True)):
        board = planted(tmp_path, entries, count=count, noise=noise)
        (trained, *_) = board_page.write(board, count)
        assert [place.leads for place in trained.standings] == [decided] * 2
        text = (tmp_path / "README.md").read_text()
        assert ("Bold: it is decided" in text) == ("]**" in text) == decided
        assert ("No lead is decided" in text) != decided
    assert "better than nothing sent" in (tmp_path / "cards" / "eden-1.md").read_text()


def test_rows_are_kept_and_follow_from_the_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "class Half:\n    def encode(self, x, seed): return {'x': x.half()}\n"
        "    def decode(self, parts, like): return parts['x'].to(like.dtype)\n"
    )
    (tmp_path / "entries.csv").write_text(HEADER + "mine.py:Half,none,gradients\n")
    board = boards.read(Path())
    assert (
        "rows.csv has no row"
        in boards.check(board, boards.entries_named(board, "mine.py:Half"), 1)[0]
    )
    cells = boards.cells(board, ["gradients"], 1, boards.SHORT)
    assert [cell.name for cell in cells.values()] == [
        boards.DENSE,
        boards.NOTHING,
        "mine.py:Half",
    ] * 2
    lines = [
        {"id": name, "role": "gradients", "training": cell.setup.name, "length": "short"}
        | {"codec": cell.name, "seed": 50, "loss": 1.25, "share": 0.5}
        for name, cell in cells.items()
    ]
    boards.write_rows(Path(), lines)
    boards.write_rows(Path(), [line | {"loss": 9.0} for line in lines])
    assert set(pd.read_csv("rows.csv").loss) == {1.25}

    def checked() -> list[str]:
        board = boards.read(Path())
        return boards.check(board, boards.entries_named(board, "mine.py:Half"), 1)

    assert checked() == []
    (tmp_path / "mine.py").write_text((tmp_path / "mine.py").read_text() + "# changed\n")
    assert "rows.csv has no row" in checked()[0]
    with pytest.raises(UserError, match="'mine.py:Hal' is no entry .* did you mean"):
        boards.check(board, boards.entries_named(board, "mine.py:Hal"), 1)


def test_a_line_says_what_the_row_says():
    setup = training.Setup("gradients", "tiny", tiny(), tiny(), "zeros", 2.3, "guessing")
    row = {
        "id": "0123",
        "status": "finished",
        "metrics": {"test_on_loss": 1.5},
        "boundaries": {"1": {"bwd": 25, "bwd_dense": 100}},
        "diagnosis": [
            {"direction": "bwd", "error": 0.2, "bias": None},
            {"direction": "bwd", "error": 0.4, "bias": 0.1},
            {"direction": "fwd", "error": 9.0, "bias": 9.0},
        ],
        "environment": {"processor": "p", "torch": "2", "commit": "c"},
    }
    line = boards.line(boards.Cell(tiny(), setup, "short", "sign", "none"), row)
    assert (line["loss"], line["share"], line["error"], line["bias"]) == (
        1.5,
        0.25,
        pytest.approx(0.3),
        0.1,
    )
    assert line["processor"] == "p" and line["id"] == "0123"


def test_long_trainings_are_longer_and_wider_and_their_ranks_are_compared(tmp_path):
    (short, _), (long, wide) = (
        boards.trainings("gradients", length) for length in ("short", "long")
    )
    assert long.dense.data.train_blocks == 4 * short.dense.data.train_blocks
    assert long.dense.model.width == 128 and wide.dense.model.width == 16
    lines = "".join(f"{codec},none,gradients\n" for codec in boards.REPEATED)
    board = planted(tmp_path, lines, dict.fromkeys(boards.REPEATED, (0.1, 1.5)))
    assert "not yet compared" in board_page.agreement(board, 1)
    for setup in (short, long):
        for loss, run in ((1.0, setup.dense), (2.0, setup.control)):
            board.scores[run_id(*seeds([run], 1, training.SEED))] = boards.Score(loss, 1.0)
        for number, codec in enumerate(boards.REPEATED):
            (run,) = seeds([setup.coded(codec)], 1, training.SEED)
            sign = 1 if setup is short else -1
            board.scores[run_id(run)] = boards.Score(1.5 + 0.1 * sign * number, 0.1)
    text = board_page.agreement(board, 1)
    assert "with 1 seed: gradients -1.00 (n = 3), changed places: topk:0.01" in text


def test_the_page_of_choices_names_the_best_within_a_budget_or_says_unknown(tmp_path):
    """A codec is named where the lower ends of its intervals reach half of the worth."""
    entries = "".join(f"{codec},none,gradients\n" for codec in PLANTED)
    board = planted(tmp_path, entries)
    setup = training.setups("gradients")[0]
    standings = boards.standings(board, "gradients", setup, 3)
    text = choice_page.page(board, [(setup, standings)])
    lines = [line for line in text.splitlines() if "times fewer " in line and line[0] == "|"]
    assert "| [eden:1](cards/eden-1.md)" in lines[0] and "60 %" in lines[0]
    assert "| [eden:1](cards/eden-1.md)" in lines[1]
    assert "unknown; nearest: [sign](cards/sign.md)" in lines[-1]
    assert text.count("Unknown: no training is recorded.") == 2
    loud = planted(tmp_path, entries, noise=0.5)
    standings = boards.standings(loud, "gradients", setup, 3)
    assert "unknown; nearest" in choice_page.page(loud, [(setup, standings)]).split("10 times")[0]
