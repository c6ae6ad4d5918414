"""What a report of these rows holds: the image section of the paper or its language-model section."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd
from matplotlib.figure import Figure

from analysis import claims, figures, tables, text
from analysis.results import is_text


def all_tables(frame: pd.DataFrame) -> list[tables.Table]:
    """Every table the rows name cells for."""
    return text.text_tables(frame) if is_text(frame) else tables.image_tables(frame)


def all_claims(frame: pd.DataFrame) -> list[claims.Claim]:
    """C1 to C6 of the paper and ours, or C7 and C8."""
    return [claim(frame) for claim in (text.CLAIMS if is_text(frame) else claims.CLAIMS)]


def all_figures(frame: pd.DataFrame, curves: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
    """Every figure by name, drawn."""
    for name, draw in (text.FIGURES if is_text(frame) else figures.IMAGES).items():
        yield name, draw(frame, curves)
