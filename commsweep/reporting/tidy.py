"""Rows and curves for pandas: one frame from a store, a folder of results or a csv, with codecs, K,
bits and feedback as columns of their own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from commsweep.config.coordinates import codecs
from commsweep.errors import UserError, nearest
from commsweep.reporting import results
from commsweep.reporting.published import CURVES
from commsweep.reporting.statistics import interval

ROWS = "rows.csv"


def load_rows(
    source: str | Path, sweep: str | None = None, needs: Sequence[str] = ()
) -> pd.DataFrame:
    """The runs of a source, one a row (docs/reference/columns.md).

    Args:
        source: a store, a folder of results with `rows.csv`, or such a file.
        sweep: of a store, the cells of this sweep only, missing ones included.
        needs: columns without which what follows makes no sense.

    Returns:
        All columns of a report, after these: `id`, `setting` (equal for the seeds of one setting),
        `seed`, `codec` ("bwd=ef+topk:0.1"; "dense"), `fwd.codec`, `bwd.codec`, `grad.codec`, `K`
        (share of entries kept, from 0 to 1), `bits` (of a value) and `feedback`.

    Raises:
        UserError: the source is none of these, or has a column of `needs` not or empty.
    """
    path = Path(source)
    if sweep is None and path.is_dir() and (path / ROWS).is_file():
        path = path / ROWS
    if path.is_dir():
        frame = results.load(path, sweep)
    else:
        try:
            # an id of digits only is no number, and one like 1e5 neither
            frame = pd.read_csv(path, dtype={"id": str, "setting_id": str}, low_memory=False)
        except (OSError, ValueError) as error:
            raise UserError(
                f"'{path}' cannot be read as rows ({error}); commsweep report writes them: rows.csv"
            ) from None
    frame = tidy(frame)
    empty = [name for name in needs if name not in frame or frame[name].isna().all()]
    if empty:
        raise UserError(
            f"'{path}' has no values in {', '.join(empty)}; needed are {', '.join(needs)} "
            "(docs/reference/columns.md says which runs have them)"
        )
    return frame


def summary(frame: pd.DataFrame, by: str | Sequence[str], column: str) -> pd.DataFrame:
    """Means over seeds with the interval of the verdicts.

    Args:
        frame: rows (`load_rows`), one a run.
        by: the columns to group by, such as "method".
        column: the numbers, such as "test_on_acc".

    Returns:
        One row a group, in the order of the frame: `mean`, `low` and `high` (95 % interval,
        Student's t; NaN where n is 1) and `n`.
    """
    keys = [by] if isinstance(by, str) else list(by)
    lines = []
    for values, group in frame.groupby(keys, sort=False, dropna=False):
        numbers = [float(number) for number in group[column].dropna()]
        low, high = interval(numbers) or (math.nan, math.nan)
        mean = sum(numbers) / len(numbers) if numbers else math.nan
        lines.append((*values, mean, low, high, len(numbers)))
    return pd.DataFrame(lines, columns=[*keys, "mean", "low", "high", "n"]).set_index(keys)


def convergence(
    curves: pd.DataFrame, column: str, shares: Sequence[float] = (0.1, 0.25, 0.5, 1.0)
) -> pd.DataFrame:
    """Scores along the trainings: the convergence table of a paper.

    Args:
        curves: points along trainings (`load_curves`).
        column: a score, such as "val_on_loss".
        shares: of the steps of a setting's longest training, from 0 to 1.

    Returns:
        One row for each setting and share: `method`, `percent` (100 share), `mean`, `low`, `high`,
        `n`, and `lost`, the runs without a finite score there. The score is that of the first point
        at or after the share.

    Raises:
        UserError: the curves have no such column.
    """
    if column not in curves:
        scores = [name for name in curves if name.startswith(("val_", "test_", "train_"))]
        raise UserError(f"curves have no '{column}'{nearest(column, scores)}")
    points = []
    for (_, method), group in curves.groupby(["setting", "method"], sort=False):
        last = float(group["step"].max())
        for share in shares:
            for _, run in group.groupby("id", sort=False):
                reached = run[run["step"] >= share * last - 1e-9].sort_values("step")
                score = float(reached[column].iloc[0]) if len(reached) else math.nan
                score = score if math.isfinite(score) else math.nan
                points.append({"method": method, "percent": 100 * share, "score": score})
    scores = pd.DataFrame(points)
    table = summary(scores, ["method", "percent"], "score")
    lost = scores["score"].isna().groupby([scores["method"], scores["percent"]], sort=False).sum()
    return table.assign(lost=lost).reset_index()


def load_curves(source: str | Path, sweep: str | None = None) -> pd.DataFrame:
    """The points along the trainings of a source, one a row.

    Args:
        source: a store, or a folder of results with `rows.csv` and `curves.csv.gz`.
        sweep: of a store, the runs of this sweep only.

    Returns:
        `id`, `setting`, `seed`, `codec`, `method` and `status` of the run; `step`, `epoch`,
        `bytes` (sent so far, over all boundaries), `seconds` (trained so far) and the scores there.

    Raises:
        UserError: the source has no curves.
    """
    path, rows = Path(source), load_rows(source, sweep)
    if (path / CURVES).is_file():
        curves = pd.read_csv(path / CURVES, dtype={"id": str})
    elif path.is_dir() and not (path / ROWS).is_file():
        finished = list(rows.id[rows.status.isin(["finished", "diverged"])])
        curves = results.points(path, finished)
        if curves.empty:
            curves = results.curves(path, finished)
    else:
        raise UserError(
            f"'{path}' has no {CURVES}: the report was written before curves were kept, or its "
            "runs have no points; launch them anew with --points 10"
        )
    if curves.empty:
        raise UserError(f"'{path}': no run has a curve; launch runs with --points 10")
    names = [
        name for name in ("id", "setting", "seed", "codec", "method", "status") if name in rows
    ]
    return rows[names].merge(curves, on="id")


def tidy(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with the columns of `load_rows` first."""
    if "setting_id" not in frame:
        return frame
    columns: dict[str, dict[str, Any]] = {}
    for row in frame.drop_duplicates("setting_id").to_dict("records"):
        columns[row["setting_id"]] = codecs(row)
    added = pd.DataFrame([columns[setting] for setting in frame.setting_id], index=frame.index)
    first = frame[["id"]].assign(setting=frame.setting_id, seed=frame.get("seed"))
    left = frame.drop(columns=[*first.columns, *added.columns], errors="ignore")
    return pd.concat([first, added, left], axis=1).copy()  # in one piece, for fast assignments
