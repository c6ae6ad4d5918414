"""The paper's tables, each a pure function of the rows; Markdown, LaTeX (booktabs) and CSV.

Every number is mean and sample standard deviation over n seeds, and the CSV names the run folders behind
it. A missing cell says missing, a diverged one diverged, a failed one failed.
"""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass, field

import pandas as pd

from commsweep.analysis.results import base, distinct
from commsweep.experiments.store import UNFINISHED

ON, OFF = "test_on_acc", "test_off_acc"
# How a cell is shown; shares and bytes need no spread.
PERCENT, SHARE, BYTES, PLAIN, RATE, FINE = "percent", "share", "bytes", "plain", "rate", "fine"


@dataclass(frozen=True)
class Cell:
    """One number of a table, and what it rests on."""

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
        """What a table shows."""
        if not self.values:
            return self.lost[0][0] if self.lost else "missing"
        if self.unit == BYTES:
            return f"{self.mean:,.0f}"
        if self.unit == RATE:
            return f"{self.mean:.1f}"
        if self.unit == FINE:
            return f"{100 * self.mean:.2g}"
        if self.unit == PLAIN:
            out = _short(self.mean) + (f" {spread} {_short(self.sd)}" if self.sd is not None else "")
        else:
            out = f"{100 * self.mean:.1f}"
        if self.sd is not None and self.unit == PERCENT:
            out += f" {spread} {100 * self.sd:.1f}"
        missing = self.asked - len(self.values) - sum(count for _, count in self.lost)
        lost = [f"{count} {what}" for what, count in (*self.lost, ("missing", missing)) if count]
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
        return [[cell.text(spread) if isinstance(cell, Cell) else cell for cell in row] for row in self.rows]

    def markdown(self) -> str:
        """A Markdown table under its title, columns aligned."""
        lines = [self.header, *self.texts()]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.header))]
        def show(line: list[str]) -> str:
            return "| " + " | ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) + " |"
        rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
        return "\n".join([f"**{self.title}**", "", show(lines[0]), rule, *map(show, lines[1:])]) + "\n"

    def latex(self) -> str:
        """A booktabs table."""
        def show(line: list[str]) -> str:
            return " & ".join(text.replace("%", r"\%").replace("_", r"\_") for text in line) + r" \\"
        body = [show(line) for line in self.texts(spread=r"$\pm$")]
        return "\n".join([
            r"\begin{table}", r"\centering", rf"\caption{{{self.title.replace('%', chr(92) + '%')}}}",
            rf"\begin{{tabular}}{{{'l' * len(self.header)}}}", r"\toprule", show(self.header), r"\midrule",
            *body, r"\bottomrule", r"\end{tabular}", r"\end{table}"]) + "\n"

    def csv(self) -> str:
        """One line a number: row labels, column, mean, sd, n, run ids."""
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
    """The cell of these runs (one a seed). Raises ValueError when they are not of one setting: `results.distinct`
    tells them apart."""
    if "setting" in rows and rows.setting.nunique() > 1:
        raise ValueError(f"{rows.setting.nunique()} settings in one cell: {', '.join(rows.method.unique()[:4])}")
    done = rows[rows.status == "finished"]
    values = done[metric].dropna() if metric in done else pd.Series(dtype=float)
    lost = tuple((status, n) for status in UNFINISHED if (n := int((rows.status == status).sum())))
    return Cell(tuple(values), tuple(done.id.loc[values.index]), len(rows), lost, unit)


def _short(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:.0f}" if value < 1e5 else f"{value:.1e}"


def image_tables(frame: pd.DataFrame) -> list[Table]:
    """Every table of the paper's image section that the rows name cells for."""
    made = [topk(frame), *quantization(frame), feedback(frame), aqsgd(frame)]
    return [table for table in made if len(table.rows)]


