"""Tables for a terminal: nothing is wider than it, and nothing is lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commsweep.reporting.table import Cell, Table, shortened

HEADER = ["Setting", "worth kept", "compressed inference", "fwd bytes/step", "seeds"]


def table(count):
    rows = [
        [f"TopK {k} %", f"{k} % [1, 2]", Cell((0.5, 0.7), ("a", "b"), 2), f"{k:,}00,000", "2"]
        for k in range(count)
    ]
    return Table("settings", "All settings", HEADER, rows)


@given(st.integers(30, 200), st.integers(1, 12), st.integers(1, 12))
def test_every_number_stands_within_the_width(width, count, most):
    lines = table(count).terminal(width, most)
    assert max(map(len, lines)) <= width or width < 42  # the last line's words
    text = "\n".join(lines)
    for row in table(count).texts()[:most]:
        assert all(shown in text for shown in row)
    assert (f"... {count - most} further rows" in text) == (count > most)
    if width == 200:
        assert lines[2].startswith("---")


def test_columns_that_do_not_fit_stand_below_behind_the_first():
    lines = table(2).terminal(40, 2)
    heads = [line for line in lines if line.startswith("Setting")]
    assert len(heads) == 2 and "worth kept" in heads[0] and "seeds" in heads[1]
    assert sum(line.startswith("TopK 1 %") for line in lines) == 2


@pytest.mark.parametrize("width", [20, 40])
def test_a_long_name_ends_in_dots(width):
    wide = Table("settings", "", ["Setting", "score"], [["a" * 100, "1"]])
    line = wide.terminal(width, 1)[-2]
    assert line.startswith("a" * (width // 2 - 3) + "...") and line.endswith("1")


def test_texts_that_are_cut_still_differ():
    """What varies stands at the end, and a cut would hide it."""
    names = [
        "TopK 20 %, 4 bit values (model cuts layer1)",
        "TopK 20 %, 4 bit values (model cuts l2)",
    ]
    cut = shortened([*names, "dense"], 30)
    assert len(set(cut)) == 3 and all(len(text) <= 30 for text in cut)
    assert cut[0].endswith("layer1)") and cut[1].endswith("l2)")
    assert shortened(["a" * 40, "a" * 40], 10) == ["aaaaaaa..."] * 2
