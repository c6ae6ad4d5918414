"""A forecast of worth kept from what shadow mode measures, by trainings that were compressed.

forecast.json holds, for each kind of message, what ranks its codecs best (a weighted sum of error,
bias and 1 - cosine: the score) and every training that was seen, by its score. The bound of a new
message is the worst that a seen training kept at this score or less, and the best that one kept at
this score or more, the next one on either side among them, and a margin. `commsweep forecast`
writes the file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

FILE = Path(__file__).with_name("forecast.json")
# Means over looks and places. distance: 1 - cosine. total: the error of all places together, in
# which each counts by the square of its length.
FEATURES = ("error", "bias", "distance", "total")
WIDEST = 25.0  # points of worth: a wider bound is no answer
COVERED = 0.93  # share of left-out trainings within their bound, below which there is no answer


def features_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the features of a row of means with error, bias, cosine and total."""
    features = {name: row[name] for name in ("error", "bias", "total")}
    return features | {"distance": 1 - row["cosine"]}


@dataclass(frozen=True)
class Score:
    """A weighted sum of the features of a message: what a forecast ranks codecs by."""

    weights: tuple[float, ...]  # of FEATURES

    def of(self, features: Mapping[str, float]) -> float:
        """Return the score of one message; NaN where a feature with a weight is."""
        return math.fsum(
            weight * features[name]
            for name, weight in zip(FEATURES, self.weights, strict=True)
            if weight
        )

    @property
    def text(self) -> str:
        """Return its formula: "bias + 0.2 error"."""
        words = dict(zip(FEATURES, ("error", "bias", "(1 - cosine)", "total error"), strict=True))
        terms = sorted(zip(self.weights, FEATURES, strict=True), reverse=True)
        return " + ".join(
            words[name] if weight == 1 else f"{weight:g} {words[name]}"
            for weight, name in terms
            if weight
        )


@dataclass(frozen=True)
class Bound:
    """The worth kept that is expected, in percent, and the bound on it; 0: no better than nothing
    sent.
    """

    low: float
    middle: float
    high: float

    @property
    def width(self) -> float:
        """Return the points between both ends."""
        return self.high - self.low

    @property
    def text(self) -> str:
        """Return "96 % [88, 100]"."""
        return f"{self.middle:.0f} % [{self.low:.0f}, {self.high:.0f}]"


@dataclass(frozen=True)
class Seen:
    """Scores of the trainings that were seen, ascending, the worth that each kept (0 to 100), and
    what the scores let expect. The first is the training that is sent everything. margin: points
    that a bound is wider by on either side, so that those of left-out trainings would have held.
    """

    scores: np.ndarray
    worths: np.ndarray
    middles: np.ndarray
    margin: float = 0.0

    def bound(self, score: float) -> Bound | None:
        """Return the bound at a score; None beyond the largest that was seen, and of NaN."""
        if not score <= self.scores[-1]:
            return None
        above = int(np.searchsorted(self.scores, score, side="right"))
        below = max(0, int(np.searchsorted(self.scores, score, side="left")) - 1)
        low = max(0.0, float(self.worths[: above + 1].min()) - self.margin)
        high = min(100.0, float(self.worths[below:].max()) + self.margin)
        middle = float(np.interp(score, self.scores, self.middles))
        return Bound(low, min(max(middle, low), high), high)


@dataclass(frozen=True)
class Forecast:
    """The forecast for one kind of message.

    trainings: how many are behind it. rank, coverage: rank correlation and share of bounds that
    held, of trainings that were left out. narrow, held: of these, bounds that were narrow enough to
    be an answer, and how many of them held.
    """

    score: Score
    evidence: Seen
    trainings: int
    rank: float
    coverage: float
    narrow: int
    held: int

    @property
    def answers(self) -> bool:
        """Return whether bounds of left-out trainings held so often that it may answer."""
        return self.coverage >= COVERED and self.held >= max(1, COVERED * self.narrow)

    def answer(self, features: Mapping[str, float]) -> Bound | str:
        """Return a bound, or why there is none."""
        score = self.score.of(features)
        bound = self.evidence.bound(score)
        if bound is None:
            return f"its {self.score.text} of {score:.2g} is beyond all that was seen"
        if not self.narrow:
            return "ranks only: no bound of left-out trainings was narrow"
        if not self.answers:
            return f"ranks only: {self.held} of {self.narrow} answers held for left-out trainings"
        if bound.width > WIDEST:
            return f"seen trainings kept {bound.low:.0f} to {bound.high:.0f} % at such a score"
        return bound


@lru_cache
def _record() -> dict[str, Any]:
    return json.loads(FILE.read_text(encoding="utf-8"))


@lru_cache
def forecast(message: str) -> Forecast | None:
    """Return the forecast for a kind of message; None where no training was seen."""
    record = _record()["messages"].get(message)
    if record is None:
        return None
    return Forecast(
        Score(tuple(record["weights"])),
        Seen(
            np.array(record["scores"]),
            np.array(record["worths"]),
            np.array(record["middles"]),
            record["margin"],
        ),
        record["trainings"],
        record["rank"],
        record["coverage"],
        record["narrow"],
        record["held"],
    )


def sentence(message: str) -> str:
    """Return a sentence on the data behind a forecast for this kind of message."""
    forecast_ = forecast(message)
    if forecast_ is None:
        return f"{message}: no forecast; no training was seen."
    codecs = len(forecast_.evidence.scores) - 1
    return (
        f"{message}: ranked by {forecast_.score.text}, least harm first. Left out in turn, "
        f"{forecast_.trainings} trainings with {codecs} codecs had a rank "
        f"correlation of {forecast_.rank:.2f}; {100 * forecast_.coverage:.0f} % of the bounds held."
    )
