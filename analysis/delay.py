"""Ours: what gradients of old weights cost, dense and compressed, and whether error feedback still
helps them. Claim R3.

A loss is nats of test loss against the run on time, dense, with the same optimizer and seed.
Compression is on at inference. What a delay is, see `commsweep/training/delay.py`.
"""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from commsweep.config.labels import delay, describe
from commsweep.reporting.claim import Claim, Effect, Wanted, contrast
from commsweep.reporting.results import is_text, lost_against, plain
from commsweep.reporting.statistics import interval
from commsweep.reporting.style import Draw, drawing, ends, legend, look, plot, plt, size
from commsweep.reporting.table import Table

from .bias import LOSS, NOTICEABLE, gained

NAME = "delay"
ON_TIME, LATE, BY_STAGES = "on time", "1 step late", "1 step late a stage"
TOPK: Wanted = {
    "fwd.compressor.kind": "none",
    "bwd.compressor.kind": "topk",
    "bwd.compressor.ratio": 0.1,
}
# Arms of the figure: by words, what begins the label.
SHORT = {
    "adamw, dense": "dense",
    "adamw, gradients: min-max 2 bit, group scale, stochastic": "2 bits unbiased",
    "adamw, gradients: TopK 10 %": "TopK 10 %",
    "adamw, gradients: EF + TopK 10 %": "TopK 10 % + EF",
    "muon, dense": "dense, Muon",
}


def rows(frame: pd.DataFrame) -> pd.DataFrame:
    """The runs that it speaks of: of a sweep of language models with late gradients."""
    rows = plain(frame)
    late = "delay.steps" in rows and rows["delay.steps"].notna().any()
    return rows if late and is_text(rows) else rows.iloc[:0]


def _arms(frame: pd.DataFrame) -> pd.DataFrame:
    """The finished runs, with `arm` (optimizer and code in words), `late` (delay in words) and
    `lost` (nats against the dense run on time).
    """
    done = frame[frame.status == "finished"]
    if LOSS not in done:
        return done.iloc[:0].assign(arm=[], late=[], lost=[])
    arms, lates = [], []
    for row in done.to_dict("records"):
        present = {key: value for key, value in row.items() if value == value}
        lates.append(delay(present) or ON_TIME)
        on_time = {key: value for key, value in present.items() if not key.startswith("delay.")}
        arms.append(f"{row['optim.kind']}, {describe(on_time)}")
    done = done.assign(arm=arms, late=lates)
    dense = done[done.arm.str.endswith(", dense") & (done.late == ON_TIME)]
    return done.assign(lost=lost_against(done, dense, ["optim.kind", "seed"], (LOSS, 1.0)))


def tables(frame: pd.DataFrame) -> list[Table]:
    """Return what every arm lost at every delay, and how much of it is the delay's."""
    arms = _arms(frame)
    table = Table(
        "delay",
        "Gradients of old weights: nats lost, and what the delay adds to the same arm on time",
        ["Setting", "delay", "test loss", "nats lost", "by the delay", "95 % interval", "seeds"],
    )
    for arm, of_arm in arms.groupby("arm", sort=False):
        on_time = of_arm[of_arm.late == ON_TIME].set_index("seed")[LOSS]
        for late, group in of_arm.groupby("late", sort=False):
            added = list((group[LOSS] - group.seed.map(on_time)).dropna())
            ends = interval(added)
            mean = f"{sum(added) / len(added):.3f}" if added else "-"
            table.rows.append(
                [
                    str(arm),
                    str(late),
                    f"{group[LOSS].mean():.3f}",
                    f"{group.lost.mean():.3f}",
                    "-" if late == ON_TIME else mean,
                    "-" if late == ON_TIME or ends is None else f"[{ends[0]:.3f}, {ends[1]:.3f}]",
                    str(len(group)),
                ]
            )
    return [table] if table.rows else []


# Claims.


def _saved(frame: pd.DataFrame, late: str) -> list[Effect]:
    """Nats that error feedback saves under TopK 10 % of the gradients, at this delay."""
    arms = _arms(frame)
    group = arms[arms.late == late].drop(columns=["arm", "late", "lost"])
    feedback = TOPK | {"bwd.feedback.kind": "ef"}
    return gained(group, f"EF over none, TopK 10 %, {late}", feedback, TOPK, sign="above", text=0.0)


def r3(frame: pd.DataFrame) -> Claim:
    """Error feedback and delay."""
    effects = []
    on_time = _saved(frame, ON_TIME)
    for late in (LATE, BY_STAGES):
        saved = _saved(frame, late)
        if len(on_time) == len(saved) == 1:
            label = f"nats saved by EF under TopK 10 %, {late} minus on time"
            effects.append(contrast(label, saved[0], on_time[0], below=-NOTICEABLE, digits=3))
    return Claim(
        "R3",
        "Error feedback and delay do not mix: on late gradients it saves less than on time, by at "
        f"least {NOTICEABLE:g} nats.",
        effects,
    )


CLAIMS = [r3]


# Figures.


def delays(frame: pd.DataFrame, _curves: pd.DataFrame) -> Figure | None:
    """Test loss of each setting on time, a step late, and late by a step for every stage behind.
    Hollow: with a look-ahead of a step. Bars: 95 % intervals of the mean.
    """
    arms = _arms(frame)
    positions = {ON_TIME: 0, LATE: 1, BY_STAGES: 2}
    if arms.empty or arms.late.nunique() < 2:
        return None
    with drawing():
        figure, axis = plt.subplots(figsize=size(2, 2.8))
        for arm, of_arm in arms.groupby("arm", sort=False):
            name = SHORT.get(str(arm), str(arm))
            drawn = look(name)
            for ahead in (False, True):
                x, means = [], []
                for late, position in positions.items():
                    values = of_arm[of_arm.late == late + ", look-ahead 1" * ahead][LOSS]
                    if values.empty:
                        continue
                    x.append(position)
                    means.append(ends(values))
                if x and ahead:
                    hollow = look(name, ls=":", mfc="white")
                    plot(axis, x, means, name + ", look-ahead", **hollow)
                elif x:
                    plot(axis, x, means, name, **drawn)
        axis.set_xticks([0, 1, 2], ["on time", "1 step late", "1 step late\na stage behind"])
        axis.set(ylabel="test loss (nats a byte)", xlim=(-0.2, 2.2))
        legend(figure)
    return figure


FIGURES: dict[str, Draw] = {"delays": delays}
