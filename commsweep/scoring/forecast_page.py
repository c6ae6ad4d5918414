"""The page of a forecast: how it did on trainings that were left out, and on unseen ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from commsweep.integrations.forecast import COVERED, WIDEST, Forecast
from commsweep.reporting.style import legend, plt, save, size, styled
from commsweep.reporting.table import Cell, Table
from commsweep.scoring import fit
from commsweep.scoring.fit import Trial
from commsweep.scoring.forecasts import UNSEEN, Outcome, lines

WANTED = 0.85  # rank correlation of left-out studies
LIMITS = (
    "What it cannot tell: the trainings are short and small; learning rates are those of the dense "
    "training; no codec has error feedback. A training in which two codecs of different scores end "
    "the other way round counts against it, and one outside its bound overturns that bound."
)


def write(
    folder: Path,
    table: pd.DataFrame,
    forecasts: dict[str, Forecast],
    outcomes: Sequence[Outcome],
) -> list[Trial]:
    """Write README.md and the figure, and return what was found on left-out trainings."""
    trials = [trial for message in forecasts for trial in fit.trials(table, message)]
    sections = [
        "# The forecast of worth kept",
        "Shadow mode measures what a codec would do to the messages of a dense training. The "
        "forecast says from that how much of a message's worth the codec would keep, if the "
        "training were compressed: 0 % is nothing sent, 100 % is dense.",
        _verdict(trials),
        "![Worth kept against the score of each kind of message](worth.png)",
        "## Seen trainings, left out in turn",
        _trials(trials).markdown().rstrip("\n"),
        "Rank: Spearman's correlation within a left-out study of at least "
        f"{fit.FEWEST} codecs, mean [lowest, highest]. A bound holds if the worth lies within it. "
        f"An answer is a bound of at most {WIDEST:.0f} points. Constant: one range for all.",
        "## Unseen trainings",
        *_unseen(folder, outcomes),
        LIMITS,
        "Written by `commsweep forecast`. All numbers follow from [table.csv](table.csv), "
        "[predictions.csv](predictions.csv) and [rows.csv](rows.csv).",
    ]
    (folder / "README.md").write_text("\n\n".join(sections) + "\n", encoding="utf-8")
    save(drawn(forecasts, outcomes), folder, "worth")
    return trials


def _verdict(trials: Sequence[Trial]) -> str:
    """Return which goals were reached, the failures first."""
    main = [t for t in trials if t.by == "forecast" and t.left_out == "study"]
    sentences = []
    for trial in sorted(main, key=lambda trial: trial.rank):
        ranked = "reached" if trial.rank >= WANTED else "missed"
        covered = "reached" if trial.coverage >= COVERED else "missed"
        narrow = "reached" if trial.width <= WIDEST else "missed"
        sentences.append(
            f"- {trial.message}: rank correlation {trial.rank:.2f} (goal {WANTED}: {ranked}); "
            f"{100 * trial.coverage:.0f} % of bounds held (goal {100 * COVERED:.0f} %: {covered}); "
            f"median width {trial.width:.0f} points (goal {WIDEST:.0f}: {narrow})."
        )
    closing = "Shadow mode ranks only where fewer bounds than the goal held, all or narrow ones."
    return "\n".join(["On studies that were left out:", "", *sentences, "", closing])


def _trials(trials: Sequence[Trial]) -> Table:
    header = ["message", "left out", "by", "rank", "bounds held", "median width", "answers held"]
    rows: list[list[Cell | str]] = []
    for trial in trials:
        rank = "-"
        if trial.studies:
            rank = f"{trial.rank:.2f} [{trial.lowest:.2f}, {trial.highest:.2f}]"
        held = f"{trial.covered} of {trial.bounds}"
        answers = f"{trial.held} of {trial.answered}"
        rows.append(
            [trial.message, trial.left_out, trial.by, rank, held, f"{trial.width:.0f}", answers]
        )
    return Table("left_out", "Left-out trainings", header, rows)


def _unseen(folder: Path, outcomes: Sequence[Outcome]) -> list[str]:
    names = [line.study for line in lines(folder) if line.section == UNSEEN]
    trained = [outcome for outcome in outcomes if outcome.worth is not None]
    if not trained:
        return [f"{len(names)} studies wait for their trainings; their forecasts are committed."]
    bounded = [outcome for outcome in trained if outcome.bound is not None]
    narrow = [o for o in bounded if o.bound is not None and o.bound.width <= WIDEST]
    answered = [outcome for outcome in bounded if outcome.answered]
    answers = f"{_held(answered)} answers" if answered else "no answer was given"
    ranks = _ranks(trained)
    return [
        f"Of {len(trained)} trainings, {len(trained) - len(bounded)} lay beyond what was seen. "
        f"{_held(bounded)} bounds held; of the narrow ones {_held(narrow)}; {answers}. Forecasts "
        f"were committed before these trainings. {_mean_ranks(trained)}",
        ranks.markdown().rstrip("\n"),
        _outcomes(trained).markdown().rstrip("\n"),
    ]


def _held(outcomes: Sequence[Outcome]) -> str:
    return f"{sum(outcome.held for outcome in outcomes)} of {len(outcomes)}"


def _correlations(trained: Sequence[Outcome]) -> list[tuple[str, str, float, pd.DataFrame]]:
    """Return (study, message, rank correlation, its rows) of unseen trainings."""
    frame = pd.DataFrame([outcome.row | {"kept": outcome.worth} for outcome in trained])
    frame["held"] = [outcome.held for outcome in trained]
    frame["seeds"] = [outcome.seeds for outcome in trained]
    frame["bounded"] = [outcome.bound is not None for outcome in trained]
    correlations = []
    for (study, message), cells in frame.groupby(["study", "message"]):
        rank = float(cells["rank"].corr(-cells["kept"], method="spearman"))
        correlations.append((str(study), str(message), rank, cells))
    return correlations


def _mean_ranks(trained: Sequence[Outcome]) -> str:
    """Return the mean rank correlation of each kind of message, as sentences."""
    by_message: dict[str, list[float]] = {}
    for _, message, rank, _ in _correlations(trained):
        by_message.setdefault(message, []).append(rank)
    sentences = []
    for message, ranks in sorted(by_message.items()):
        mean = sum(ranks) / len(ranks)
        reached = "reached" if mean >= WANTED else "missed"
        sentences.append(
            f"{message}: mean rank correlation {mean:.2f} over {len(ranks)} studies (goal "
            f"{WANTED}: {reached})."
        )
    return " ".join(line[0].upper() + line[1:] for line in sentences)


def _ranks(trained: Sequence[Outcome]) -> Table:
    rows: list[list[Cell | str]] = []
    for study, message, rank, cells in _correlations(trained):
        held = f"{cells['held'].sum()} of {cells['bounded'].sum()}"
        seeds = str(cells["seeds"].min())
        rows.append([study, message, f"{rank:.2f}", str(len(cells)), seeds, held])
    header = ["study", "message", "rank correlation", "codecs", "seeds", "bounds held"]
    return Table("unseen_ranks", "Unseen studies", header, rows)


def _outcomes(trained: Sequence[Outcome]) -> Table:
    rows: list[list[Cell | str]] = []
    for outcome in trained:
        foretold, verdict = "beyond what was seen", "-"
        if outcome.bound is not None:
            foretold = outcome.bound.text + ("" if outcome.answered else ", ranks only")
            verdict = "held" if outcome.held else "missed"
        row = outcome.row
        percent = f"{outcome.worth:.0f} %"
        rows.append([row["study"], row["message"], row["codec"], foretold, percent, verdict])
    header = ["study", "message", "codec", "forecast", "worth kept", "bound"]
    return Table("unseen", "Forecasts and trainings", header, rows)


@styled
def drawn(forecasts: dict[str, Forecast], outcomes: Sequence[Outcome]) -> Figure:
    """Draw worth against score, a panel a kind of message: seen trainings, what is expected, the
    bound, and unseen trainings.
    """
    figure, axes = plt.subplots(
        1, len(forecasts), figsize=size(min(2, len(forecasts)), 3.2), squeeze=False, sharey=True
    )
    for axis, (message, forecast_) in zip(axes[0], forecasts.items(), strict=True):
        scores = forecast_.evidence.scores
        bounds = [bound for score in scores if (bound := forecast_.evidence.bound(float(score)))]
        low, high = ([getattr(bound, end) for bound in bounds] for end in ("low", "high"))
        axis.fill_between(scores, low, high, color="0.9", label="bound")
        axis.plot(scores, forecast_.evidence.middles, color="0.5", label="expected")
        axis.plot(
            scores, forecast_.evidence.worths, "o", color="#0072B2", ms=3, label="seen training"
        )
        pairs = [
            (outcome.row["rank"], min(100.0, max(0.0, outcome.worth)))
            for outcome in outcomes
            if outcome.worth is not None and outcome.row["message"] == message
        ]
        if pairs:
            axis.plot(
                *zip(*pairs, strict=True), "^", color="#D55E00", ms=3, label="unseen training"
            )
        axis.set(title=message, xlabel=forecast_.score.text)
        axis.set_xscale("symlog", linthresh=0.1)
    axes[0, 0].set_ylabel("worth kept (%), 0 and below at 0")
    legend(figure)
    return figure
