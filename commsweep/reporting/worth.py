"""Worth kept, the share of a message's worth that a setting keeps: (floor - setting) / (floor -
dense).

100 % is dense, 0 % is the floor, below 0 % the message does harm. The floor is the better of two:
the control, a training in which nothing is sent in a direction, and the score that a model reaches
without any message. That score is of letter frequencies or of guessing; of a fine-tuning it is the
untouched model's. A setting that ends no better than without a message has collapsed: its training
is lost, and its worth says nothing. Runs are paired by seed. The interval is Fieller's, which is
right for a ratio of two means that are measured together; where the denominator is not clearly
above zero, no finite interval exists, and this model cannot tell.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.special import stdtrit

from commsweep.reporting.results import base, is_text, nothing_learned
from commsweep.reporting.statistics import LEVEL, interval

LOSS, ACCURACY = "test_on_loss", "test_on_acc"
CONTROL = "zero"
GRADIENTS = ("grad.compressor.", "grad.feedback.", "grad.exchange")
# A learner alone has its own part of the batch and of the samples.
PARTS = ("data.batch_size", "data.train_blocks", "data.train_size")
BOUNDARIES = ("fwd.", "bwd.")
SLACK = 0.05  # of what dense gains over no message: less than that above it is a collapse, too
COLLAPSED, CANNOT_TELL = "collapsed", "cannot tell"


@dataclass(frozen=True)
class Kept:
    """The share of a message's worth that a setting keeps, in percent, with its 95 % interval."""

    percent: float
    low: float | None  # None: not enough seeds, or this model cannot tell
    high: float | None
    n: int  # seeds
    tells: bool  # whether the worth itself is clearly above zero
    collapsed: bool = False  # ends no better than without the message
    diverged: int = 0  # of the seeds

    @property
    def ranks(self) -> bool:
        """True where the share says something: the training is not lost, the model can tell."""
        tells = not math.isnan(self.percent) and (self.n < 2 or self.tells)
        return tells and not self.collapsed and 2 * self.diverged < self.n

    def text(self) -> str:
        """For a table: "79 % [75, 83]"; "collapsed"; "diverged (2 of 3)"."""
        lost = f"diverged ({self.diverged} of {self.n})" if self.diverged else ""
        if lost and 2 * self.diverged >= self.n:
            return lost
        if self.collapsed:
            return f"{COLLAPSED}, {lost}" if lost else COLLAPSED
        if math.isnan(self.percent) or (self.n > 1 and not self.tells):
            return CANNOT_TELL
        share = f"{round(self.percent)} %"
        if self.low is not None and self.high is not None:
            share += f" [{round(self.low)}, {round(self.high)}]"
        return f"{share}, {lost}" if lost else share


def share_kept(
    controls: Sequence[float],
    scores: Sequence[float],
    denses: Sequence[float],
    without: float | None = None,
    diverged: int = 0,
) -> Kept:
    """The share kept, of losses by seed (or of accuracies with a minus: less is better).

    without: the loss that is reached without any message, which is the floor where the control is
    worse. diverged: of the scores. Fieller's interval holds all r with (mean(a) - r mean(b))^2 <=
    t^2 (s_aa - 2 r s_ab + r^2 s_bb) / n, where a = floor - score and b = floor - dense.
    """
    has_score = without is not None and not math.isnan(without)
    floors = np.asarray(controls, float)
    if has_score and without <= floors.mean():
        floors = np.full(len(floors), without)
    a = np.subtract(floors, scores)
    b = np.subtract(floors, denses)
    lost = {"collapsed": has_score and _collapsed(scores, denses, without), "diverged": diverged}  # pyright: ignore[reportArgumentType]
    n, share = len(a), 100.0 * a.mean() / b.mean() if b.mean() else math.nan
    if n < 2:
        return Kept(share, None, None, n, bool(b.mean() > 0), **lost)
    covariance = np.cov(a, b) / n
    t2 = float(stdtrit(n - 1, 1 - LEVEL / 2)) ** 2
    # (b^2 - t^2 s_bb) r^2 - 2 (ab - t^2 s_ab) r + (a^2 - t^2 s_aa) <= 0
    square = b.mean() ** 2 - t2 * covariance[1, 1]
    if square <= 0 or b.mean() <= 0:
        return Kept(share, None, None, n, False, **lost)
    middle = a.mean() * b.mean() - t2 * covariance[0, 1]
    constant = a.mean() ** 2 - t2 * covariance[0, 0]
    root = math.sqrt(max(0.0, middle**2 - square * constant))
    low, high = (100.0 * (middle + sign * root) / square for sign in (-1, 1))
    return Kept(share, low, high, n, True, **lost)


