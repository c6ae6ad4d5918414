"""Fits the forecast of worth kept, and tries it on trainings that were left out.

table.csv      one line a training and codec: what shadow mode measured, and the worth that was kept
forecast.json  the constants that shadow mode reads (beside the package's own code)
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import spearmanr
from sklearn.isotonic import IsotonicRegression

from commsweep.integrations.forecast import WIDEST, Bound, Forecast, Score, Seen

LEVEL = 0.95  # share of left-out bounds that a margin lets hold
FEWEST = 5  # codecs of a study whose rank correlation counts
CONSTANT, ERROR, BIAS = "constant", Score((1.0, 0.0, 0.0, 0.0)), Score((0.0, 1.0, 0.0, 0.0))
# What is tried; the one that ranks the seen studies best is taken.
CANDIDATES = (
    ERROR,
    BIAS,
    Score((0.0, 0.0, 1.0, 0.0)),
    Score((0.0, 0.0, 0.0, 1.0)),
    *(Score((weight, 1.0, 0.0, 0.0)) for weight in (0.1, 0.2, 0.3, 0.5, 1.0)),
    *(Score((0.0, weight, 1.0, 0.0)) for weight in (0.1, 0.3)),
)
GROUPS = ("study", "architecture", "codec")  # what is left out in turn


@dataclass(frozen=True)
class Trial:
    """The result of a way to rank codecs on trainings that were left out.

    rank: mean of Spearman's correlation over the left-out studies; lowest, highest: of these.
    covered: of `bounds`, how many held. width: the median one, in points of worth. answered: how
    many were narrow enough to be an answer; held: of these.
    """

    message: str
    left_out: str
    by: str
    studies: int
    rank: float
    lowest: float
    highest: float
    bounds: int
    covered: int
    width: float
    answered: int
    held: int

    @property
    def coverage(self) -> float:
        """Return the share of bounds that held; 1 where there was none."""
        return self.covered / self.bounds if self.bounds else 1.0


def rank_correlation(table: pd.DataFrame, score: Score) -> list[float]:
    """Return Spearman's correlation of score and loss of worth, a study each."""
    correlations = []
    for _, rows in table.groupby("study"):
        if len(rows) >= FEWEST:
            value = spearmanr(scores(rows, score), -rows["worth"]).statistic
            correlations.append(0.0 if math.isnan(value) else float(value))
    return correlations


def scores(table: pd.DataFrame, score: Score) -> np.ndarray:
    """Return the score of each row."""
    return np.array([score.of(row) for row in table.to_dict("records")])


def best(table: pd.DataFrame) -> Score:
    """Return the candidate that ranks the studies of a table best, the simplest first."""
    means = [float(np.mean(rank_correlation(table, score) or [0.0])) for score in CANDIDATES]
    return CANDIDATES[int(np.argmax(means))]


def evidence_of(table: pd.DataFrame, score: Score) -> Seen:
    """Return the trainings of a table, and the isotonic regression of worth on score, in which all
    studies weigh the same.
    """
    sizes = table.groupby("study")["worth"].transform("size").to_numpy()
    values = np.concatenate([[0.0], scores(table, score)])
    worths = np.clip(np.concatenate([[100.0], table["worth"]]), 0.0, 100.0)
    weights = np.concatenate([[1.0], 1 / sizes])
    order = np.argsort(values, kind="stable")
    fit = IsotonicRegression(increasing=False)
    fit.fit(values[order], worths[order], sample_weight=weights[order])
    middles = fit.predict(values[order])
    return Seen(values[order], worths[order], np.asarray(middles))


def margin(table: pd.DataFrame, score: Score) -> float:
    """Return the points by which bounds must be wider so that LEVEL of those of left-out studies
    hold.
    """
    excesses = []
    for _, rows in table.groupby("study"):
        training_rows = table.drop(rows.index)
        if training_rows.empty:
            continue
        evidence = evidence_of(training_rows, score)
        for row in rows.to_dict("records"):
            bound = evidence.bound(score.of(row))
            if bound is not None:
                worth = clipped(row["worth"])
                excesses.append(max(0.0, bound.low - worth, worth - bound.high))
    return float(np.quantile(excesses, LEVEL, method="higher")) if excesses else 100.0