def settings_table(frame: pd.DataFrame) -> Table:
    """Every setting of any sweep: what it sends and how it scores, best first."""
    scored = [(ON, OFF, PERCENT, "accuracy %")] if ON in frame and frame[ON].notna().any() else []
    if "test_on_ppl" in frame and frame["test_on_ppl"].notna().any():
        scored.append(("test_on_ppl", "test_off_ppl", PLAIN, "perplexity"))
    table = Table("settings", "All settings: test score of the last epoch, and bytes", [
        "Model", "Data", "Setting", "score", "compressed inference", "dense inference", "seeds", "fwd bytes/step",
        "bwd bytes/step", "boundaries (% of dense)", "gradients (rate)"])
    made = []
    for method, rows in frame.groupby("method", sort=False):
        for on, off, unit, what in scored or [(ON, OFF, PERCENT, "")]:
            score = cell(rows, on, unit)
            if len(scored) > 1 and not score.values:
                continue
            rank = (what, -score.mean if unit == PERCENT else score.mean) if score.values else ("~", 0.0)
            sent = [cell(rows, f"bytes.{side}_per_step", BYTES) for side in ("fwd", "bwd")]
            rate = cell(rows, "gradients.rate", RATE)
            made.append((rank, [rows["model.name"].iloc[0], rows["data.name"].iloc[0], str(method), what, score,
                                cell(rows, off, unit), str(len(score.values)), *sent, cell(rows, "bytes.ratio", SHARE),
                                rate if rate.values else "-"]))
            if not score.values:
                break
    table.rows = [row for _, row in sorted(made, key=lambda one: one[0])]
    for column in (10, 3, 1, 0):  # what is the same everywhere says nothing
        if len({row[column] if isinstance(row[column], str) else "." for row in table.rows}) < 2 and all(
                isinstance(row[column], str) for row in table.rows):
            table.header.pop(column)
            for row in table.rows:
                row.pop(column)
    return table


def topk(frame: pd.DataFrame) -> Table:
    """TopK at each level, inference with and without compression."""
    table = _listing("topk", "TopK both ways: test accuracy (%) of the last epoch", ["K"])
    plain = frame[with_feedback(frame, "none", "none")]
    for label, rows in [*distinct(plain[kinds(plain, "none", "none")], "dense"), *levels(plain)]:
        if len(rows):
            table.rows.append([label, *_scores(rows)])
    return table if len(table.rows) > 1 else _listing("topk", "", [])


def feedback(frame: pd.DataFrame) -> Table:
    """TopK with EF, EF-mixed and EF21 beside plain TopK at the same levels."""
    table = _listing("feedback", "TopK with error feedback: test accuracy (%) of the last epoch", ["Feedback", "K"])
    names = {"ef": "EF", "ef_mixed": "EF-mixed", "ef21": "EF21"}
    corrected = {kind: dict(levels(frame[with_feedback(frame, kind, kind)])) for kind in names}
    present = {label.split(" (")[0] for by_level in corrected.values() for label in by_level}
    plain = {label: rows for label, rows in levels(frame[with_feedback(frame, "none", "none")])
             if label.split(" (")[0] in present}
    for name, by_level in [("none", plain), *((names[kind], corrected[kind]) for kind in names)]:
        table.rows += [[name, label, *_scores(rows)] for label, rows in by_level.items()]
    return table if present else _listing("feedback", "", [])


def aqsgd(frame: pd.DataFrame) -> Table:
    """AQ-SGD with TopK, by augmentation arm."""
    table = _listing("aqsgd", "AQ-SGD with TopK (activations): test accuracy (%) of the last epoch",
                     ["Augmentation", "K"])
    rows = frame[with_feedback(frame, "aqsgd", "none")]
    for (augment, fixed), arm in rows.groupby(["data.augment", "data.fixed_augment"]):
        name = augment if augment == "none" else f"{augment}, {'fixed per sample' if fixed else 'new each epoch'}"
        table.rows += [[name, label, *_scores(level)] for label, level in levels(arm)]
    return table


