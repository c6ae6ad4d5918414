"""Tables, claims and figures of your runs: a table, a claim and a figure."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from commsweep.reporting.claim import DENSE, Claim, difference
from commsweep.reporting.style import Draw, drawing, ends, look, plot, plt, size
from commsweep.reporting.table import ON, SHARE, Table, cell

NAME = "mine"
MOST = 1.0  # points of accuracy that may be lost


def rows(frame: pd.DataFrame) -> pd.DataFrame:
    """The runs that this file is about: those on your own data."""
    return frame[frame["data.name"] == "own"]


def tables(frame: pd.DataFrame) -> list[Table]:
    """Accuracy and bytes of every setting."""
    columns = ["Setting", "accuracy (%)", "bytes (% of dense)"]
    table = Table("ratios", "Every setting, mean and spread over seeds", columns)
    for method, group in frame.groupby("method", sort=False):
        table.rows.append([str(method), cell(group, ON), cell(group, "bytes.ratio", SHARE)])
    return [table]


def little_is_lost(frame: pd.DataFrame) -> Claim:
    """TopK at 10 % against dense, paired by seed."""
    topk = {"fwd.compressor.kind": "topk", "fwd.compressor.ratio": 0.1}
    lost = difference(
        frame, "accuracy, dense minus TopK 10 %", (DENSE, ON), (topk, ON), below=MOST, across=True
    )
    return Claim("mine-1", f"TopK at 10 % loses less than {MOST:g} point of accuracy.", lost)


def accuracy(frame: pd.DataFrame, _curves: pd.DataFrame) -> Figure | None:
    """Test accuracy against bytes. Bars: 95 % intervals over seeds."""
    with drawing():
        figure, axis = plt.subplots(figsize=size(1, 2.4))
        for method, group in frame.groupby("method", sort=False):
            name, share = str(method), 100 * group["bytes.ratio"].mean()
            plot(axis, [share], [ends(100 * group[ON])], name, **look(name))
        axis.set(xlabel="bytes (% of dense)", ylabel="test accuracy (%)", xscale="log")
        axis.legend()
    return figure


CLAIMS = [little_is_lost]
FIGURES: dict[str, Draw] = {"accuracy": accuracy}
