"""What a report of these rows holds: gradient compression, or the paper's images or its language models."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd
from matplotlib.figure import Figure

from commsweep.analysis import claims, figures, gradients, tables, text
from commsweep.analysis.gradients import has_gradients
from commsweep.analysis.results import is_text


def all_tables(frame: pd.DataFrame) -> list[tables.Table]:
    """Every table the rows name cells for."""
    if has_gradients(frame):
        return gradients.gradient_tables(frame)
    return text.text_tables(frame) if is_text(frame) else tables.image_tables(frame)


def all_claims(frame: pd.DataFrame) -> list[claims.Claim]:
    """C1 to C6 of the paper and ours, or C7 and C8, or AdaComp's A1 to A4."""
    wanted = gradients.CLAIMS if has_gradients(frame) else text.CLAIMS if is_text(frame) else claims.CLAIMS
    return [claim(frame) for claim in wanted]


def all_figures(frame: pd.DataFrame, curves: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
    """Every figure by name, drawn."""
    wanted = gradients.FIGURES if has_gradients(frame) else text.FIGURES if is_text(frame) else figures.IMAGES
    for name, draw in wanted.items():
        yield name, draw(frame, curves)