def leave_out(table: pd.DataFrame, message: str, group: str, by: Score | None, name: str) -> Trial:
    """Try a way to rank on each group that was left out: score and margin are of the others. by:
    what ranks; None: what ranks the others best.
    """
    ranks: list[float] = []
    bounds: list[tuple[Bound, float]] = []
    for _, rows in table.groupby(group):
        training_rows = table.drop(rows.index)
        if training_rows.empty:
            continue
        score = by or best(training_rows)
        ranks += rank_correlation(rows, score)
        evidence = replace(evidence_of(training_rows, score), margin=margin(training_rows, score))
        for row in rows.to_dict("records"):
            bound = evidence.bound(score.of(row))
            if bound is not None:
                bounds.append((bound, row["worth"]))
    return _trial(message, group, name, ranks, bounds)


def _trial(
    message: str, group: str, name: str, ranks: list[float], bounds: list[tuple[Bound, float]]
) -> Trial:
    held = [holds(bound, worth) for bound, worth in bounds]
    narrow = [good for good, (bound, _) in zip(held, bounds, strict=True) if bound.width <= WIDEST]
    widths = [bound.width for bound, _ in bounds]
    return Trial(
        message,
        left_out=group,
        by=name,
        studies=len(ranks),
        rank=float(np.mean(ranks)) if ranks else math.nan,
        lowest=min(ranks, default=math.nan),
        highest=max(ranks, default=math.nan),
        bounds=len(bounds),
        covered=sum(held),
        width=float(np.median(widths)) if widths else math.nan,
        answered=len(narrow),
        held=sum(narrow),
    )


def holds(bound: Bound, worth: float) -> bool:
    """Return whether a bound holds, to whole points of worth."""
    return round(bound.low) <= round(clipped(worth)) <= round(bound.high)


def clipped(worth: float) -> float:
    """Return a worth between 0 (no better than nothing sent) and 100."""
    return min(100.0, max(0.0, worth))


def trials(table: pd.DataFrame, message: str) -> list[Trial]:
    """Return what was found on left-out studies, architectures and codecs, by the forecast, by
    error alone, by bias alone, and by no measurement.
    """
    ways = ((None, "forecast"), (ERROR, "error alone"), (BIAS, "bias alone"))
    rows = table[table["message"] == message]
    results = []
    for group in GROUPS:
        if rows[group].nunique() > 1:
            results += [leave_out(rows, message, group, by, name) for by, name in ways]
            results.append(_constant(rows, message, group))
    return results


def _constant(rows: pd.DataFrame, message: str, group: str) -> Trial:
    """Return what a bound does that is the same for all: the range of the other trainings."""
    bounds = []
    for _, left in rows.groupby(group):
        worths = rows.drop(left.index)["worth"].clip(0, 100)
        bound = Bound(float(worths.min()), float(worths.mean()), float(worths.max()))
        bounds += [(bound, worth) for worth in left["worth"].clip(0, 100)]
    return _trial(message, group, CONSTANT, [], bounds)


def fitted(table: pd.DataFrame, message: str) -> Forecast:
    """Return the forecast for one kind of message."""
    rows = table[table["message"] == message]
    score = best(rows)
    trial = leave_out(rows, message, "study", None, "forecast")
    return Forecast(
        score,
        replace(evidence_of(rows, score), margin=margin(rows, score)),
        int(rows["study"].nunique()),
        trial.rank,
        trial.coverage,
        trial.answered,
        trial.held,
    )


def fit_all(table: pd.DataFrame) -> dict[str, Forecast]:
    """Return the forecast of each kind of message that a table has."""
    return {message: fitted(table, message) for message in sorted(table["message"].unique())}


def write_constants(
    table: pd.DataFrame, forecasts: dict[str, Forecast], commit: str, path: Path
) -> None:
    """Write the constants that shadow mode reads, with a digest of the table and the commit at
    which they were first written from it.
    """
    digest = hashlib.sha256(table.to_csv(index=False).encode()).hexdigest()[:12]
    if path.is_file() and (before := json.loads(path.read_text("utf-8")))["table"] == digest:
        commit = before["commit"]
    messages: dict[str, Any] = {}
    for message, forecast_ in forecasts.items():
        record: dict[str, Any] = {"weights": list(forecast_.score.weights)}
        for name in ("scores", "worths", "middles"):
            record[name] = [round(float(value), 5) for value in getattr(forecast_.evidence, name)]
        record["margin"] = round(forecast_.evidence.margin, 2)
        for name in ("trainings", "rank", "coverage", "narrow", "held"):
            record[name] = round(getattr(forecast_, name), 4)
        messages[message] = record
    text = json.dumps({"table": digest, "commit": commit, "messages": messages}, indent=1)
    path.write_text(text + "\n", encoding="utf-8")