def quantization(frame: pd.DataFrame) -> list[Table]:
    """Bit-width grids, one a scale and inference mode: forward bits down, backward bits across."""
    tables = []
    sides = [f"{side}.compressor.{what}" for side in ("fwd", "bwd") for what in ("kind", "bits", "scale")]
    if not set(sides) <= set(frame.columns):
        return []
    plain = frame[with_feedback(frame, "none", "none")]
    sides = plain[["fwd.compressor.kind", "bwd.compressor.kind"]]
    plain = plain[sides.isin(["uniform", "none"]).all(axis=1)]
    either = plain[(sides.loc[plain.index] == "uniform").any(axis=1)]
    dense = plain.drop(either.index)
    scale = either["fwd.compressor.scale"].fillna(either["bwd.compressor.scale"])
    for name, rows in either.groupby(scale):
        for turn, (_, part) in enumerate(rows.groupby(_rest(rows), sort=False)):
            title = str(name) + ("" if not turn else f" ({part.method.iloc[0].partition(' (')[2] or turn + 1}")
            pool = pd.concat([part, dense])
            pool = pool[_rest(pool).isin(_rest(part))]
            for metric, mode in ((ON, "on"), (OFF, "off")):
                tables.append(_bit_grid(part, pool, title, f"{name}{turn + 1 if turn else ''}", metric, mode))
    return tables


def _rest(rows: pd.DataFrame) -> pd.Series:
    """What a grid of bits holds equal: all but the bits and whether a side is compressed; scales have one rounding."""
    more = [rows[f"{side}.compressor.{key}"].fillna(default).astype(str) if f"{side}.compressor.{key}" in rows else
            pd.Series(default, index=rows.index) for side in ("fwd", "bwd")
            for key, default in (("rounding", "nearest"), ("group", "128.0"))]
    return sum((one + "|" for one in more), base(rows, "fwd.compressor.", "bwd.compressor.") + "|")


def _bit_grid(rows: pd.DataFrame, pool: pd.DataFrame, scale: str, name: str, metric: str, mode: str) -> Table:
    fwd, bwd = (sorted(rows[f"{side}.compressor.bits"].dropna().unique(), reverse=True) for side in ("fwd", "bwd"))
    title = f"Min-max quantization, scale per {scale}, inference with compression {mode}: test accuracy (%)"
    table = Table(f"quantization_{name}_{mode}", title,
                  ["fwd \\ bwd", "dense", *(f"{bits:g} bit" for bits in bwd)])
    for down in [None, *fwd]:
        line = [_pick(_pick(pool, "fwd", down), "bwd", across) for across in [None, *bwd]]
        table.rows.append(["dense" if down is None else f"{down:g} bit",
                           *(cell(part, metric) if len(part) else "" for part in line)])
    return table


def _pick(rows: pd.DataFrame, side: str, bits: float | None) -> pd.DataFrame:
    if bits is None:
        return rows[rows[f"{side}.compressor.kind"] == "none"]
    return rows[rows[f"{side}.compressor.bits"] == bits]


def _listing(name: str, title: str, labels: list[str]) -> Table:
    columns = ["compressed inference", "dense inference", "seeds", "fwd bytes/step", "bwd bytes/step"]
    return Table(name, title, [*labels, *columns, "bytes (% of dense)"])


def _scores(rows: pd.DataFrame) -> list[Cell | str]:
    n = int((rows.status == "finished").sum())
    sent = [cell(rows, f"bytes.{side}_per_step", BYTES) for side in ("fwd", "bwd")]
    return [cell(rows, ON), cell(rows, OFF), str(n), *sent, cell(rows, "bytes.ratio", SHARE)]


def with_feedback(frame: pd.DataFrame, fwd: str, bwd: str) -> pd.Series:
    """Which rows have these feedbacks."""
    return (frame["fwd.feedback.kind"] == fwd) & (frame["bwd.feedback.kind"] == bwd)


def kinds(frame: pd.DataFrame, fwd: str, bwd: str) -> pd.Series:
    """Which rows have these compressors."""
    return (frame["fwd.compressor.kind"] == fwd) & (frame["bwd.compressor.kind"] == bwd)


def levels(frame: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Runs with TopK at the same level both ways, by level, mildest first."""
    if "fwd.compressor.ratio" not in frame or "bwd.compressor.ratio" not in frame:
        return []
    both = frame[frame["fwd.compressor.kind"].isin(["topk", "topk_strict"])
                 & (frame["fwd.compressor.kind"] == frame["bwd.compressor.kind"])
                 & (frame["fwd.compressor.ratio"] == frame["bwd.compressor.ratio"])]
    groups = both.groupby("fwd.compressor.ratio")
    return [one for ratio in sorted(groups.groups, reverse=True)
            for one in distinct(groups.get_group(ratio), f"{100 * ratio:g} %")]
