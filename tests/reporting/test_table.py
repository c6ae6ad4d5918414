"""Tables for a terminal, nothing wider than it and nothing lost; for LaTeX; as csv."""

from __future__ import annotations

import io
import shutil
import subprocess

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commsweep.reporting import statistics
from commsweep.reporting.style import latex_figure
from commsweep.reporting.table import BYTES, Cell, Table, shortened

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


def numbers():
    """A table with everything that LaTeX takes amiss."""
    scores = Cell((-0.91, -0.93, -0.92), ("a", "b", "c"), 3)
    lost = Cell((), (), 3, (("diverged", 3),))
    sent = Cell((1234.0,), ("a",), 1, unit=BYTES)
    header = ["fwd \\ bwd", "score", "bytes"]
    title = "A & B: 50 % of #1_x"
    return Table("bits", title, header, [["2 bit", scores, sent], ["a_b", lost, sent]])


def test_latex_has_numbers_in_columns_with_interval_and_n():
    text = numbers().latex()
    assert r"\caption{A \& B: 50 \% of \#1\_x}" in text and r"\label{tab:bits}" in text
    assert (
        r"{fwd \textbackslash{}} &" in text
        and r"\begin{tabular}{lS[table-format=-2.1]lrS[table-format=4.0]}" in text
    )
    assert r"2 bit & -92.0 & [\num{-94.5}, \num{-89.5}] & 3 & 1234 \\" in text
    assert r"a\_b & {--} & diverged & 0 & 1234 \\" in text
    assert r"\toprule" in text and r"\begin{table*}[t]" in text


def test_csv_has_the_labels_of_a_row_and_its_interval_in_columns_of_their_own():
    frame = pd.read_csv(io.StringIO(numbers().csv()))
    assert list(frame) == ["fwd \\ bwd", "column", "shown", "mean", "low", "high", "n", "runs"]
    first = frame.iloc[0]
    assert first.low == pytest.approx(statistics.interval([-0.91, -0.93, -0.92])[0])
    assert first.n == 3 and first.runs == "a b c" and frame.iloc[2].shown == "diverged"


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no TeX here")
def test_tex_compiles_the_tables_and_captions(tmp_path):
    wide = Table("wide", "W", ["s", *"abc"], [["x", *[Cell((0.1, 0.2), ("a",), 2)] * 3]])
    body = numbers().latex() + wide.latex() + latex_figure("one", "50 % ± #1 \\", True, "png")
    body = body.replace(r"\includegraphics", r"\iffalse\includegraphics").replace(
        "{one.png}", "{one.png}\\fi"
    )
    text = "\n".join(
        [
            r"\documentclass[twocolumn]{article}",
            r"\usepackage{booktabs,siunitx,graphicx}",
            r"\begin{document}",
            body,
            r"\end{document}",
        ]
    )
    (tmp_path / "paper.tex").write_text(text)
    command = ["pdflatex", "-halt-on-error", "-interaction=nonstopmode", "paper.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and (tmp_path / "paper.pdf").exists(), done.stdout[-2000:]
