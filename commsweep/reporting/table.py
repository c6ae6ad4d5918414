"""Tables as pure functions of the rows; Markdown, LaTeX (booktabs, siunitx) and CSV.

Every number is a mean over n seeds: in Markdown with the sample standard deviation, in LaTeX and
CSV with the 95 % interval. The CSV names the run folders behind it. A missing cell says missing, a
diverged one diverged, a failed one failed.
"""

from __future__ import annotations

import csv
import io
import math
import os
import textwrap
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from commsweep.reporting import statistics, worth
from commsweep.reporting.words import latex
from commsweep.store import UNFINISHED

ON, OFF = "test_on_acc", "test_off_acc"
# How a cell is shown; shares and bytes need no spread.
PERCENT, SHARE, BYTES, PLAIN, RATE, FINE = "percent", "share", "bytes", "plain", "rate", "fine"
SPREAD = (PERCENT, PLAIN)


@dataclass(frozen=True)
class Cell:
    """A number of a table, and the runs that it rests on."""

    values: tuple[float, ...]
    ids: tuple[str, ...]
    asked: int  # runs the sweep names for this cell
    lost: tuple[tuple[str, int], ...] = ()  # runs that ended without a number, by outcome
    unit: str = PERCENT

    @property
    def mean(self) -> float:
        return sum(self.values) / len(self.values)

    @property
    def sd(self) -> float | None:
        """Sample standard deviation; None below two values."""
        return pd.Series(self.values).std() if len(self.values) > 1 else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the mean; None below two values."""
        return statistics.interval(self.values)

    @property
    def factor(self) -> float:
        """The factor between a value and what is shown of it: 100 of a share in percent."""
        return 100.0 if self.unit in (PERCENT, SHARE, FINE) else 1.0

    def text(self, spread: str = "±") -> str:
        """Return what a table shows."""
        if not self.values:
            return self.lost[0][0] if self.lost else "missing"
        if self.unit == BYTES:
            return f"{self.mean:,.0f}"
        if self.unit == RATE:
            return f"{self.mean:.1f}"
        if self.unit == FINE:
            return f"{100 * self.mean:.2g}"
        if self.unit == PLAIN:
            out = _short(self.mean) + (
                f" {spread} {_short(self.sd)}" if self.sd is not None else ""
            )
        else:
            out = f"{100 * self.mean:.1f}"
        if self.sd is not None and self.unit == PERCENT:
            out += f" {spread} {100 * self.sd:.1f}"
        missing = self.asked - len(self.values) - sum(count for _, count in self.lost)
        lost = [
            f"{count} {status}" for status, count in (*self.lost, ("missing", missing)) if count
        ]
        return out + (f" ({', '.join(lost)})" if lost else "")


@dataclass
class Table:
    """A titled grid of labels and cells."""

    name: str
    title: str
    header: list[str]
    rows: list[list[Cell | str]] = field(default_factory=list)

    def texts(self, spread: str = "±") -> list[list[str]]:
        """The rows as shown."""
        return [
            [cell.text(spread) if isinstance(cell, Cell) else cell for cell in row]
            for row in self.rows
        ]

    def markdown(self) -> str:
        """A Markdown table under its title, columns aligned."""
        lines = [self.header, *self.texts()]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.header))]

        def show(line: list[str]) -> str:
            return (
                "| "
                + " | ".join(text.ljust(width) for text, width in zip(line, widths, strict=True))
                + " |"
            )

        rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
        return (
            "\n".join([f"**{self.title}**", "", show(lines[0]), rule, *map(show, lines[1:])]) + "\n"
        )

    def terminal(self, width: int, most: int) -> list[str]:
        """Return the lines of the table for a terminal of this width, and at most `most` rows:
        heads in several lines, columns that do not fit below the others, the first one repeated.
        """
        cells = self.texts()
        columns = [
            _column(head, [row[index] for row in cells[:most]], width // 2)
            for index, head in enumerate(self.header)
        ]
        lines, left = [], columns[1:]
        while left:
            block = [columns[0]]
            while left and sum(_width(column) + 2 for column in [*block, left[0]]) <= width + 2:
                block.append(left.pop(0))
            if len(block) == 1:  # wider than the terminal by itself
                block.append(left.pop(0))
            lines += [*_aligned(block), ""]
        if len(cells) > most:
            lines.append(f"... {len(cells) - most} further rows in tables/{self.name}.md")
        return lines

    def latex(self) -> str:
        """A booktabs table with siunitx columns: of each number mean, 95 % interval and n.

        It needs the LaTeX packages booktabs and siunitx.
        """
        columns: dict[tuple[str, str], list[Any]] = {}
        formats: dict[tuple[str, str], str] = {}
        kinds = []  # of the columns, for tabular
        for at, name in enumerate(self.header):
            head = latex(name)
            cells = [row[at] for row in self.rows]
            if not any(isinstance(value, Cell) for value in cells):
                columns[_lines(head)] = [latex(str(value)) for value in cells]
                kinds.append("l")
                continue
            decimals = max((_decimals(value) for value in cells), default=0)
            scatters = any(isinstance(value, Cell) and value.unit in SPREAD for value in cells)
            key = (head, "mean") if scatters else _lines(head)
            means = columns[key] = [_mean(value) for value in cells]
            formats[key] = f"{{:.{decimals}f}}"
            kinds.append(_column_kind(means, decimals))
            if scatters:
                columns[head, r"95\,\%"] = [_range(value, decimals) for value in cells]
                kinds.append("l")
                if SEEDS not in self.header:
                    columns[head, "n"] = [_n(value) for value in cells]
                    kinds.append("r")
        frame = pd.DataFrame(columns)
        frame.columns = pd.MultiIndex.from_tuples(columns)
        styled = frame.style.hide(axis="index").format(formats, na_rep="{--}")
        text = styled.to_latex(
            siunitx=True,
            column_format="".join(kinds),
            hrules=True,
            position="t",
            position_float="centering",
            multicol_align="c",
            environment="table*" if len(columns) > NARROW else "table",
            caption=latex(self.title),
            label=f"tab:{self.name}",
        )
        return text.replace(r"\begin{tabular}", COMPACT + r"\begin{tabular}", 1)

    def csv(self) -> str:
        """A line for each number: the labels of its row, column, shown, mean, low and high end of
        the 95 % interval, n, run ids.
        """
        labels = [
            at
            for at in range(len(self.header))
            if all(isinstance(row[at], str) for row in self.rows)
        ]
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        numbers = ["column", "shown", "mean", "low", "high", "n", "runs"]
        writer.writerow([*(self.header[at] for at in labels), *numbers])
        for row in self.rows:
            for name, value in zip(self.header, row, strict=True):
                if not isinstance(value, Cell):
                    continue
                low, high = value.interval or ("", "")
                mean = value.mean if value.values else ""
                line = [name, value.text(), mean, low, high, len(value.values)]
                writer.writerow([*(row[at] for at in labels), *line, " ".join(value.ids)])
        return out.getvalue()


NARROW = 4  # columns that one column of a page has room for
SEEDS = "seeds"  # the column of a table that says n for all cells of a row
COMPACT = "\\small\n\\setlength{\\tabcolsep}{3pt}\n"


def _lines(head: str) -> tuple[str, str]:
    """A head in two lines, parted at the space nearest to its middle."""
    spaces = [at for at, letter in enumerate(head) if letter == " "]
    if not spaces:
        return head, ""
    at = min(spaces, key=lambda at: abs(at - len(head) / 2))
    return head[:at], head[at + 1 :]


def _column_kind(means: list[float], decimals: int) -> str:
    """A siunitx column just as wide as its numbers."""
    numbers = [number for number in means if math.isfinite(number)]
    digits = max((len(str(int(abs(number)))) for number in numbers), default=1)
    sign = "-" if any(number < 0 for number in numbers) else ""
    return f"S[table-format={sign}{digits}.{decimals}]"


def _mean(value: Cell | str) -> float:
    """The mean of a cell in the unit that it is shown in; NaN of one without a number."""
    if isinstance(value, str) or not value.values:
        return math.nan
    return value.mean * value.factor


def _n(value: Cell | str) -> int:
    return len(value.values) if isinstance(value, Cell) else 0


def _decimals(value: Cell | str) -> int:
    if isinstance(value, str) or not value.values or value.unit == BYTES:
        return 0
    if value.unit == PLAIN:
        return 2 if abs(value.mean) < 100 else 0
    return 1


def _range(value: Cell | str, decimals: int) -> str:
    """The interval of a cell in LaTeX, and what is missing in words."""
    if isinstance(value, str):
        return latex(value)
    if not value.values:
        return latex(value.text())
    if value.interval is None:
        return ""
    low, high = (f"\\num{{{end * value.factor:.{decimals}f}}}" for end in value.interval)
    return f"[{low}, {high}]"


def cell(rows: pd.DataFrame, metric: str, unit: str = PERCENT) -> Cell:
    """The cell of these runs (one a seed). Raises ValueError when they are not of one setting:
    `results.distinct` tells them apart.
    """
    if "setting_id" in rows and rows.setting_id.nunique() > 1:
        first = ", ".join(rows.method.unique()[:4])
        raise ValueError(f"{rows.setting_id.nunique()} settings in one cell: {first}")
    values = (
        rows[metric][rows.status == "finished"].dropna()
        if metric in rows
        else pd.Series(dtype=float)
    )
    statuses = Counter(rows.status)
    lost = tuple((status, n) for status in UNFINISHED if (n := statuses[status]))
    return Cell(tuple(values), tuple(rows.id.loc[values.index]), len(rows), lost, unit)


Column = tuple[list[str], list[str]]  # lines of a head, and of each row one


def _column(head: str, texts: list[str], most: int) -> Column:
    """Return a column with its head in lines no wider than its texts, or than a word of the head.
    Texts beyond `most` characters end in dots; where they would look alike then, the dots stand
    where they begin to differ.
    """
    texts = shortened(texts, most)
    widest = max([8, *map(len, texts), *map(len, head.split())])
    return textwrap.wrap(head, widest), texts


def shortened(texts: list[str], most: int) -> list[str]:
    """Return texts of at most `most` characters, in which those that differ still do, where that is
    possible.
    """
    cut = [text if len(text) <= most else f"{text[: most - 3]}..." for text in texts]
    out = []
    for text, short in zip(texts, cut, strict=True):
        alike = [full for full, shown in zip(texts, cut, strict=True) if shown == short]
        if len(set(alike)) > 1 and len(text) > most:
            same = len(os.path.commonprefix(alike))  # noqa: RUF071 (letters, not folders)
            word = text.rfind(" ", 0, same) + 1  # the differing word in full
            tail = text[word:][: most // 2]
            short = f"{text[: most - 3 - len(tail)]}...{tail}"
        out.append(short)
    return out


def _width(column: Column) -> int:
    return max(map(len, [*column[0], *column[1]]))


def _aligned(block: list[Column]) -> list[str]:
    """Return the lines of columns beside each other, heads down to a rule."""
    height = max(len(head) for head, _ in block)
    padded = [
        [*[""] * (height - len(head)), *head, "-" * _width((head, texts)), *texts]
        for head, texts in block
    ]
    widths = [len(column[height]) for column in padded]
    lines = zip(*padded, strict=True)
    return [
        "  ".join(text.ljust(wide) for text, wide in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]


def _short(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:.0f}" if value < 1e5 else f"{value:.1e}"


def settings_table(frame: pd.DataFrame) -> Table:
    """Every setting of any sweep: what it keeps of the message's worth, where the sweep has the
    control; how it scores and what it sends; dense first, then the best.
    """
    floors = worth.floors_text(frame)
    scored = [(ON, OFF, PERCENT, "accuracy %")] if ON in frame and frame[ON].notna().any() else []
    if "test_on_ppl" in frame and frame["test_on_ppl"].notna().any():
        scored.append(("test_on_ppl", "test_off_ppl", PLAIN, "perplexity"))
    table = Table(
        "settings",
        " ".join(["All settings: test score of the last epoch, and bytes.", floors]).strip(" ."),
        [
            "Model",
            "Data",
            "Setting",
            "score",
            "worth kept",
            "compressed inference",
            "dense inference",
            "seeds",
            "fwd bytes/step",
            "bwd bytes/step",
            "boundaries (% of dense)",
            "gradients (rate)",
        ],
    )
    rows_, keeps = [], worth.of_settings(frame)
    for method, rows in frame.groupby("method", sort=False):
        worth_kept = keeps.get(str(rows.setting_id.iloc[0]))
        for on, off, unit, suffix in scored or [(ON, OFF, PERCENT, "")]:
            score = cell(rows, on, unit)
            if len(scored) > 1 and not score.values:
                continue
            rank = ("~", True, 0.0)
            if score.values:
                better = -score.mean if unit == PERCENT else score.mean
                rank = (suffix, not str(method).startswith("dense"), better)
            sent = [cell(rows, f"bytes.{side}_per_step", BYTES) for side in ("fwd", "bwd")]
            rate = cell(rows, "gradients.rate", RATE)
            rows_.append(
                (
                    rank,
                    [
                        rows["model.name"].iloc[0],
                        rows["data.name"].iloc[0],
                        str(method),
                        suffix,
                        worth_kept.text() if worth_kept else "-",
                        score,
                        cell(rows, off, unit),
                        str(len(score.values)),
                        *sent,
                        cell(rows, "bytes.ratio", SHARE),
                        rate if rate.values else "-",
                    ],
                )
            )
            if not score.values:
                break
    table.rows = [row for _, row in sorted(rows_, key=lambda row: row[0])]
    for column in (11, 4, 3, 1, 0):  # what is the same everywhere says nothing
        if len(
            {row[column] if isinstance(row[column], str) else "." for row in table.rows}
        ) < 2 and all(isinstance(row[column], str) for row in table.rows):
            table.header.pop(column)
            for row in table.rows:
                row.pop(column)
    return table
