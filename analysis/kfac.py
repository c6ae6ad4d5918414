"""K-FAC beside SGD, both tuned, and with coded factors: epochs, bytes and predicted seconds to a
target; claims K4, K5.

Targets are 97 and 99 % of what tuned SGD reaches in the end; tuned is the learning rate with the
best validation. Seconds are predicted: the simulation's computing shared by the learners, and its
bytes over links, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from commsweep.config.labels import second_order
from commsweep.reporting import report
from commsweep.reporting.claim import SLIGHT, Claim, Effect, markdown, paired
from commsweep.reporting.results import CHANCE, base, distinct
from commsweep.reporting.style import (
    drawing,
    ends,
    legend,
    logarithmic,
    look,
    plot,
    plt,
    size,
)
from commsweep.reporting.table import ON, RATE, Cell, Table, cell
from commsweep.timing.measured_learners import LearnerStep
from commsweep.timing.timeline.iterations import broadcast, ring

from . import kfac_steps
from .links import learner_steps

NAME = "second_order"
SHARES = (0.97, 0.99)  # of tuned SGD's final accuracy: the targets
LINKS = {"1 Gbit/s": 1e9, "100 Mbit/s": 1e8}
FACTORS = (
    "kfac.compressor.",
    "kfac.feedback.",
    "kfac.statistics",
    "kfac.method",
)  # what the ways differ in


def rows(frame: pd.DataFrame) -> pd.DataFrame:
    """All runs, where some precondition."""
    return (
        frame if "kfac.damping" in frame and frame["kfac.damping"].notna().any() else frame.iloc[:0]
    )


@dataclass
class Tuned:
    """A method at its best learning rate on one model."""

    model: str
    method: str  # SGD or K-FAC
    rate: float
    runs: pd.DataFrame


def tuned(frame: pd.DataFrame) -> list[Tuned]:
    """SGD and K-FAC of every model that has both, each at the rate whose runs validate best."""
    plain, pairs = _plain(frame), []
    if "val_on_acc" not in frame:
        return []
    for model, group in plain.groupby("model.name"):
        both = []
        for name, runs in (
            ("SGD", group[group["kfac.damping"].isna()]),
            ("K-FAC", group[group["kfac.damping"].notna()]),
        ):
            done = runs[runs.status == "finished"]
            if len(done):
                rate = done.groupby("optim.lr").val_on_acc.mean().idxmax()
                both.append(Tuned(str(model), name, float(rate), done[done["optim.lr"] == rate]))
        pairs += both if len(both) == 2 else []
    return pairs


def targets(tuned_: list[Tuned]) -> dict[str, list[float]]:
    """The accuracies to reach, by model."""
    return {
        measurement.model: [share * measurement.runs[ON].mean() for share in SHARES]
        for measurement in tuned_
        if measurement.method == "SGD"
    }


def epochs(curves: pd.DataFrame, runs: pd.DataFrame, target: float) -> dict[int, int]:
    """Return the first epoch at whose end the test accuracy is at least the target, by seed: one
    more than all if never. A run without a recorded curve is left out.
    """
    needed = {}
    by_run = dict(iter(curves.groupby("id"))) if len(curves) else {}
    for name, seed in zip(runs.id, runs.seed, strict=True):
        curve = by_run.get(name)
        if curve is None:
            continue
        reached = curve[curve[ON] >= target].epoch
        last = int(curve.epoch.iloc[-1])
        needed[int(seed)] = int(reached.iloc[0]) if len(reached) else last + 1
    return needed


def target_table(frame: pd.DataFrame, curves: pd.DataFrame) -> Table:
    """Epochs, bytes and predicted seconds to the target, tuned SGD beside tuned K-FAC."""
    table = Table(
        "target",
        "To 97 and 99 % of tuned SGD's final accuracy: epochs, megabytes a learner hands over, "
        "predicted seconds",
        [
            "Model",
            "Method",
            "learning rate",
            "target %",
            "epochs",
            "seeds",
            "steps",
            "gradients MB",
            "factors MB",
            "inverses MB (all)",
            *(f"predicted s, {name}" for name in LINKS),
        ],
    )
    tuned_ = tuned(frame)
    for entry, target in (
        (measurement, targets(tuned_)[measurement.model][index])
        for index in range(len(SHARES))
        for measurement in tuned_
    ):
        needed = list(epochs(curves, entry.runs, target).values())
        if not needed:
            continue
        steps = fmean(needed) * entry.runs.steps.mean() / entry.runs.epochs.mean()
        sent = [
            steps * _mean(entry.runs, name) / 1e6
            for name in (
                "gradients.up",
                "second_order.factors_up",
                "second_order.inverses_balanced",
            )
        ]
        table.rows.append(
            [
                entry.model,
                entry.method,
                f"{entry.rate:g}",
                f"{100 * target:.1f}",
                Cell(tuple(map(float, needed)), tuple(entry.runs.id), len(entry.runs), unit=RATE),
                str(len(needed)),
                f"{steps:.0f}",
                *(f"{value:.2f}" if value else "-" for value in sent),
                *(f"{steps * _seconds(entry.runs, bits):.2f}" for bits in LINKS.values()),
            ]
        )
    return table


def _seconds(runs: pd.DataFrame, bandwidth: float) -> float:
    learners = int(runs["grad.learners"].iloc[0])
    computing = (runs["seconds.train"] / runs.steps).mean() / learners
    reduce, cast = ring(learners, bandwidth, 0.0)[1] / 4, broadcast(learners, bandwidth, 0.0)[1] / 4
    return (
        computing
        + reduce * (_mean(runs, "gradients.up") + _mean(runs, "second_order.factors_up"))
        + (cast * _mean(runs, "second_order.inverses_balanced"))
    )


def _mean(runs: pd.DataFrame, column: str) -> float:
    return float(runs[column].fillna(0).mean()) if column in runs else 0.0


def _plain(frame: pd.DataFrame) -> pd.DataFrame:
    """SGD, and K-FAC of everybody's dense factors."""
    dense = (
        frame.get("kfac.compressor.kind", pd.Series("none", frame.index)).fillna("none") == "none"
    )
    all_statistics = (
        frame.get("kfac.statistics", pd.Series("all", frame.index)).fillna("all") == "all"
    )
    return frame[dense & all_statistics & (frame["grad.compressor.kind"] == "none")]


