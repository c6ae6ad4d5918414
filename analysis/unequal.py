"""Ours: links that differ. A ratio for each boundary, hardest on the slowest link, against one
ratio everywhere at the same predicted step time (claim U1). What steps take is measured by
`commsweep links unequal-links`.
"""

from __future__ import annotations

import pandas as pd

from commsweep.reporting.claim import Claim, combined
from commsweep.reporting.results import is_text, plain
from commsweep.reporting.style import Draw
from commsweep.reporting.table import PLAIN, SHARE, Table, cell

from .bias import LOSS, NOTICEABLE, PERPLEXITY

NAME = "unequal"


def rows(frame: pd.DataFrame) -> pd.DataFrame:
    """The runs that it speaks of: of a sweep of language models in which boundaries have ratios of
    their own.
    """
    rows = plain(frame)
    return rows if is_text(rows) and _unequal(rows).any() else rows.iloc[:0]


def _unequal(frame: pd.DataFrame) -> pd.Series:
    """Return whether a run's boundaries have ratios of their own."""
    columns = [
        name for name in frame if name.startswith("at.") and name.endswith(".compressor.ratio")
    ]
    return frame[columns].notna().any(axis=1)


def _one_ratio(frame: pd.DataFrame) -> pd.Series:
    return (frame["fwd.compressor.kind"] == "topk") & ~_unequal(frame)


def tables(frame: pd.DataFrame) -> list[Table]:
    """Perplexity and bytes of every setting."""
    table = Table(
        "unequal",
        "One ratio everywhere, and a ratio for each link",
        ["Setting", "perplexity", "seeds", "fwd bytes (%)", "bwd bytes (%)"],
    )
    for method, group in frame.groupby("method", sort=False):
        table.rows.append(
            [
                str(method),
                cell(group, PERPLEXITY, PLAIN),
                str(len(group)),
                cell(group, "bytes.fwd_ratio", SHARE),
                cell(group, "bytes.bwd_ratio", SHARE),
            ]
        )
    return [table]


def u1(frame: pd.DataFrame) -> Claim:
    """Ratios by link against one ratio."""
    done = frame[frame.status == "finished"]
    one_ratio = done[_one_ratio(done)]
    effects = (
        [
            combined(
                f"nats saved, {method} over one ratio",
                [
                    (1.0, dict(zip(one_ratio.seed, one_ratio[LOSS], strict=True))),
                    (-1.0, dict(zip(group.seed, group[LOSS], strict=True))),
                ],
                ids=[*one_ratio.id, *group.id],
                digits=3,
                above=NOTICEABLE,
            )
            for method, group in done[_unequal(done)].groupby("method", sort=False)
        ]
        if LOSS in done
        else []
    )
    return Claim(
        "U1",
        "Where links differ, ratios by link, hardest on the slowest, are better than one ratio "
        f"everywhere at the same predicted step time, by more than {NOTICEABLE:g} nats.",
        effects,
    )


CLAIMS = [u1]
FIGURES: dict[str, Draw] = {}
