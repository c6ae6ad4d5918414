"""Tables as people have them: any usual separator, decimal commas, percent and units in cells.

A cell's text is never a comment. A cell "nan" or "inf" is a number that is not finite; an empty one
is missing. What could be read in two ways is refused.
"""

from __future__ import annotations

import codecs
import csv
import io
import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from commsweep.errors import UserError

MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
NUMBER = re.compile(r"[-+−]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", re.IGNORECASE)
THOUSANDS = re.compile(r"[-+−]?\d{1,3}(,\d{3})+(\.\d+)?")
COMMA = re.compile(r"([-+−]?\d+),(\d+)(e[-+]?\d+)?", re.IGNORECASE)
UNIT = re.compile(r"\s*(%|[A-Za-zµ]+(/[A-Za-z]+)?)$")
NOT_FINITE = {"nan": math.nan, "inf": math.inf, "infinity": math.inf}
MISSING = ("", "-", "n/a", "na", "none", "null")


def read(path: Path) -> pd.DataFrame:
    """The table of a text file, columns of numbers as numbers.

    Raises:
        UserError: it is empty or no text, two columns have one name, a row has too many fields, or
            a cell could be two numbers, naming line and cell.
    """
    text = _text(path)
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise UserError(f"'{path}' has no rows")
    rows = _fields(lines)
    if not rows:
        raise UserError(f"'{path}' has no rows")
    names = [name.strip() for name in rows[0]]
    for name, count in Counter(names).items():
        if count > 1:
            raise UserError(f"'{path}': {count} columns are named '{name}'; rename all but one")
    columns: dict[str, list[str]] = {name: [] for name in names}
    for number, row in enumerate(rows[1:], 2):
        if len(row) > len(names) and any(cell.strip() for cell in row[len(names) :]):
            raise UserError(
                f"'{path}': row {number} has {len(row)} fields, the header {len(names)}; quote "
                "cells that hold the separator"
            )
        padded = [*row, *[""] * len(names)]
        for name, cell in zip(names, padded, strict=False):
            columns[name].append(cell.strip())
    return pd.DataFrame({name: typed(name, cells) for name, cells in columns.items()})


def _text(path: Path) -> str:
    content = path.read_bytes()
    encoding = next((name for mark, name in MARKS if content.startswith(mark)), "utf-8")
    if encoding != "utf-16" and b"\0" in content:
        line = content[: content.index(b"\0")].count(b"\n") + 1
        raise UserError(f"'{path}', line {line}: a NUL byte; this is no text, or a torn file")
    try:
        return content.decode(encoding)
    except UnicodeDecodeError as error:
        raise UserError(
            f"'{path}' is no {encoding} text ({error.reason}); save it as UTF-8"
        ) from None


def _fields(lines: Sequence[str]) -> list[list[str]]:
    """The rows by field, without comments: lines that begin with # and have another number of
    fields than the table.
    """
    plain = [line for line in lines if not line.startswith("#")] or list(lines)
    separator = max(",;\t|", key=plain[0].count)
    if separator not in plain[0]:
        if len(plain[0].split()) < 2:
            return [[line] for line in plain]
        return [line.split() for line in plain]

    def parse(texts: Sequence[str]) -> list[list[str]]:
        joined = io.StringIO("\n".join(texts))
        return list(csv.reader(joined, delimiter=separator, skipinitialspace=True))

    width = Counter(len(row) for row in parse(plain)).most_common(1)[0][0]
    table_lines = []
    for line in lines:
        if not line.startswith("#") or len(parse([line])[0]) == width:
            table_lines.append(line)
    return parse(table_lines)


def typed(name: str, cells: Sequence[str]) -> pd.Series:
    """A column as numbers where all its cells are some, else as texts; missing cells are None.

    Raises:
        UserError: its commas may be decimal or group thousands.
    """
    filled = [cell for cell in cells if cell.lower() not in MISSING]
    numbers = [cell for cell in filled if cell.lower().lstrip("+-") not in NOT_FINITE]
    bare = [UNIT.sub("", cell) for cell in numbers]
    units = {cell[len(short) :].strip() for cell, short in zip(numbers, bare, strict=True)}
    if len(units) == 1 and units != {""} and all(map(_is_number, bare)):
        cells = [UNIT.sub("", cell) if cell in numbers else cell for cell in cells]
        numbers = bare
    if not numbers or not all(map(_is_number, numbers)):
        texts = [None if cell == "" else cell for cell in cells]
        return pd.Series(texts, dtype=object)
    decimal = any(COMMA.fullmatch(cell) and not THOUSANDS.fullmatch(cell) for cell in numbers)
    points = any("." in cell for cell in numbers)
    grouped = [cell for cell in numbers if "," in cell and THOUSANDS.fullmatch(cell)]
    if grouped and not decimal and not points and all(cell.count(",") == 1 for cell in grouped):
        raise UserError(
            f"column '{name}': '{grouped[0]}' may be {grouped[0].replace(',', '.')} or "
            f"{grouped[0].replace(',', '')}; write it without the comma"
        )
    values = [_number(cell, decimal) for cell in cells]
    if all(math.isfinite(value) and value.is_integer() and abs(value) < 2**53 for value in values):
        return pd.Series([int(value) for value in values], dtype="int64")
    return pd.Series(values, dtype=float)


def _is_number(cell: str) -> bool:
    return any(form.fullmatch(cell) for form in (NUMBER, THOUSANDS, COMMA))


def _number(cell: str, decimal: bool) -> float:
    """A cell as a number; infinity stands for one that is not finite, NaN for a missing one."""
    word = cell.lower()
    if word in MISSING:
        return math.nan
    if word.lstrip("+-") in NOT_FINITE:
        return math.inf
    text = cell.replace("−", "-").replace(",", "." if decimal else "")
    return float(text)