# Ways of sending factors.


def ways(frame: pd.DataFrame) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """(model, way, runs) of every way that factors travel, of the training of which there is more
    than one.
    """
    done = frame[frame["kfac.damping"].notna()]
    trainings = done.assign(training=base(done, *FACTORS))
    for (model, _), group in trainings.groupby(["model.name", "training"], sort=False):
        if group.setting_id.nunique() > 1:
            for name, group_ in group.groupby(group.apply(_label, axis=1), sort=False):
                for text, single in distinct(group_, str(name)):
                    yield str(model), text, single


def _label(row: pd.Series) -> str:
    text = second_order(row.dropna().to_dict()).removeprefix("K-FAC").removeprefix(", ")
    return text.removesuffix(" factors") or "float32"


def ways_table(frame: pd.DataFrame) -> Table:
    """Quality by what travels of the factors."""
    table = Table(
        "factors",
        "What travels of K-FAC's factors: test accuracy (%) of the last epoch, bytes a step",
        [
            "Model",
            "Factors",
            "score",
            "seeds",
            "diverged",
            "factor bytes up a step",
            "of float32 (%)",
        ],
    )
    full_bytes: dict[str, float] = {}
    for model, name, runs in ways(frame):
        up = _mean(runs[runs.status == "finished"], "second_order.factors_up")
        full_bytes.setdefault(model, up)
        score, lost = cell(runs, ON), int((runs.status == "diverged").sum())
        table.rows.append(
            [
                model,
                name,
                score,
                str(len(score.values)),
                str(lost) if lost else "-",
                f"{up:,.0f}" if score.values else "-",
                f"{100 * up / full_bytes[model]:.1f}"
                if score.values and full_bytes[model]
                else "-",
            ]
        )
    return table


