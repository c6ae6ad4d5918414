"""Worth kept, the share of a message's worth that a setting keeps: (control - setting) / (control -
dense).

The control is the training in which nothing travels (`zero`). 100 % is dense, 0 % is nothing sent,
below 0 % the message does harm. Runs are paired by seed. The interval is Fieller's, which is right
for a ratio of two means that are measured together; where the denominator is not clearly above
zero, no finite interval exists, and this model cannot tell.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.special import stdtrit

from commsweep.reporting.results import base, nothing_learned
from commsweep.reporting.statistics import LEVEL

LOSS, ACCURACY = "test_on_loss", "test_on_acc"
CONTROL = "zero"
GRADIENTS = ("grad.compressor.", "grad.feedback.", "grad.exchange")
BOUNDARIES = ("fwd.", "bwd.")


@dataclass(frozen=True)
class Kept:
    """The share of a message's worth that a setting keeps, in percent, with its 95 % interval."""

    percent: float
    low: float | None  # None: not enough seeds, or this model cannot tell
    high: float | None
    n: int  # seeds
    tells: bool  # whether the worth itself is clearly above zero

    def text(self) -> str:
        """For a table: "79 % [75, 83]"."""
        if math.isnan(self.percent) or (self.n > 1 and not self.tells):
            return "cannot tell"
        if self.low is None or self.high is None:
            return f"{round(self.percent)} %"
        return f"{round(self.percent)} % [{round(self.low)}, {round(self.high)}]"


def share_kept(controls: Sequence[float], scores: Sequence[float], denses: Sequence[float]) -> Kept:
    """The share kept, of losses by seed (or of accuracies with a minus: less is better).

    Fieller's interval holds all r with (mean(a) - r mean(b))^2 <= t^2 (s_aa - 2 r s_ab + r^2 s_bb)
    / n, where a = control - score and b = control - dense.
    """
    a = np.subtract(controls, scores)
    b = np.subtract(controls, denses)
    n, share = len(a), 100.0 * a.mean() / b.mean() if b.mean() else math.nan
    if n < 2:
        return Kept(share, None, None, n, bool(b.mean() > 0))
    covariance = np.cov(a, b) / n
    t2 = float(stdtrit(n - 1, 1 - LEVEL / 2)) ** 2
    # (b^2 - t^2 s_bb) r^2 - 2 (ab - t^2 s_ab) r + (a^2 - t^2 s_aa) <= 0
    square = b.mean() ** 2 - t2 * covariance[1, 1]
    if square <= 0 or b.mean() <= 0:
        return Kept(share, None, None, n, False)
    middle = a.mean() * b.mean() - t2 * covariance[0, 1]
    constant = a.mean() ** 2 - t2 * covariance[0, 0]
    root = math.sqrt(max(0.0, middle**2 - square * constant))
    low, high = (100.0 * (middle + sign * root) / square for sign in (-1, 1))
    return Kept(share, low, high, n, True)


def of_settings(frame: pd.DataFrame) -> dict[str, Kept]:
    """Return what each setting of a frame keeps, by setting_id, where the frame has its control and
    dense.

    Of a setting that compresses gradients of activations the control sends none of these; of one
    that compresses activations alone, none of those; of one that compresses learners' gradients,
    none of those. A diverged run scores as if nothing had been learned.
    """
    shares: dict[str, Kept] = {}
    if "data.tokenizer" in frame:
        text = frame["data.tokenizer"].notna()
    else:
        text = pd.Series(False, frame.index)
    done = frame.status.isin(["finished", "diverged"])
    for rows, metric, sign in (
        (frame[text & done], LOSS, 1),
        (frame[~text & done], ACCURACY, -1),
    ):
        if len(rows) and metric in rows:
            score = rows[metric].where(rows.status == "finished", nothing_learned(rows))
            scored = rows.assign(score=sign * score)
            _boundaries(scored, shares)
            _gradients(scored, shares)
    return shares


def _boundaries(rows: pd.DataFrame, shares: dict[str, Kept]) -> None:
    fwd, bwd = rows["fwd.compressor.kind"], rows["bwd.compressor.kind"]
    back = bwd != "none"
    rows = rows.assign(training=base(rows, *BOUNDARIES))
    dense = rows[~back & (fwd == "none")]
    nothing_back = rows[(bwd == CONTROL) & (fwd == "none")]
    nothing_forth = rows[(fwd == CONTROL) & ~back]
    _measure(rows[~back], nothing_forth, dense, shares)
    _measure(pd.concat([rows[back], dense]), nothing_back, dense, shares)


def _gradients(rows: pd.DataFrame, shares: dict[str, Kept]) -> None:
    kind = rows["grad.compressor.kind"]
    rows = rows.assign(training=base(rows, *GRADIENTS))
    _measure(rows[kind != "none"], rows[kind == CONTROL], rows[kind == "none"], shares)


def _measure(
    settings: pd.DataFrame, control: pd.DataFrame, dense: pd.DataFrame, shares: dict[str, Kept]
) -> None:
    """Add what these settings keep, where their training has a control and a dense run."""
    keys = ["training", "seed"]
    floors = control[[*keys, "score"]].rename(columns={"score": "control"})
    tops = dense[[*keys, "score"]].rename(columns={"score": "dense"})
    paired = settings.merge(floors, on=keys).merge(tops, on=keys).dropna(subset=["score"])
    for setting, runs in paired.groupby("setting_id", sort=False):
        shares[str(setting)] = share_kept(list(runs.control), list(runs.score), list(runs.dense))
