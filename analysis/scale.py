"""Ours: a law of scale. What a code without bias costs, by steps, width and error; claims Y1 to Y3.

The law is fitted to the smaller widths of a sweep, and foretells the largest one:

    worth of the messages (nats)    c steps^a width^b
    lost by a code (nats)           c steps^a width^b error^d
    lost by a code (% of worth)     c steps^a width^b error^d

The error is that of a code's messages (--diagnose); at the largest width it counts as known: it is
that of the width below. An interval reaches as far as the law missed the largest width that it was
fitted to, when that was left out. The claims were committed before the largest width was trained.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from scipy.optimize import least_squares

from commsweep.reporting.claim import Claim, Effect
from commsweep.reporting.results import is_text, plain
from commsweep.reporting.style import INK, MARKS, Draw, legend, logarithmic, plt, size, styled
from commsweep.reporting.table import Table

from .bias import LOSS
from .ladders import arms_of

NAME = "scale"
STEPS, WIDTH, ERROR = "data.train_blocks", "model.width", "diagnosis.bwd.error"
DENSE, NOTHING = "dense", "gradients: nothing"
FEWEST = 2  # widths and lengths that a law is fitted to
NOISE = 0.01, 1.0  # nats, and percent of the worth: what two seeds differ by
TENTH = 0.1  # of a value: what a fit may miss as soon as the noise
POINTS, NATS, HELD = 5.0, 0.05, 0.8  # of the claims


@dataclass(frozen=True)
class Point:
    """A code at a width and length; means over seeds.

    lost: nats against dense; worth: nats between nothing sent and dense. error: of the messages.
    """

    arm: str
    steps: float
    width: float
    error: float
    lost: float
    worth: float
    ids: tuple[str, ...] = ()

    @property
    def share(self) -> float:
        """Return what is lost, in percent of the worth."""
        return 100 * self.lost / self.worth

    @property
    def worth_kept(self) -> float:
        """Return the worth kept, in percent."""
        return 100 - self.share


@dataclass(frozen=True)
class Law:
    """A product of powers: exp(constant) steps^a width^b error^d. factor: by which it missed
    points that were left out, at most; 1 where it was not tried. noise: in the unit of its values.
    """

    constant: float
    powers: tuple[float, float, float]
    noise: float
    factor: float = 1.0

    def at(self, point: Point) -> float:
        """Return its value at a point."""
        return math.exp(self.constant + float(np.dot(self.powers, _logs(point))))

    def ends(self, point: Point) -> tuple[float, float]:
        """Return the interval of its value at a point."""
        value = self.at(point)
        return max(0.0, value / self.factor - self.noise), value * self.factor + self.noise


def _logs(point: Point) -> list[float]:
    return [math.log(value) for value in (point.steps, point.width, point.error)]


def law(points: Sequence[Point], values: Sequence[float], noise: float) -> Law:
    """Fit a law to values at points, in which a miss counts by the noise and a tenth of the
    value. Errors that do not differ have no power.
    """
    inputs = np.array([[1.0, *_logs(point)] for point in points])
    varied = np.ptp(inputs, axis=0) > 0
    varied[0] = True
    targets = np.array(values)
    scale = noise + TENTH * np.abs(targets)
    logs = np.log(np.maximum(targets, noise))
    start = np.linalg.lstsq(inputs[:, varied], logs, rcond=None)[0]
    fit = least_squares(lambda x: (np.exp(inputs[:, varied] @ x) - targets) / scale, start)
    powers = np.zeros(4)
    powers[varied] = fit.x
    return Law(float(powers[0]), (float(powers[1]), float(powers[2]), float(powers[3])), noise)


def tried(points: Sequence[Point], values: Sequence[float], noise: float) -> Law:
    """Fit a law, and try it on the largest width that it knows, left out."""
    largest = max(point.width for point in points)
    pairs = list(zip(points, values, strict=True))
    smaller = [pair for pair in pairs if pair[0].width < largest]
    before = law([point for point, _ in smaller], [value for _, value in smaller], noise)
    misses = [0.0]
    for point, value in pairs:
        if point.width == largest:
            foretold = before.at(point)
            # what noise explains is no miss
            beyond = max(abs(value - foretold) - noise, 0.0) * np.sign(value - foretold)
            misses.append(abs(math.log(max(foretold + beyond, noise) / max(foretold, noise))))
    return replace(law(points, values, noise), factor=math.exp(max(misses)))


@dataclass(frozen=True)
class Laws:
    """The laws of a sweep, the points that they were fitted to, and those that they foretell, which
    have nan for what is not measured yet.
    """

    worth: Law
    lost: Law
    share: Law
    points: list[Point]
    unseen: list[Point]


def points_of(frame: pd.DataFrame) -> list[Point]:
    """Return the codes of a frame that have dense and nothing sent beside them."""
    done = frame[frame.status == "finished"]
    if ERROR not in done or WIDTH not in done or not is_text(done):
        return []
    done = done.assign(arm=arms_of(done))
    points = []
    for (steps, width), rows in done.groupby([STEPS, WIDTH]):
        losses = {str(arm): group.set_index("seed")[LOSS] for arm, group in rows.groupby("arm")}
        if DENSE not in losses or NOTHING not in losses:
            continue
        worth = (losses[NOTHING] - losses[DENSE]).mean()
        for arm, group in rows.groupby("arm"):
            lost = (losses[str(arm)] - losses[DENSE]).mean()
            if arm not in (DENSE, NOTHING) and lost == lost and worth > 0:
                size = float(group["data.batch_size"].iloc[0])
                ids = tuple(rows[rows.arm.isin((arm, DENSE, NOTHING))].id)
                error = float(group[ERROR].mean())
                points.append(Point(str(arm), steps / size, width, error, lost, worth, ids))
    return points


def laws(frame: pd.DataFrame) -> Laws | None:
    """Return the laws that the smaller widths of a frame give; None where there are too few. Of
    three widths none is kept back: the next one, twice as wide, is foretold.
    """
    points = points_of(frame)
    widths = sorted({point.width for point in points})
    if len(widths) < FEWEST + 1 or len({point.steps for point in points}) < FEWEST:
        return None
    if len(widths) > FEWEST + 1:
        unseen = [point for point in points if point.width == widths[-1]]
        points = [point for point in points if point.width < widths[-1]]
    else:
        longest = max(point.steps for point in points)
        unseen = [
            replace(point, width=2 * widths[-1], lost=math.nan, worth=math.nan)
            for point in points
            if point.width == widths[-1] and point.steps == longest
        ]
    # the error of an unseen point is that of the closest width: it was not measured before
    largest = max(point.width for point in points)
    errors = {(p.arm, p.steps): p.error for p in points if p.width == largest}
    unseen = [
        replace(point, error=errors[point.arm, point.steps])
        for point in unseen
        if (point.arm, point.steps) in errors
    ]
    nats, percent = NOISE
    without_error = [replace(point, error=1.0) for point in points]
    return Laws(
        tried(without_error, [point.worth for point in points], nats),
        tried(points, [point.lost for point in points], nats),
        tried(points, [point.share for point in points], percent),
        points,
        unseen,
    )


def rows(frame: pd.DataFrame) -> pd.DataFrame:
    """Runs of a sweep whose widths and lengths give a law."""
    runs = plain(frame)
    return runs if len(runs) and laws(runs) is not None else runs.iloc[:0]


def tables(frame: pd.DataFrame) -> list[Table]:
    """Return the laws, and what they foretell of the largest width."""
    if (fitted_laws := laws(frame)) is None:
        return []
    powers = Table(
        "scale",
        "Laws of scale: powers of steps, width and error, and the factor by which a law missed the "
        "largest width that it knows, left out",
        ["Law", "steps", "width", "error", "factor", "points"],
    )
    for name, fitted in (
        ("worth of the messages", fitted_laws.worth),
        ("nats lost", fitted_laws.lost),
        ("share of the worth lost", fitted_laws.share),
    ):
        columns = [f"{power:+.2f}" if power else "-" for power in fitted.powers]
        powers.rows.append([name, *columns, f"{fitted.factor:.2f}", str(len(fitted_laws.points))])
    return [powers, _foretold(fitted_laws)]


def _foretold(fitted_laws: Laws) -> Table:
    width = fitted_laws.unseen[0].width if fitted_laws.unseen else 0
    table = Table(
        "foretold",
        f"Foretold of width {width:g}, and measured",
        ["Code", "steps", "nats lost", "measured", "worth kept", "measured", "at the width below"],
    )
    below = _below(fitted_laws)
    for point in sorted(
        fitted_laws.unseen, key=lambda point: (point.steps, fitted_laws.share.at(point))
    ):
        low, high = fitted_laws.lost.ends(point)
        most, least = fitted_laws.share.ends(point)
        measured = point.lost == point.lost
        table.rows.append(
            [
                point.arm,
                f"{point.steps:,.0f}",
                f"{fitted_laws.lost.at(point):.3f} [{low:.3f}, {high:.3f}]",
                f"{point.lost:.3f}" if measured else "-",
                f"{100 - fitted_laws.share.at(point):.0f} % [{100 - least:.0f}, {100 - most:.0f}]",
                f"{point.worth_kept:.0f} %" if measured else "-",
                f"{below[point.arm, point.steps].worth_kept:.0f} %",
            ]
        )
    return table


def _below(fitted_laws: Laws) -> dict[tuple[str, float], Point]:
    """Return the points at the largest width that the laws know, by code and steps."""
    largest = max(point.width for point in fitted_laws.points)
    return {(p.arm, p.steps): p for p in fitted_laws.points if p.width == largest}


# Claims.


def _measured(frame: pd.DataFrame) -> tuple[Laws | None, list[Point]]:
    """Return the laws, and the unseen points that were trained."""
    fitted_laws = laws(frame)
    return fitted_laws, [
        point for point in fitted_laws.unseen if point.lost == point.lost
    ] if fitted_laws else []


def _ids(points: list[Point]) -> list[str]:
    return [name for point in points for name in point.ids]


def _missed(what: str, points: list[Point], misses: list[float], within: float) -> Effect:
    """Return how far a forecast was off, a value each code."""
    return Effect(
        f"{what}, measured less foretold",
        values=misses,
        within=within,
        ids=_ids(points),
        digits=3 if within < 1 else 1,
        each="code",
    )


def y1(frame: pd.DataFrame) -> Claim:
    """Worth kept at the unseen width."""
    fitted_laws, points = _measured(frame)
    misses = [point.share - fitted_laws.share.at(point) for point in points] if fitted_laws else []
    return Claim(
        "Y1",
        "The law foretells the worth that each code keeps at twice the largest width it was "
        f"fitted to, within {POINTS:g} points.",
        [_missed("points of worth lost", points, misses, POINTS)],
    )


def y2(frame: pd.DataFrame) -> Claim:
    """Nats lost at the unseen width."""
    fitted_laws, points = _measured(frame)
    misses = [point.lost - fitted_laws.lost.at(point) for point in points] if fitted_laws else []
    return Claim(
        "Y2",
        f"It foretells the nats that each code loses there, within {NATS:g} nats.",
        [_missed("nats lost", points, misses, NATS)],
    )


def y3(frame: pd.DataFrame) -> Claim:
    """Better than no law."""
    fitted_laws, points = _measured(frame)
    values = []
    if fitted_laws and points:
        below = _below(fitted_laws)
        misses = [abs(point.share - fitted_laws.share.at(point)) for point in points]
        changes = [abs(point.share - below[point.arm, point.steps].share) for point in points]
        values = [float(np.mean(misses) / np.mean(changes))]
    return Claim(
        "Y3",
        "It is a better forecast of the worth kept than the worth kept at the width below: its "
        f"mean miss is at most {HELD:g} of that one's.",
        [
            Effect(
                "ratio of the two mean misses",
                values=values,
                below=HELD,
                ids=_ids(points),
                digits=2,
                each="width",
            )
        ],
    )


# When the claims were written down, and the commit that first held them.
REGISTERED = {f"Y{number}": ("2026-11-28T13:59:12+00:00", "3f27fc7") for number in (1, 2, 3)}
CLAIMS = [y1, y2, y3]


# Figures.


def scale(frame: pd.DataFrame, _curves: pd.DataFrame) -> Figure | None:
    """The share of its messages' worth that each code loses, by width; a panel each length. Marks:
    measured, means over seeds. Lines: the law, fitted to full marks. Hollow marks
    were not part of the fit.
    """
    fitted_laws = laws(frame)
    return None if fitted_laws is None else _drawn(fitted_laws)


@styled
def _drawn(fitted_laws: Laws) -> Figure:
    lengths = sorted({point.steps for point in fitted_laws.points})
    figure, axes = plt.subplots(
        1, len(lengths), figsize=size(min(2, len(lengths)), 2.8), sharey=True, squeeze=False
    )
    arms = list(dict.fromkeys(point.arm for point in fitted_laws.points))
    for axis, steps in zip(axes[0], lengths, strict=True):
        for index, arm in enumerate(arms):
            fitted_points = [p for p in fitted_laws.points if (p.arm, p.steps) == (arm, steps)]
            unseen_points = [p for p in fitted_laws.unseen if (p.arm, p.steps) == (arm, steps)]
            look = {"color": INK[index % 7], "marker": MARKS[index % 9], "ls": "none"}
            name = arm.removeprefix("gradients: ")
            axis.plot(
                [p.width for p in fitted_points],
                [p.share for p in fitted_points],
                label=name,
                **look,
            )
            axis.plot(
                [p.width for p in unseen_points],
                [p.share for p in unseen_points],
                mfc="white",
                **look,
            )
            line = sorted([*fitted_points, *unseen_points], key=lambda point: point.width)
            foretold = [fitted_laws.share.at(point) for point in line]
            axis.plot([point.width for point in line], foretold, color=INK[index % 7], lw=0.9)
        widths = sorted({point.width for point in (*fitted_laws.points, *fitted_laws.unseen)})
        logarithmic(axis.xaxis)
        axis.set_xticks(widths, [f"{width:g}" for width in widths])
        axis.minorticks_off()
        axis.set(title=f"{steps:,.0f} steps", xlabel="width", ylabel="worth lost (%)")
    legend(figure, *axes[0][0].get_legend_handles_labels())
    return figure


FIGURES: dict[str, Draw] = {"scale": scale}