def _collapsed(scores: Sequence[float], denses: Sequence[float], without: float) -> bool:
    """True where losses are no better than without a message, by interval or by `SLACK`."""
    gains = [without - score for score in scores]
    worth = without - float(np.mean(denses))
    ends = interval(gains)
    return float(np.mean(gains)) <= SLACK * worth or (ends is not None and ends[0] <= 0)


@dataclass(frozen=True)
class Floor:
    """The floor of a direction in a training: the control's mean score, and that without a
    message; None where it is not known.
    """

    training: str
    direction: str
    control: float
    without: float | None
    name: str  # of the score without a message
    n: int  # seeds of the control

    @property
    def ends(self) -> tuple[tuple[str, float], ...]:
        """(name, score) of both, the better one first."""
        sent = "nothing sent", abs(self.control)
        if self.without is None:
            return (sent,)
        score = self.name, abs(self.without)
        return (score, sent) if self.without <= self.control else (sent, score)


def floors_text(frame: pd.DataFrame) -> str:
    """The floors of a frame in a sentence, by direction; "" where it has none."""
    texts: dict[str, dict[tuple[str, ...], list[Floor]]] = {}
    for floor in floors(frame):
        names = tuple(name for name, _ in floor.ends)
        texts.setdefault(floor.direction, {}).setdefault(names, []).append(floor)
    sentences = []
    for direction, by_names in texts.items():
        for names, alike in by_names.items():
            ranges = []
            for at, name in enumerate(names):
                scores = [f"{floor.ends[at][1]:.3g}" for floor in alike]
                low, high = min(scores, key=float), max(scores, key=float)
                ranges.append(f"{name} {low}" + (f" to {high}" if high != low else ""))
            worse = f" ({ranges[1]})" if len(ranges) > 1 else ""
            sentences.append(f"{direction}: {ranges[0]}{worse}")
    return f"Floor of {'; of '.join(sentences)}." if sentences else ""


def of_settings(frame: pd.DataFrame) -> dict[str, Kept]:
    """The share that each setting keeps, by setting_id, where its control and dense were run.

    Of a setting that compresses gradients of activations the control sends none of these; of one
    that compresses activations alone it sends none of those, and nothing back where the frame has
    that control. Of one that compresses learners' gradients it is a learner alone, with its part of
    the batch and the samples. A diverged run scores as if nothing had been learned.
    """
    shares: dict[str, Kept] = {}
    for group in _groups(frame):
        keys = ["training", "seed"]
        ends = group.control[[*keys, "score"]].rename(columns={"score": "control"})
        tops = group.dense[[*keys, "score"]].rename(columns={"score": "dense"})
        paired = group.settings.merge(ends, on=keys).merge(tops, on=keys).dropna(subset=["score"])
        for setting, runs in paired.groupby("setting_id", sort=False):
            shares[str(setting)] = share_kept(
                list(runs.control),
                list(runs.score),
                list(runs.dense),
                group.without(str(runs.training.iloc[0])),
                int((runs.status == "diverged").sum()),
            )
    return shares


def floors(frame: pd.DataFrame) -> list[Floor]:
    """The floors of a frame, by training and direction."""
    of_frame = []
    for group in _groups(frame):
        compared = set(group.settings.training) & set(group.dense.training)
        for training, runs in group.control.groupby("training", sort=False):
            if str(training) in compared:
                score = float(runs.score.mean())
                without = group.without(str(training))
                floor = Floor(str(training), group.direction, score, without, group.name, len(runs))
                of_frame.append(floor)
    return of_frame


