"""Tables as pure functions of the rows; Markdown, LaTeX (booktabs) and CSV.

Every number is mean and sample standard deviation over n seeds, and the CSV names the run folders
behind it. A missing cell says missing, a diverged one diverged, a failed one failed.
"""

from __future__ import annotations

import csv
import io
import os
import textwrap
from collections import Counter
from dataclasses import dataclass, field

import pandas as pd

from commsweep.reporting import worth
from commsweep.store import UNFINISHED

ON, OFF = "test_on_acc", "test_off_acc"
# How a cell is shown; shares and bytes need no spread.
PERCENT, SHARE, BYTES, PLAIN, RATE, FINE = "percent", "share", "bytes", "plain", "rate", "fine"


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
        """A booktabs table."""

        def show(line: list[str]) -> str:
            return (
                " & ".join(text.replace("%", r"\%").replace("_", r"\_") for text in line) + r" \\"
            )

        body = [show(line) for line in self.texts(spread=r"$\pm$")]
        return (
            "\n".join(
                [
                    r"\begin{table}",
                    r"\centering",
                    rf"\caption{{{self.title.replace('%', chr(92) + '%')}}}",
                    rf"\begin{{tabular}}{{{'l' * len(self.header)}}}",
                    r"\toprule",
                    show(self.header),
                    r"\midrule",
                    *body,
                    r"\bottomrule",
                    r"\end{tabular}",
                    r"\end{table}",
                ]
            )
            + "\n"
        )

    def csv(self) -> str:
        """Return a line for each number: row labels, column, mean, sd, n, run ids."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(["row", "column", "shown", "mean", "sd", "n", "runs"])
        for row in self.rows:
            label = " | ".join(cell for cell in row if isinstance(cell, str))
            for name, cell in zip(self.header, row, strict=True):
                if isinstance(cell, Cell):
                    numbers = [cell.mean, cell.sd, len(cell.values)] if cell.values else ["", "", 0]
                    writer.writerow([label, name, cell.text(), *numbers, " ".join(cell.ids)])
        return out.getvalue()


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
