"""What `commsweep ddp` tells of a row."""

import math
from pathlib import Path

import pytest

from commsweep.cli.ddp import describe
from commsweep.cli.main import main
from commsweep.config import Execution
from commsweep.store import RunFolder, read_json, write_json


@pytest.mark.parametrize(
    ("timing", "says", "silent"),
    [
        (
            {"waited": 0.08, "relayed": 0.05},
            [
                "waiting, within these         80.0 ms",
                "a relay, of a core            50.0 ms (25 %)",
            ],
            "nothing",
        ),
        (
            {"waited": 0.08, "relayed": 0.0},
            ["waiting, within these         80.0 ms"],
            "a relay",
        ),  # real links, or no late
        ({}, ["exposed:"], "waiting"),
    ],
)  # earlier versions told neither
def test_a_step_is_told_with_what_it_waited_and_what_late_links_took(timing, says, silent):
    row = {
        "metrics": {},
        "steps": 60,
        "run": {"grad": {"learners": 4}},
        "error": None,
        "status": "measured",
        "seconds": {"train": 12.0},
        "gradients": {"up": 1000.0},
        "transport": [{"gradients": 60_000}],
        "timing": {"step_seconds": 0.2, "steps": 52, "parts": {"gradients": 0.1, "passes": 0.1}}
        | timing,
    }
    told = describe(row, "not compared", RunFolder(Path("x"), Path("x")))
    assert (
        "200.0 ms (middle half of 52)" in told
        and all(one in told for one in says)
        and silent not in told
    )


def test_every_way_to_execute_survives_its_file(tmp_path):
    ways = Execution("cpu", tmp_path, None, "mmap", math.inf, threads=2, points=7, by="sweep")
    write_json(tmp_path / "execution.json", ways.record())
    assert Execution.read(read_json(tmp_path / "execution.json")) == ways


def test_points_are_refused_where_nothing_is_trained_to_its_end(capsys):
    assert main(["ddp", "digits_adacomp", "--points", "3", "--steps", "2"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