@dataclass(frozen=True)
class _Group:
    """Runs whose floor is of one kind. Scores are losses, or accuracies with a minus.

    settings, control, dense: with columns training, seed, score, status, setting_id.
    """

    direction: str
    settings: pd.DataFrame
    control: pd.DataFrame
    dense: pd.DataFrame
    least: float | None  # the score of what knows no message; None: not known
    name: str  # of that score
    untouched: pd.Series | None = None  # of fine-tunings, the model's own score by training

    def without(self, training: str) -> float | None:
        """The score that is reached without a message."""
        if self.untouched is not None:
            return float(self.untouched[training]) if training in self.untouched else None
        return self.least


def _groups(frame: pd.DataFrame) -> Iterator[_Group]:
    done = frame[frame.status.isin(["finished", "diverged"])]
    if "data.tokenizer" in frame:
        text = done["data.tokenizer"].notna()
    else:
        text = pd.Series(False, done.index)
    for rows, metric, sign in ((done[text], LOSS, 1), (done[~text], ACCURACY, -1)):
        if not len(rows) or metric not in rows:
            continue
        for _, alike in (
            rows.groupby("data.name", sort=False) if "data.name" in rows else [(0, rows)]
        ):
            nothing = nothing_learned(alike)
            score = sign * alike[metric].where(alike.status == "finished", nothing)
            yield from _directions(alike.assign(score=score), sign * nothing)


def _directions(rows: pd.DataFrame, nothing: float) -> Iterator[_Group]:
    fwd, bwd = (rows[f"{side}.compressor.kind"] for side in ("fwd", "bwd"))
    plain, back = (fwd == "none") & (bwd == "none"), bwd != "none"
    least, name = (None if math.isnan(nothing) else nothing), "guessing"
    if is_text(rows):
        name = "letter frequencies" if (rows["data.tokenizer"] == "bytes").all() else name
    untouched = None
    crossing = rows.assign(training=base(rows, *BOUNDARIES))
    if "model.weights" in rows and rows["model.weights"].fillna("").ne("").all():
        name = "the untouched model"
        # the training at rate 0 is the untouched model; only the rate tells it from the others
        rateless = base(rows, *BOUNDARIES, "optim.lr")
        still = rows.assign(rateless=rateless)[plain & (rows["optim.lr"] == 0)]
        scores = still.groupby("rateless").score.mean()
        untouched = rateless.map(scores).groupby(crossing.training).first().dropna()
    dense = crossing[plain]
    both = crossing[(fwd == CONTROL) & (bwd == CONTROL)]
    forward_only = crossing[(fwd == CONTROL) & ~back]
    # a training that has the control without a way back is held against that one
    without_both = ~forward_only.training.isin(both.training)
    activations = pd.concat([both, forward_only[without_both]])
    gradients = crossing[(bwd == CONTROL) & (fwd == "none")]
    common = least, name, untouched
    forward = ~back | ((fwd == CONTROL) & (bwd == CONTROL))
    yield _Group("activations", crossing[forward], activations, dense, *common)
    yield _Group("gradients", crossing[back & (fwd != CONTROL)], gradients, dense, *common)
    yield _Group("gradients", dense, gradients, dense, *common)
    yield _learners(rows, least, name)


def _learners(rows: pd.DataFrame, least: float | None, name: str) -> _Group:
    """The runs of several learners; their control is a learner alone that has its part of the batch
    and of the samples, and as many steps.
    """
    n = rows["grad.learners"]
    shares = rows["data.batch_size"].div(n).astype(str)
    for size in ("data.train_blocks", "data.train_size"):
        if size in rows:  # 0: all samples, which no learner has alone
            share = rows[size].div(n).astype(str)
            shares += "|" + share.mask((rows[size] == 0) & (n > 1), "no part")
    keys = {"training": base(rows, *GRADIENTS), "alone": base(rows, "grad.", *PARTS) + shares}
    rows = rows.assign(**keys)
    shared, lone = rows[n > 1], rows[n == 1].drop(columns="training")
    control = lone.merge(shared[["training", "alone"]].drop_duplicates(), on="alone")
    kind = shared["grad.compressor.kind"]
    settings, dense = shared[kind != "none"], shared[kind == "none"]
    return _Group("learners", settings, control, dense, least, name)
