"""Rows that a report wrote (rows.csv), turned back into outcomes, so that a sweep goes on from what
others measured.

A row names its run by the hash of its settings, so it counts only for the very run that a sweep
names. What a table does not hold (curves, the diagnosis of each boundary, the environment) is
absent, not made up.
"""

from __future__ import annotations

import csv
import gzip
import io
import math
import re
from collections.abc import Collection, Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from commsweep.config import Run, record, run_id
from commsweep.config.run import SCHEMA
from commsweep.errors import UserError
from commsweep.store import DIVERGED, FINISHED, POINTS, Row, Store

CURVES = "curves.csv.gz"  # beside rows.csv
# Part of a row, by how the names of its columns begin.
PARTS = {
    "bytes": "bytes",
    "seconds": "seconds",
    "speed": "speed",
    "gradients": "gradients",
    "second_order": "kfac",
    "flops": "flops",
    "masks": "masks",
}
SCORES = ("train_", "val_", "test_", "best_val.", "best_test.")


def outcomes(path: Path, runs: Iterable[Run]) -> tuple[list[Row], int]:
    """(the outcomes, finished or diverged, that the file holds of these runs under any seed, how
    many other lines it has). Raises UserError when the file is no such table, naming the line that
    holds no number where one belongs.
    """
    try:
        content = path.read_bytes()
        text = content.decode("utf-8-sig")  # a spreadsheet's file begins with a mark
        header = text.partition("\n")[0]
        mark = ";" if header.count(";") > header.count(",") else ","
        lines = list(csv.DictReader(io.StringIO(text, newline=""), strict=True, delimiter=mark))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(
            f"'{path}' cannot be read as rows ({error}); commsweep report writes them: rows.csv"
        ) from None
    if lost := {"id", "status", "seed", "steps"} - set(lines[0] if lines else ()):
        raise UserError(
            f"'{path}' has no column {', '.join(sorted(lost))}: not the rows.csv of a report"
        )
    source = f"{path.name}, sha256 {sha256(content).hexdigest()[:16]}"
    seeds = set()
    for number, line in enumerate(lines, 2):
        if not re.fullmatch(r"[0-9a-f]{12}", line["id"] or ""):
            raise UserError(
                f"'{path}', line {number}: id is {line['id']!r}, and ids have twelve digits "
                "from 0 to f (a spreadsheet takes some for numbers); take the file as commsweep "
                "report wrote it"
            )
        # pandas makes floats of a column with gaps
        if re.fullmatch(r"\d+(\.0*)?", line["seed"] or ""):
            seeds.add(int(float(line["seed"])))
    settings = _by_id(run.model_copy(update={"seed": 0}) for run in runs).values()
    runs_by_id = _by_id(run.model_copy(update={"seed": seed}) for run in settings for seed in seeds)
    rows = []
    for number, line in enumerate(lines, 2):
        if line["status"] in (FINISHED, DIVERGED) and line["id"] in runs_by_id:
            try:
                rows.append(_row(line, runs_by_id[line["id"]], source))
            except ValueError as error:
                raise UserError(
                    f"'{path}', line {number}: {error}; take the file as commsweep report wrote it"
                ) from None
    return rows, len(lines) - len(rows)


def conflicts(files: Iterable[Path], rows: Iterable[Row]) -> dict[str, dict[str, float]]:
    """The scores of runs that have several, by id and source: a rows.csv, or the store, and the
    environment that it names. Raises UserError on a file that is no table.
    """
    scores: dict[str, dict[str, float]] = {}
    for path in files:
        try:
            with open(path, newline="", encoding="utf-8-sig") as handle:
                lines = list(csv.DictReader(handle, strict=True))
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise UserError(f"'{path}' cannot be read as rows ({error})") from None
        for line in lines:
            _note(scores, line.get("id") or "", str(path), line, line)
    for row in rows:
        environment = {
            f"environment.{key}": value for key, value in row.get("environment", {}).items()
        }
        _note(scores, row["id"], "the store", row["metrics"], environment)
    return {name: score for name, score in scores.items() if len(set(score.values())) > 1}


