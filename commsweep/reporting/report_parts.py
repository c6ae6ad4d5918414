"""The contents of a report of these rows: all settings, and the tables, figures and claims of each
paper that has runs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from types import ModuleType

import pandas as pd
from matplotlib.figure import Figure

from commsweep.config import own
from commsweep.errors import UserError, nearest
from commsweep.registry import is_shipped, papers
from commsweep.reporting.claim import Claim, Looks, adjust, date
from commsweep.reporting.figure import KINDS
from commsweep.reporting.results import counted, scale, span
from commsweep.reporting.style import Draw, finish
from commsweep.reporting.table import Table, settings_table


def _present(
    frame: pd.DataFrame, only: Collection[str]
) -> list[tuple[str, pd.DataFrame, ModuleType]]:
    """(prefix of its names, rows, paper) of those that have rows; no prefix where there is only
    one. only: names of those that are wanted, or of their files, or none for all. Raises UserError
    on a name that is none.
    """
    papers_ = papers()
    names = [paper.NAME for paper in papers_]
    by_file = {paper.__name__.rpartition(".")[2]: paper.NAME for paper in papers_}
    only = [name if name in names else by_file.get(name, name) for name in only]
    for name in only:
        if name not in names:
            raise UserError(f"--papers {name}: not one of {', '.join(names)}{nearest(name, names)}")
    present = [
        (rows, paper)
        for paper in papers_
        if (not only or paper.NAME in only) and len(rows := paper.rows(frame))
    ]
    return [("" if len(present) == 1 else f"{paper.NAME}_", rows, paper) for rows, paper in present]


def all_tables(frame: pd.DataFrame, only: Collection[str] = ()) -> list[Table]:
    """Every table the rows name cells for; the one of all settings is the last."""
    tables = []
    for prefix, rows, paper in _present(frame, only):
        for table in paper.tables(rows):
            table.name = prefix + table.name
            tables.append(table)
    return [*tables, settings_table(frame)]


def all_claims(
    frame: pd.DataFrame,
    only: Collection[str] = (),
    mine: str = "",
    interim: Looks | None = None,
) -> list[Claim]:
    """The claims of every paper that have runs, adjusted together and for the looks before this.

    What a paper found is not judged by a user's own data. mine: "claims.py:function", a function of
    the rows that returns Claims of the user's own, which are judged instead. Raises UserError when
    one of those compares nothing.
    """
    if mine:
        claims = own.call(mine, "", frame)
        if not isinstance(claims, (list, tuple)) or not all(
            isinstance(claim, Claim) for claim in claims
        ):
            raise UserError(
                f"--claims '{mine}' must return a list of Claims (commsweep.reporting.claim)"
            )
        for claim in claims:
            if not claim.effects:
                raise UserError(
                    f"--claims '{mine}': claim {claim.name} compares no arms; give it effects, as "
                    "difference() makes them, or leave it out"
                )
        return adjust(date(list(claims), frame), interim)
    claims = []
    for _, rows, paper in _present(frame, only):
        if is_shipped(paper.__name__):
            rows = rows[rows["data.name"] != "own"]
        if rows.empty:
            continue
        for make in paper.CLAIMS:
            claims_ = make(rows)
            for claim in claims_ if isinstance(claims_, list) else [claims_]:
                if claim.source is None:
                    claim.source = getattr(paper, "SOURCE", "")
                registered = getattr(paper, "REGISTERED", {})
                claim.registered, claim.commit = registered.get(claim.name, ("", ""))
                if claim.has_runs:
                    claim.scale = scale(rows)
                    claims.append(claim)
    return adjust(date(claims, frame), interim)


def _drawings(frame: pd.DataFrame, only: Collection[str]) -> list[tuple[str, Draw, pd.DataFrame]]:
    """(name, how it is drawn, of which rows) of every figure."""
    drawings = [(name, draw, frame) for name, draw in KINDS.items()]
    drawings += [
        (prefix + name, draw, rows)
        for prefix, rows, paper in _present(frame, only)
        for name, draw in paper.FIGURES.items()
    ]
    return drawings


def figure_names(frame: pd.DataFrame, only: Collection[str] = ()) -> list[str]:
    """The names of all figures of a report."""
    return [name for name, _, _ in _drawings(frame, only)]


def all_figures(
    frame: pd.DataFrame,
    curves: pd.DataFrame,
    only: Collection[str] = (),
    named: str = "",
    points: pd.DataFrame | None = None,
) -> Iterator[tuple[str, Figure, str]]:
    """(name, figure, caption) of every figure that has something to show, drawn; of the one of this
    name, where there is one.

    curves: the evaluations of the runs. points: those along the training, which the figures of
    every report show instead where there are any.
    """
    along = curves if points is None or points.empty else points
    for name, draw, rows in _drawings(frame, only):
        if named and name != named:
            continue
        done = rows[rows.status == "finished"]
        drawn = None
        if len(done):
            shown = along if KINDS.get(name) is draw else curves
            drawn = draw(rows, shown[shown.id.isin(rows.id)] if len(shown) else shown)
        if drawn is not None:
            if not drawn.get_label():
                finish(drawn, f"{draw.__doc__} {_seeds(done)}{_left_out(rows)}")
            yield name, drawn, str(drawn.get_label())


def _seeds(done: pd.DataFrame) -> str:
    """ "n = 3 to 8 seeds a setting." """
    n = span(done.groupby("setting_id").seed.nunique())
    return "One seed a setting, so no intervals." if n == "1" else f"n = {n} seeds a setting."


def _left_out(rows: pd.DataFrame) -> str:
    unfinished = counted(rows)
    return f" Runs left out: {unfinished}." if unfinished else ""
