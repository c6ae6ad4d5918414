"""Rows and curves for pandas: one frame from a store, a folder of results or a csv, with codecs, K,
bits and feedback as columns of their own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from commsweep.config.coordinates import codecs
from commsweep.errors import UserError
from commsweep.reporting import results
from commsweep.reporting.published import CURVES

ROWS = "rows.csv"


def load_rows(source: str | Path, sweep: str | None = None) -> pd.DataFrame:
    """The runs of a source, one a row (docs/reference/columns.md).

    Args:
        source: a store, a folder of results with `rows.csv`, or such a file.
        sweep: of a store, the cells of this sweep only, missing ones included.

    Returns:
        All columns of a report, after these: `id`, `setting` (equal for the seeds of one setting),
        `seed`, `codec` ("bwd=ef+topk:0.1"; "dense"), `fwd.codec`, `bwd.codec`, `grad.codec`, `K`
        (share of entries kept, from 0 to 1), `bits` (of a value) and `feedback`.

    Raises:
        UserError: the source is none of these.
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
    return tidy(frame)


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
