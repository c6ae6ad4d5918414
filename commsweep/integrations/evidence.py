"""The cost of a message's error and bias in this repository's trainings, and a prediction from it.

evidence.csv holds one setting a line: the mean error and bias of its messages, and the nats that
its training lost against dense ones (a nano GPT-2, 100 steps; sweeps text_bias and text_recipe,
compression on one side only). The prediction is the isotonic regression of the loss on what ranks
it best: the bias of gradients, the error of activations.
"""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from scipy.stats import spearmanr
from sklearn.isotonic import IsotonicRegression

FILE = Path(__file__).with_name("evidence.csv")
# Of which number of a message the harm is a function.
BY = {"activations": "error", "activation gradients": "bias"}
DRAWS = 2000  # of the bootstrap


@dataclass(frozen=True)
class Evidence:
    """The evidence about one kind of message."""

    by: str  # "error" or "bias"
    values: np.ndarray  # [settings] of `by`
    lost: np.ndarray  # [settings] nats
    fit: IsotonicRegression

    def harm(self, value: float) -> float:
        """Nats that a nano GPT-2 loses in 100 steps at this error or bias; NaN of NaN. Beyond what
        was measured it is the outermost value.
        """
        return float(self.fit.predict([value])[0]) if math.isfinite(value) else math.nan

    def correlation(self) -> tuple[float, float, float]:
        """Spearman's rank correlation of `by` and the loss over settings, and its 95 % interval
        (bootstrap over settings).
        """
        random, n = np.random.default_rng(0), len(self.lost)
        draws = []
        for _ in range(DRAWS):
            chosen = random.integers(0, n, n)
            draws.append(spearmanr(self.values[chosen], self.lost[chosen]).statistic)
        low, high = np.nanquantile(draws, [0.025, 0.975])
        return float(spearmanr(self.values, self.lost).statistic), float(low), float(high)


@lru_cache
def evidence(message: str) -> Evidence | None:
    """Return the evidence of this kind of message; None where nothing was measured."""
    if message not in BY:
        return None
    by = BY[message]
    with open(FILE, newline="", encoding="utf-8") as handle:
        lines = [line for line in csv.DictReader(handle) if line["message"] == message]
    values, lost = (np.array([float(line[name]) for line in lines]) for name in (by, "lost"))
    fit = IsotonicRegression(out_of_bounds="clip").fit(values, lost)
    return Evidence(by, values, lost, fit)


@lru_cache
def sentence(message: str) -> str:
    """Return a sentence on the data behind a prediction for this kind of message."""
    counts = evidence(message)
    if counts is None:
        return f"{message}: no evidence."
    value, low, high = counts.correlation()
    return (
        f"{message}: predicted from the {counts.by} of {len(counts.lost)} settings of a nano GPT-2 "
        f"after 100 steps (rank correlation {value:.2f} [{low:.2f}, {high:.2f}]); longer trainings "
        "lose more."
    )
