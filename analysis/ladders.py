"""Ours: does a loss last? The same settings on trainings of growing length or width, each at a
learning rate of its own, and with BatchNorm's statistics gathered anew; claims S1 to S7.

A loss is what a setting loses against the dense run of the same seed and rung: nats of test loss,
points of test accuracy. Slopes are least squares over the logarithm of the rung, seed by seed. The
margins were set when the rows of the text ladder were known, before those of all compressed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from commsweep.config.labels import describe
from commsweep.reporting.claim import Claim, Effect, combined
from commsweep.reporting.results import (
    is_text,
    lost_against,
    masked,
    nothing_learned,
    score_and_sign,
)
from commsweep.reporting.statistics import interval
from commsweep.reporting.style import (
    Draw,
    Ends,
    Look,
    distinct_looks,
    drawing,
    legend,
    logarithmic,
    look,
    named,
    plot,
    plt,
    size,
)
from commsweep.reporting.style import ends as ends_of
from commsweep.reporting.table import ON, PERCENT, PLAIN, Table, cell

from .bias import LARGE, LOSS

NAME = "ladders"
# Rungs: column, what it counts.
RUNGS = {"data.train_blocks": "steps", "epochs": "epochs", "model.width": "features"}
RATE = "optim.lr"
RECALIBRATED = "test_recalibrated_acc"
HIGH, LOW = 0.5, 0.2  # nats
STEEP = 0.05  # nats a doubling: 0.2 over the sixteenfold length of the text ladder
BIASED = (
    "gradients: TopK 10 %",
    "gradients: EF + TopK 10 %",
    "gradients: min-max 2 bit, group scale",
    "TopK 10 %",
)
UNBIASED = ("gradients: min-max 2 bit, group scale, stochastic", "gradients: TernGrad")
RECIPE = "TopK 20 %, 4 bit values, shared mask, 2 bit stochastic values"
SEVERE = 2.0  # points
ROUNDING = 1e-9  # of sums of floats
SHORT = {
    "gradients: TopK 10 %": "gradients, TopK 10 %",
    "gradients: EF + TopK 10 %": "gradients, TopK 10 % + EF",
    "gradients: min-max 2 bit, group scale": "gradients, 2 bits nearest",
    "gradients: min-max 2 bit, group scale, stochastic": "gradients, 2 bits unbiased",
    "gradients: TernGrad": "gradients, TernGrad",
    "activations: min-max 2 bit, group scale": "activations, 2 bits",
    "TopK 10 %": "both, TopK 10 %",
    "EF21 + TopK 10 %": "both, TopK 10 % + EF21",
    RECIPE: "both, the recipe",
}


@dataclass(frozen=True)
class Ladder:
    """The same arms at several rungs."""

    column: str  # of the rung
    rungs: tuple[float, ...]
    text: bool
    # what an arm loses at a rung, by seed; arms by their plain label
    lost: dict[str, dict[float, dict[int, float]]]
    ids: dict[str, list[str]]
    dense: dict[float, float]  # mean score at a rung

    @property
    def unit(self) -> str:
        return "nats" if self.text else "points"

    @property
    def counted(self) -> str:
        """Return what a rung counts."""
        return RUNGS[self.column]

    def labels(self) -> list[float]:
        """The rungs as people count them."""
        if self.column == "data.train_blocks":
            return [rung / 16 for rung in self.rungs]
        return list(self.rungs)

    def slopes(self, arm: str) -> dict[int, float]:
        """Return how much more is lost with each doubling, by seed that has all rungs."""
        x = np.log2(self.rungs)
        return {seed: float(np.polyfit(x, y, 1)[0]) for seed, y in self._full(arm).items()}

    def _full(self, arm: str) -> dict[int, list[float]]:
        """Return what is lost at every rung, by seed that has them all."""
        losses = self.lost[arm]
        seeds = set.intersection(*(set(losses[rung]) for rung in self.rungs))
        return {seed: [losses[rung][seed] for rung in self.rungs] for seed in sorted(seeds)}

    def next_rung(self, arm: str) -> str:
        """Return what a straight line through the rungs says of the next one, with a 95 % interval
        over seeds; refused where there are too few rungs, or where the line is bent.
        """
        if len(self.rungs) < 3:
            return "refused: two rungs"
        x = np.log2(self.rungs)
        ahead, bends = [], []
        for y in self._full(arm).values():
            ahead.append(float(np.polyval(np.polyfit(x, y, 1), 2 * x[-1] - x[-2])))
            bends.append(y[-1] - 2 * y[-2] + y[-3])
        bend = interval(bends)
        if bend is None or bend[0] > ROUNDING or bend[1] < -ROUNDING:
            return "refused: bent"
        low, high = interval(ahead) or (math.nan, math.nan)
        return f"{np.mean(ahead):.3g} [{low:.3g}, {high:.3g}]"


def rows(frame: pd.DataFrame) -> pd.DataFrame:
    """Runs of one learner that have a rung: a length or width that every arm varies, a learning
    rate that every arm varies, or a scoring after recalibration.
    """
    rows = frame[(frame["grad.learners"] == 1) & ~masked(frame)]
    for start in ("fwd.start_step", "bwd.start_step"):
        if start in rows:  # a warm start is another training
            rows = rows[rows[start].isna()]
    if RECALIBRATED in rows and rows[RECALIBRATED].notna().any():
        return rows
    return rows if _rungs(rows, (*RUNGS, RATE)) else rows.iloc[:0]


def _rungs(frame: pd.DataFrame, columns: tuple[str, ...] = tuple(RUNGS)) -> str:
    """The column that every arm varies, dense among them; "" where there is none or more."""
    done = frame[frame.status == "finished"]
    varied = [column for column in columns if column in done and done[column].nunique() > 1]
    if not varied:  # of most sweeps: no arm has to be put into words
        return ""
    if sum(column in RUNGS for column in varied) > 1:  # a grid of rungs: `scale` speaks of it
        return ""
    arms = arms_of(done)
    if arms.nunique() < 2 or "dense" not in set(arms):
        return ""
    for column in varied:
        if done.groupby(arms)[column].nunique().min() > 1:
            return column
    return ""


def arms_of(frame: pd.DataFrame) -> pd.Series:
    """The compression of every run in words, whatever else varies."""
    texts = {}
    for record in frame.drop_duplicates("setting_id").to_dict("records"):
        present = {key: value for key, value in record.items() if value == value}
        texts[record["setting_id"]] = describe(present)
    return frame.setting_id.map(texts)


def ladder(frame: pd.DataFrame) -> Ladder | None:
    """The ladder in these rows; None where they have none."""
    column = _rungs(frame)
    if not column:
        return None
    done = frame[frame.status == "finished"]
    done = done.assign(arm=arms_of(done))
    score = score_and_sign(done)
    dense = done[done.arm == "dense"]
    compressed = done[done.arm != "dense"]
    compressed = compressed.assign(lost=lost_against(compressed, dense, [column, "seed"], score))
    lost: dict[str, dict[float, dict[int, float]]] = {}
    ids: dict[str, list[str]] = {}
    rungs = tuple(sorted(done[column].dropna().unique()))
    for _, row in compressed[compressed.lost.notna()].iterrows():
        at = lost.setdefault(row["arm"], {rung: {} for rung in rungs})
        at[row[column]][int(row["seed"])] = row["lost"]
        ids.setdefault(row["arm"], list(dense.id)).append(row["id"])
    means = {rung: float(group[score[0]].mean()) for rung, group in dense.groupby(column)}
    return Ladder(column, rungs, is_text(done), lost, ids, means)


def _learned(frame: pd.DataFrame, ladder_: Ladder, rung: float) -> float:
    """Return what the dense run of a rung has learned beyond guessing, in the ladder's unit; nan
    where it is not known.
    """
    if not ladder_.text:
        return 100 * (ladder_.dense[rung] - nothing_learned(frame))
    return nothing_learned(frame) - ladder_.dense[rung]


def tables(frame: pd.DataFrame) -> list[Table]:
    """Return what is lost at every rung; every arm at every rate; inference after recalibration."""
    tables = [_losses(frame), _rates(frame), _recalibrated(frame)]
    return [table for table in tables if table.rows]


def _losses(frame: pd.DataFrame) -> Table:
    if (ladder_ := ladder(frame)) is None:
        return Table("ladder", "", [])
    names = [f"{label:,.0f} {ladder_.counted}" for label in ladder_.labels()]
    table = Table(
        "ladder",
        f"{ladder_.unit.capitalize()} lost against dense, and as a share of what dense learned",
        ["Setting", *names, "more with each doubling [95 %]", "next rung, by a straight line"],
    )
    dense = [
        f"{ladder_.dense[rung]:.3f} nats" if ladder_.text else f"{100 * ladder_.dense[rung]:.1f} %"
        for rung in ladder_.rungs
    ]
    table.rows.append(["dense: score", *dense, "", ""])
    for arm in sorted(ladder_.lost, key=lambda arm: _last(ladder_, arm)):
        line = []
        for rung in ladder_.rungs:
            values = list(ladder_.lost[arm][rung].values())
            if not values:
                line.append("-")
                continue
            share = np.mean(values) / _learned(frame, ladder_, rung)
            shown = f" ({100 * share:.0f} %)" if math.isfinite(share) else ""
            line.append(f"{np.mean(values):.3g} ± {np.std(values, ddof=1):.2g}{shown}")
        slopes = list(ladder_.slopes(arm).values())
        low, high = interval(slopes) or (math.nan, math.nan)
        slope = f"{np.mean(slopes):+.3g} [{low:+.3g}, {high:+.3g}]" if slopes else "-"
        table.rows.append([arm, *line, slope, ladder_.next_rung(arm)])
    return table


def _last(ladder_: Ladder, arm: str) -> float:
    values = list(ladder_.lost[arm][ladder_.rungs[-1]].values())
    return float(np.mean(values)) if values else math.inf


def _tuned(frame: pd.DataFrame) -> tuple[pd.DataFrame, dict[str, float], int] | None:
    """(the runs that judge, each arm's best rate, the seed that chose it)."""
    if _rungs(frame, (RATE,)) != RATE or _rungs(frame):
        return None
    done = frame[frame.status == "finished"]
    done = done.assign(arm=arms_of(done))
    chooser = int(done.seed.max())  # held out: the last seed chooses, the compressed judge
    metric = LOSS if is_text(done) else ON
    best = {}
    for arm, group in done[done.seed == chooser].groupby("arm"):
        scores = group.set_index(RATE)[metric]
        best[str(arm)] = float(scores.idxmin() if metric == LOSS else scores.idxmax())
    return done[done.seed != chooser], best, chooser


@dataclass(frozen=True)
class AtBestRate:
    """The test losses of an arm at the rate that a held-out seed chose."""

    losses: dict[int, float]  # by the seeds that judge
    ids: list[str]


def at_best_rates(frame: pd.DataFrame) -> dict[str, AtBestRate]:
    """Each arm of a text model at its best rate; empty where the rate does not vary."""
    tuned = _tuned(frame)
    if tuned is None or not is_text(frame):
        return {}
    done, best, _ = tuned
    chosen = {}
    for arm, rate in best.items():
        group = done[(done.arm == arm) & (done[RATE] == rate)]
        losses = dict(zip(group.seed.astype(int), group[LOSS], strict=True))
        chosen[arm] = AtBestRate(losses, list(group.id))
    return chosen


def over(label: str, arm: AtBestRate, opponent: AtBestRate | None, **region: float) -> Effect:
    """The nats that an arm loses against another, each at its own rate, paired by seed."""
    losses = opponent.losses if opponent else {}
    ids = [*(opponent.ids if opponent else []), *arm.ids]
    return combined(label, [(1.0, arm.losses), (-1.0, losses)], ids=ids, digits=3, **region)


def _rates(frame: pd.DataFrame) -> Table:
    if (tuned := _tuned(frame)) is None:
        return Table("rates", "", [])
    done, best, chooser = tuned
    rates = sorted(done[RATE].unique())
    table = Table(
        "rates",
        f"Test loss at every learning rate; * chosen for the setting by held-out seed {chooser}",
        ["Setting", *(f"{rate:g}" for rate in rates)],
    )
    for arm, group in done.groupby("arm", sort=False):
        line = []
        for rate in rates:
            score = cell(group[group[RATE] == rate], LOSS, PLAIN)
            line.append(score.text() + (" *" if best.get(str(arm)) == rate else ""))
        table.rows.append([str(arm), *line])
    return table


def _recalibrated(frame: pd.DataFrame) -> Table:
    if RECALIBRATED not in frame or frame[RECALIBRATED].isna().all():
        return Table("recalibrated", "", [])
    table = Table(
        "recalibrated",
        "Test accuracy (%): compression on, off, and off after BatchNorm met dense batches",
        ["Setting", "on", "off", "off, recalibrated", "seeds"],
    )
    done = frame[frame[RECALIBRATED].notna()]
    for method, group in done.groupby("method", sort=False):
        scores = [cell(group, name, PERCENT) for name in (ON, "test_off_acc", RECALIBRATED)]
        table.rows.append([str(method), *scores, str(len(group))])
    return table


# Claims.


def _of_arms(
    ladder_: Ladder,
    arms: tuple[str, ...],
    label: str,
    values: Callable[[str], dict[int, float]],
    **region: float,
) -> list[Effect]:
    """An effect of each arm that was trained; label: of it, with {arm} for its name; values: of an
    arm, by seed.
    """
    return [
        combined(
            label.format(arm=arm),
            [(1.0, values(arm))],
            ids=ladder_.ids[arm],
            digits=3 if ladder_.text else 1,
            **region,
        )
        for arm in arms
        if arm in ladder_.lost
    ]


def _slopes(
    frame: pd.DataFrame, arms: tuple[str, ...], width: bool, **region: float
) -> list[Effect]:
    """Return how much more is lost with each doubling."""
    ladder_ = ladder(frame)
    if ladder_ is None or (ladder_.column == "model.width") != width:
        return []
    label = f"{ladder_.unit} more lost by {{arm}} with each doubling of the {ladder_.counted}"
    return _of_arms(ladder_, arms, label, ladder_.slopes, **region)


def _longest(frame: pd.DataFrame, arms: tuple[str, ...], **region: float) -> list[Effect]:
    """Return what is lost in the longest training."""
    ladder_ = ladder(frame)
    if ladder_ is None or ladder_.column == "model.width":
        return []
    label = f"{ladder_.unit} lost by {{arm}} after {ladder_.labels()[-1]:,.0f} {ladder_.counted}"
    return _of_arms(
        ladder_, arms, label, lambda arm: ladder_.lost[arm][ladder_.rungs[-1]], **region
    )


def s1(frame: pd.DataFrame) -> Claim:
    """Biased gradients."""
    effects = []
    if is_text(frame):
        effects = _longest(frame, BIASED, above=HIGH)
        effects += _slopes(frame, BIASED, width=False, above=STEEP)
    return Claim(
        "S1",
        f"Biased gradients lose more than {HIGH:g} nats in the longest training, and more with "
        f"every doubling of its length (at least {STEEP:g} nats).",
        effects,
    )


def s2(frame: pd.DataFrame) -> Claim:
    """Unbiased gradients."""
    effects = []
    if is_text(frame):
        effects = _longest(frame, UNBIASED, below=LOW)
        effects += _slopes(frame, UNBIASED, width=False, within=STEEP)
    return Claim(
        "S2",
        f"Unbiased gradients lose less than {LOW:g} nats there, and hardly more with every "
        f"doubling (within {STEEP:g} nats).",
        effects,
    )


def s3(frame: pd.DataFrame) -> Claim:
    """The recipe at the longest rung."""
    effects = _longest(frame, (RECIPE,), below=LARGE if is_text(frame) else SEVERE)
    return Claim(
        "S3",
        f"The recipe still loses little in the longest training (less than {LARGE:g} nats, "
        f"{SEVERE:g} points).",
        effects,
    )


def s4(frame: pd.DataFrame) -> Claim:
    """Images: is a loss only a slower training?"""
    arms = ("TopK 10 %", "EF21 + TopK 10 %", RECIPE)
    return Claim(
        "S4",
        "What compression loses on images is time: the loss shrinks with the length of the "
        "training.",
        [] if is_text(frame) else _slopes(frame, arms, width=False, below=0.0),
    )


def s5(frame: pd.DataFrame) -> Claim:
    """Dense inference after recalibration."""
    effects = []
    if RECALIBRATED in frame:
        done = frame[frame[RECALIBRATED].notna()]
        for method, group in done[arms_of(done).str.startswith("TopK")].groupby(
            "method", sort=False
        ):
            scores = 100 * (group[ON] - group[RECALIBRATED])
            effects.append(
                Effect(
                    f"{method}: accuracy, compression on minus off after recalibration",
                    below=SEVERE,
                    values=[float(value) for value in scores],
                    by=[int(seed) for seed in group.seed],
                    ids=list(group.id),
                )
            )
    return Claim(
        "S5",
        "A model trained with TopK is fit for dense inference once BatchNorm's statistics are "
        f"gathered from dense batches (at most {SEVERE:g} points below compressed inference).",
        effects,
    )


def s6(frame: pd.DataFrame) -> Claim:
    """Each at its own rate."""
    effects = []
    chosen = at_best_rates(frame)
    dense = chosen.pop("dense", None)
    for arm, scores in chosen.items():
        region = {"below": LARGE} if arm in UNBIASED else {"above": LARGE}
        label = f"nats lost by {arm}, both at their own best rate"
        effects.append(over(label, scores, dense, **region))
    return Claim(
        "S6",
        "At a learning rate of their own biased gradients still lose more than "
        f"{LARGE:g} nats, unbiased ones less.",
        effects,
    )


def s7(frame: pd.DataFrame) -> Claim:
    """Width."""
    arms = (*BIASED, *UNBIASED, RECIPE)
    return Claim(
        "S7",
        f"Losses change little with the width (within {STEEP:g} nats a doubling).",
        _slopes(frame, arms, width=True, within=STEEP),
    )


CLAIMS = [s1, s2, s3, s4, s5, s6, s7]


# Figures.


def _ends(values: Sequence[float]) -> tuple[float, float, float]:
    """(mean, lower and upper end of its 95 % interval); of one value, that."""
    mean = float(np.mean(values)) if values else math.nan
    return mean, *(interval(values) or (mean, mean))


def lasting(frame: pd.DataFrame, _curves: pd.DataFrame) -> Figure | None:
    """The loss of each setting against dense at every rung, in percent of what dense has
    learned beyond guessing (text: beyond the frequencies of letters). Lines: means over seeds.
    Bands: 95 % intervals of the mean. At 100 % nothing was learned.
    """
    ladder_ = ladder(frame)
    if ladder_ is None or not math.isfinite(_learned(frame, ladder_, ladder_.rungs[0])):
        return None
    with drawing():
        figure, axis = plt.subplots(figsize=size(2, 2.9))
        ends, tops = [], []
        arms = sorted(ladder_.lost, key=lambda arm: -_last(ladder_, arm))
        styles = distinct_looks(arms)
        for arm in arms:
            means, lows, highs = [], [], []
            for rung in ladder_.rungs:
                scale = 100 / _learned(frame, ladder_, rung)
                values = [scale * value for value in ladder_.lost[arm][rung].values()]
                mean, low, high = _ends(values)
                means.append(mean)
                lows.append(low)
                highs.append(high)
            style = styles[arm]
            ink = str(style["color"])
            axis.plot(ladder_.labels(), means, **style)
            ends.append((means[-1], SHORT.get(arm, arm), ink))
            tops.append(1.02 * max(highs))
            axis.fill_between(ladder_.labels(), lows, highs, color=ink, alpha=0.15, lw=0)
        axis.axhline(0, color="0.3", lw=0.8)
        if ladder_.text:
            axis.axhline(100, color="0.3", lw=0.8, ls="--")
            transform = axis.get_yaxis_transform()
            axis.text(
                0.98, 102, "letter frequencies", fontsize="small", ha="right", transform=transform
            )
            axis.set_ylim(-5, max(160.0, *tops))
        axis.set_xscale("log")
        axis.set_xticks(ladder_.labels(), [f"{label:,.0f}" for label in ladder_.labels()])
        axis.minorticks_off()
        axis.set(xlabel=ladder_.counted, ylabel="lost (% of what\ndense learned)")
        named(axis, ends)
    return figure


def quality(frame: pd.DataFrame, _curves: pd.DataFrame) -> Figure | None:
    """Test loss or accuracy of the longest training against the bytes at the boundaries. Means over
    seeds. Bars: 95 % intervals of the mean.
    """
    ladder_ = ladder(frame)
    if ladder_ is None or ladder_.column == "model.width":
        return None
    done = frame[(frame.status == "finished") & (frame[ladder_.column] == ladder_.rungs[-1])]
    done = done.assign(arm=arms_of(done))
    metric, factor = (LOSS, 1.0) if ladder_.text else (ON, 100.0)
    points = []
    for arm, group in done.groupby("arm", sort=False):
        scores = [factor * value for value in group[metric]]
        points.append((str(arm), 100 * group["bytes.ratio"].mean(), *_ends(scores)))
    with drawing():
        figure, axis = plt.subplots(figsize=size(2, 2.6))
        lows, highs = [point[3] for point in points], [point[4] for point in points]
        axis.set_ylim(min(lows) - 0.06 * max(highs), 1.03 * max(highs))
        styles = distinct_looks(point[0] for point in points)
        for arm, x, mean, low, high in points:
            style: Look = styles[arm] | {"ms": 7 if arm == "dense" else 4}
            ink = style["color"]
            plot(axis, [x], [Ends(mean, low, high, 0)], **style)
            heights = _spread_out([point[2] for point in points if 0.5 < point[1] / x < 2], axis)
            axis.annotate(
                SHORT.get(arm, arm),
                (1.09 * x, heights[mean]),
                fontsize="small",
                color=ink,
                va="center",
            )
        best = next(mean for arm, _, mean, _, _ in points if arm == "dense")
        axis.axhline(best, color="0.6", lw=0.7, ls=":")
        logarithmic(axis.xaxis)
        axis.set_xlim(right=330)
        ticks = (2, 5, 10, 20, 50, 100)
        axis.set_xticks(ticks, [str(tick) for tick in ticks])
        label = "test loss (nats a byte)" if ladder_.text else "test accuracy (%)"
        axis.set(
            xlabel="bytes at the boundaries (% of dense)",
            ylabel=label,
            title=f"after {ladder_.labels()[-1]:,.0f} {ladder_.counted}",
        )
    return figure


def _spread_out(heights: list[float], axis: Axes) -> dict[float, float]:
    """Return where the labels of points at these heights stand, from below: none within a line's
    height of the one before.
    """
    low, high = axis.get_ylim()
    out: dict[float, float] = {}
    last = -math.inf
    for height in sorted(heights):
        last = max(height, last + 0.055 * (high - low))
        out[height] = last
    return out


def recalibrated(frame: pd.DataFrame, _curves: pd.DataFrame) -> Figure | None:
    """Test accuracy of trainings with TopK: compressed inference, dense inference, and dense
    inference after BatchNorm gathered its statistics from dense batches. Means over seeds. Bars:
    95 % intervals of the mean.
    """
    if RECALIBRATED not in frame:
        return None
    done = frame[frame[RECALIBRATED].notna()]
    arms = arms_of(done)
    done = done[(arms == "dense") | arms.str.startswith("TopK")]
    methods = list(dict.fromkeys(done.method))
    if len(methods) < 2:
        return None
    modes = ((ON, "compressed"), ("test_off_acc", "dense"), (RECALIBRATED, "dense, recalibrated"))
    with drawing():
        figure, axis = plt.subplots(figsize=size(2, 2.4))
        for column_index, (column, name) in enumerate(modes):
            for index, method in enumerate(methods):
                scores = [100 * value for value in done[done.method == method][column]]
                x, mark = index + 0.2 * (column_index - 1), look(name, ls="none")
                plot(axis, [x], [ends_of(scores)], name if index == 0 else None, **mark)
        axis.set_xticks(range(len(methods)), methods)
        axis.set_ylabel("test accuracy (%)")
        legend(figure)
    return figure


def rates(frame: pd.DataFrame, _curves: pd.DataFrame) -> Figure | None:
    """Test loss of each setting at every learning rate, and which rate a held-out seed chose for it
    (ringed). Means over the judging seeds. Bars: 95 % intervals of the mean.
    """
    if (tuned := _tuned(frame)) is None or not is_text(frame):
        return None
    done, best, _ = tuned
    with drawing():
        figure, axis = plt.subplots(figsize=size(2, 2.6))
        x = sorted(done[RATE].unique())
        for arm, group in done.groupby("arm", sort=False):
            means = [ends_of(group[group[RATE] == rate][LOSS]) for rate in x]
            name = SHORT.get(str(arm), str(arm))
            style = look(name)
            plot(axis, x, means, name, **style)
            at = x.index(best[str(arm)])
            axis.plot(x[at], means[at].mean, "o", ms=9, mfc="none", mec=style["color"])
        logarithmic(axis.xaxis)
        axis.set_xticks(x, [f"{rate:g}" for rate in x], fontsize="small", rotation=30)
        axis.minorticks_off()
        axis.set(xlabel="learning rate", ylabel="test loss (nats a byte)")
        legend(figure)
    return figure


FIGURES: dict[str, Draw] = {
    "quality": quality,
    "lasting": lasting,
    "recalibrated": recalibrated,
    "rates": rates,
}
