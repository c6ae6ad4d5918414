"""Each folder of results says how its rows came about, as its rows have it."""

from __future__ import annotations

import re

import pandas as pd
import pytest

from docs.tools import provenance

FOLDERS = provenance.folders()


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_every_folder_says_how_to_repeat_it(folder):
    end = (folder / "README.md").read_text(encoding="utf-8").partition(provenance.HEAD)[2]
    said = dict(re.findall(r"^\* \*\*([^*]+)\*\*: (.+)\.$", end, re.MULTILINE))
    assert tuple(said) == provenance.LABELS
    assert re.fullmatch(r"[0-9a-f]{12}", said["Commit"]) and "torch" in said["Versions"]
    if folder.name in provenance.BY_HAND:
        return
    measured = provenance.numbers(pd.read_csv(folder / "rows.csv", low_memory=False))
    assert said["Hours"] == measured["Hours"] and said["Seeds"] == measured["Seeds"]
    assert measured["differ"] in said["Another machine"]


def test_what_two_seeds_differ_by_is_of_one_setting():
    """Two settings far apart, in each of which two seeds differ by 2 points."""
    frame = pd.DataFrame(
        {
            "setting_id": ["a", "a", "b", "b"],
            "seed": [0, 1, 0, 1],
            "seconds.wall": [1800.0] * 4,
            "test_on_acc": [0.90, 0.92, 0.10, 0.12],
        }
    )
    measured = provenance.numbers(frame)
    assert measured["Hours"].startswith("2 of wall time, of 4 runs")
    assert measured["Seeds"].startswith("2 (0 to 1)")
    # 2.77 standard deviations, each 2 points over the root of 2
    assert measured["differ"] == "3.9 points of accuracy"
