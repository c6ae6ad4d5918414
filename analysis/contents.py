"""What a report of these rows holds: all settings, and the tables, figures and claims of each paper that has runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pandas as pd
from matplotlib.figure import Figure

from commsweep.analysis import claims, figures, gradients, tables, text
from commsweep.analysis.gradients import has_gradients


def _gradients(frame: pd.DataFrame) -> pd.DataFrame:
    return frame if has_gradients(frame) else frame.iloc[:0]


def _plain(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows of one learner: the papers on boundaries compare these."""
    rows = frame[(frame["grad.learners"] == 1) & (frame["grad.compressor.kind"] == "none")]
    compared = (rows["fwd.compressor.kind"] != "none") | (rows["bwd.compressor.kind"] != "none")
    return rows if compared.any() else rows.iloc[:0]


def _text(frame: pd.DataFrame) -> pd.DataFrame:
    rows = _plain(frame)
    return rows[rows["data.tokenizer"].notna()] if "data.tokenizer" in rows else rows.iloc[:0]


def _images(frame: pd.DataFrame) -> pd.DataFrame:
    rows = _plain(frame)
    return rows[rows["data.tokenizer"].isna()] if "data.tokenizer" in rows else rows


# name, its rows, tables, claims, figures
PARTS: list[tuple[str, Callable, Callable, list, dict]] = [
    ("images", _images, tables.image_tables, claims.CLAIMS, figures.IMAGES),
    ("text", _text, text.text_tables, text.CLAIMS, text.FIGURES),
    ("gradients", _gradients, gradients.gradient_tables, gradients.CLAIMS, gradients.FIGURES),
]


def _present(frame: pd.DataFrame) -> list[tuple[str, pd.DataFrame, Callable, list, dict]]:
    """The parts that have rows; their names are empty when there is only one."""
    found = [(name, rows, *rest) for name, choose, *rest in PARTS if len(rows := choose(frame))]
    return [("" if len(found) == 1 else f"{name}_", *rest) for name, *rest in found]


def all_tables(frame: pd.DataFrame) -> list[tables.Table]:
    """Every table the rows name cells for; the one of all settings is the last."""
    made = []
    for prefix, rows, own, _, _ in _present(frame):
        for table in own(rows):
            table.name = prefix + table.name
            made.append(table)
    return [*made, tables.settings_table(frame)]


def all_claims(frame: pd.DataFrame) -> list[claims.Claim]:
    """C1 to C6 of the paper and ours, C7 and C8, AdaComp's A1 to A4: those that have runs."""
    made = []
    for _, rows, _, wanted, _ in _present(frame):
        for claim in wanted:
            made += found if isinstance(found := claim(rows), list) else [found]
    return [claim for claim in made if claim.has_runs]


def all_figures(frame: pd.DataFrame, curves: pd.DataFrame) -> Iterator[tuple[str, Figure, str]]:
    """(name, figure, caption) of every figure that has something to show, drawn."""
    wanted = [(name, draw, frame) for name, draw in figures.GENERAL.items()]
    wanted += [(prefix + name, draw, rows) for prefix, rows, _, _, own in _present(frame) for name, draw in own.items()]
    for name, draw, rows in wanted:
        done = rows[rows.status == "finished"]
        drawn = draw(rows, curves[curves.id.isin(rows.id)] if len(curves) else curves) if len(done) else None
        if drawn is not None:
            yield name, drawn, " ".join((draw.__doc__ or "").split())