def tables(frame: pd.DataFrame) -> list[Table]:
    """Ways of sending factors; the table of targets needs curves (`target_table`)."""
    return [table for table in (ways_table(frame),) if table.rows]


# Claims.


def k4(frame: pd.DataFrame, curves: pd.DataFrame) -> Claim:
    """K-FAC needs fewer epochs than SGD, both tuned."""
    tuned_, effects = tuned(frame), []
    for model, target in (
        (model, target) for model, goals in targets(tuned_).items() for target in goals
    ):
        sgd, kfac = (
            {
                measurement.method: measurement
                for measurement in tuned_
                if measurement.model == model
            }[name]
            for name in ("SGD", "K-FAC")
        )
        first, second = (epochs(curves, entry.runs, target) for entry in (sgd, kfac))
        seeds = sorted(first.keys() & second.keys())
        effects.append(
            Effect(
                f"{model}: epochs to {100 * target:.1f} %, SGD minus K-FAC",
                0.0,
                None,
                [float(first[seed] - second[seed]) for seed in seeds],
                sorted({*sgd.runs.id, *kfac.runs.id}),
                grid=1.0,  # whole epochs
            )
        )
    return Claim(
        "K4",
        "K-FAC needs fewer epochs than SGD to a target on the embedded images, both tuned.",
        effects or [Effect("no runs", 0.0, None)],
    )


def k5(frame: pd.DataFrame) -> Claim:
    """Ours: factors of 8 and of 4 bits cost no quality."""
    effects = []
    arms = list(ways(frame))
    for model in dict.fromkeys(model for model, _, _ in arms):
        by_name = {way_name: _arm(runs) for name, way_name, runs in arms if name == model}
        full = by_name.get("float32")
        for way_name, arm in by_name.items():
            if full is not None and " bit" in way_name and "data" not in way_name:
                effects += paired(
                    frame,
                    f"{model}: accuracy, float32 minus {way_name} factors",
                    full,
                    arm,
                    within=SLIGHT,
                )
    return Claim(
        "K5",
        f"Factors of 8 and of 4 bits cost no quality (ours: within {SLIGHT:g} point).",
        effects or [Effect("no runs", within=SLIGHT)],
    )


def _arm(runs: pd.DataFrame) -> pd.DataFrame:
    finished = runs[runs.status.isin(["finished", "diverged"])]
    score = finished[ON] if ON in finished else pd.Series(float("nan"), finished.index)
    return pd.DataFrame(
        {
            "id": finished.id,
            "seed": finished.seed,
            "base": base(finished, *FACTORS),
            "kind": "none",
            "diverged": finished.status == "diverged",
            "score": score.where(finished.status == "finished", CHANCE),
        }
    )


CLAIMS = [k5]


# Figures.


def progress(frame: pd.DataFrame, curves: pd.DataFrame) -> Figure | None:
    """Test error of tuned SGD and tuned K-FAC by epoch, a panel a model. Means over seeds; bars: ±
    one sample standard deviation. Dotted: the targets.
    """
    drawn = set() if curves.empty else set(curves.id)
    tuned_ = [entry for entry in tuned(frame) if drawn.intersection(entry.runs.id)]
    if not tuned_:
        return None
    models = list(targets(tuned_))
    with drawing():
        figure, axes = plt.subplots(
            1, len(models), figsize=size(min(2, len(models)), 2.5), squeeze=False
        )
        for axis, model in zip(axes[0], models, strict=True):
            seed_count = 0
            for entry in tuned_:
                if entry.model != model:
                    continue
                seed_count = len(entry.runs)
                label = f"{entry.method}, learning rate {entry.rate:g}"
                by_epoch = curves[curves.id.isin(entry.runs.id)].groupby("epoch")[ON]
                means = [ends(100 * (1 - scores), log=True) for _, scores in by_epoch]
                plot(axis, [epoch for epoch, _ in by_epoch], means, label, **look(label))
            for share, target in zip(SHARES, targets(tuned_)[model], strict=True):
                height = 100 * (1 - target)
                axis.axhline(height, color="black", lw=0.7, ls=":")
                axis.annotate(
                    f"{100 * share:g} % of SGD's accuracy",
                    (0.99, height),
                    xycoords=("axes fraction", "data"),
                    fontsize="small",
                    ha="right",
                    va="bottom",
                )
            axis.set(
                title=f"{model}, {seed_count} seeds",
                xlabel="epoch",
                ylabel="test error (%)",
            )
            logarithmic(axis.yaxis)
            axis.legend()
    return figure