def _note(
    scores: dict[str, dict[str, float]],
    name: str,
    source: str,
    metrics: Mapping[str, Any],
    environment: Mapping[str, str],
) -> None:
    """Add a run's score, where it has one."""
    for metric in ("test_on_acc", "test_on_loss"):
        if metrics.get(metric) not in (None, ""):
            where = [environment.get(f"environment.{key}") for key in ("processor", "torch")]
            label = ", ".join(filter(None, [source, *where]))
            scores.setdefault(name, {})[label] = _number(metric, str(metrics[metric]))
            return


def _by_id(runs: Iterable[Run]) -> dict[str, Run]:
    return {run_id(run): run for run in runs}


def _row(line: dict[str, str], run: Run, source: str) -> Row:
    if None in line or None in line.values():
        raise ValueError("it has not as many fields as there are columns")
    row: dict[str, Any] = {
        "schema": SCHEMA,
        "id": line["id"],
        "status": line["status"],
        "error": line.get("error") or None,
        "run": record(run),
        "steps": round(_number("steps", line["steps"] or "0")),
        "adopted": source,
        "metrics": {},
        "seconds": {},
    }
    if line.get("when"):
        row["when"] = line["when"]
    diagnosis: dict[str, dict[str, Any]] = {}
    for name, text in line.items():
        section, _, key = name.partition(".")
        if text and section in ("inputs", "environment"):
            row.setdefault(section, {})[key] = text
        if not text or not (
            section in (*PARTS, "boundary", "diagnosis") or name.startswith(SCORES)
        ):
            continue
        value = _number(name, text)
        if name.startswith(SCORES):
            row["metrics"][name] = value
        elif section == "boundary":
            cut, _, side = key.rpartition(".")
            row.setdefault("boundaries", {}).setdefault(cut, {})[side] = round(value * row["steps"])
        elif section == "diagnosis":
            side, _, setting = key.partition(".")
            diagnosis.setdefault(side, {"boundary": "mean", "direction": side})[setting] = value
        else:
            row.setdefault(PARTS[section], {})[key] = value
    if row["status"] == FINISHED and not row["metrics"]:
        raise ValueError("a finished run without a score")
    if diagnosis:
        row["diagnosis"] = list(diagnosis.values())
    return Row(**row)


def _number(name: str, text: str) -> float:
    try:
        value = int(text) if text.isdigit() else float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise ValueError(f"{name} is '{text}', no number")
    return value


def adopt_curves(path: Path, ids: Collection[str], store: Store) -> int:
    """Record the points along trainings that were measured elsewhere, of these runs where the store
    has none; the number of runs that got some. path: a `curves.csv.gz`, which may be missing.

    Raises UserError where the file is none.
    """
    if not path.is_file():
        return 0
    by_run: dict[str, list[dict[str, Any]]] = {}
    try:
        with gzip.open(path, "rt", encoding="utf-8", newline="") as handle:
            for line in csv.DictReader(handle):
                if line["id"] in ids:
                    by_run.setdefault(line["id"], []).append(_point(line))
    except (OSError, ValueError, KeyError, EOFError, csv.Error) as error:
        raise UserError(f"'{path}' cannot be read as curves ({error!r}); leave it out") from None
    count = 0
    for name, points in by_run.items():
        folder = store.folder(name)
        if (folder.path / "done.json").exists() and not (folder.path / POINTS).exists():
            for point in points:
                folder.append(point, POINTS)
            count += 1
    return count


def _point(line: dict[str, str]) -> dict[str, Any]:
    """The numbers of a line of curves; a step is a whole one."""
    point: dict[str, Any] = {}
    for name, text in line.items():
        if name != "id" and text:
            number = float(text)
            point[name] = int(number) if number.is_integer() and name != "epoch" else number
    return point