def factor_bytes(frame: pd.DataFrame, _curves: pd.DataFrame) -> Figure | None:
    """Test error against the bytes of factors a learner hands over a step; bars: one sample
    standard deviation.
    """
    entries = [
        (model, name, runs[runs.status == "finished"], int((runs.status == "diverged").sum()))
        for model, name, runs in ways(frame)
    ]
    entries = [measurement for measurement in entries if len(measurement[2])]
    if len(entries) < 2:
        return None
    models = list(dict.fromkeys(model for model, *_ in entries))
    with drawing():
        figure, axes = plt.subplots(
            1, len(models), figsize=size(min(2, len(models)), 2.9), squeeze=False
        )
        for axis, model in zip(axes[0], models, strict=True):
            for _, name, runs, lost in (
                measurement for measurement in entries if measurement[0] == model
            ):
                error = ends(100 * (1 - runs[ON]))
                mark = look(name, ls="none")
                plot(axis, [_mean(runs, "second_order.factors_up")], [error], name, **mark)
                if lost:
                    position = (_mean(runs, "second_order.factors_up"), error.mean)
                    text = f"{lost} of {lost + len(runs)} diverged"
                    style = {"fontsize": "small", "ha": "right", "textcoords": "offset points"}
                    axis.annotate(text, position, xytext=(-6, 3), **style)
            axis.set(title=model, xlabel="bytes of factors a step", ylabel="test error (%)")
            axis.set_xscale("symlog", linthresh=1e4)
        legend(figure)
    return figure


FIGURES = {"progress": progress, "factor_bytes": factor_bytes}


@dataclass(frozen=True)
class PlanReport:
    """The report of a plan: what its sweep reached, and its measured iterations."""

    report: report.Report
    steps: list[LearnerStep]

    def record(self) -> dict[str, Any]:
        """Return names of tables and verdicts of claims, for programs."""
        return {
            "folder": str(self.report.folder),
            "tables": [table.name for table in self.report.tables],
            "claims": {claim.name: claim.verdict for claim in self.report.claims},
        }

    def text(self) -> str:
        """Return tables, claims and the errors of the predictions, for people."""
        tables = "\n".join(table.markdown() for table in self.report.tables[:-1])
        claims = markdown(self.report.claims, self.report.note)
        accuracy = kfac_steps.accuracy(self.steps)
        written = f"written to {self.report.folder}, page {self.report.page}"
        return f"{tables}\n{claims}\n{accuracy}\n{written}"


def plan_report(store: Path, plan: str, measurements: list[Any], folder: Path) -> PlanReport:
    """Write the report of the sweep of a plan's name, with the plan's measured iterations.

    Raises UserError where measurements are missing or no run of the sweep is finished.
    """
    steps = learner_steps(store, plan, measurements)

    def beside(frame: pd.DataFrame, curves: pd.DataFrame) -> report.More:
        return kfac_steps.additions(steps, [target_table(frame, curves)], [k4(frame, curves)])

    return PlanReport(report.write(store, plan, folder, additional=beside), steps)


PROVIDES = {"report of kfac": plan_report}
