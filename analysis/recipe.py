"""Ours: what to use forward and what backward at equal bytes (F3), which feedback makes dense
inference lossless and why the slots of a batch harm (F4), when the losses of boundaries and
learners add (F5).

Losses are points of accuracy (images) or nats (text) against the dense run of the same training,
paired by seed.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from commsweep.config.labels import exchange
from commsweep.reporting.claim import DENSE, SLIGHT, Claim, Effect, Wanted, combined, difference
from commsweep.reporting.results import is_text, lost_against, masked, plain, score_and_sign
from commsweep.reporting.style import (
    Draw,
    distinct_looks,
    drawing,
    ends,
    logarithmic,
    pareto,
    plot,
    plt,
    size,
)
from commsweep.reporting.table import OFF, ON, PERCENT, PLAIN, SHARE, Table, cell

from .bias import LARGE, NOTICEABLE, gained
from .rudakov import SEVERE

NAME = "recipe"
DIRECTIONS = {"fwd": "forward alone", "bwd": "backward alone", "both": "both ways"}
PAPERS = ("TopK 30 %", "TopK 10 %", "TopK 5 %")  # what arXiv 2401.07788 crosses boundaries with


def rows(frame: pd.DataFrame) -> pd.DataFrame:
    """The runs that it speaks of: sweeps in which kept values are coded."""
    column = "fwd.compressor.values.kind"
    return (
        frame[~masked(frame)] if column in frame and frame[column].notna().any() else frame.iloc[:0]
    )


def _direction(frame: pd.DataFrame) -> pd.Series:
    """fwd, bwd, both; "" of dense runs."""
    fwd, bwd = (frame[f"{side}.compressor.kind"] != "none" for side in ("fwd", "bwd"))
    return pd.Series("", frame.index).mask(fwd, "fwd").mask(bwd, "bwd").mask(fwd & bwd, "both")


def _losses(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows of one learner with direction, what they lost against the dense run of their seed, and
    the bytes of what is compressed as a share of its dense ones.
    """
    rows_ = plain(frame)
    rows_ = rows_[rows_.status == "finished"].assign(direction=_direction)
    out = rows_[rows_.direction != ""].copy()
    out["lost"] = lost_against(out, rows_[rows_.direction == ""], ["seed"], score_and_sign(frame))
    share = {"fwd": "bytes.fwd_ratio", "bwd": "bytes.bwd_ratio", "both": "bytes.ratio"}
    out["share"] = [row[share[row["direction"]]] for _, row in out.iterrows()]
    return out[out.lost.notna()]


def _front(rows_: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(means of `_losses` by method, those of them that nothing with as few bytes beats)."""
    points = (
        rows_.groupby("method", sort=False)
        .agg(lost=("lost", "mean"), sd=("lost", "std"), share=("share", "mean"))
        .reset_index()
    )
    return points, pareto(
        points.assign(**{"mean": -points.lost, "bytes.ratio": points.share}), worst=-math.inf
    )


def tables(frame: pd.DataFrame) -> list[Table]:
    """The ranking by direction, feedbacks by key, boundaries times learners."""
    return [table for table in (ranking(frame), feedback(frame), additive(frame)) if table.rows]


def ranking(frame: pd.DataFrame) -> Table:
    """Settings by direction, from few bytes to many; those that nothing with as few bytes beats are
    on the front.
    """
    text = is_text(frame)
    table = Table(
        "ranking",
        f"What to send at how many bytes: {'nats' if text else 'points'} lost against dense",
        [
            "Direction",
            "Setting",
            "lost",
            "score",
            "seeds",
            "bytes (% of that direction's dense ones)",
            "on the front",
        ],
    )
    losses, unit = _losses(frame), PLAIN if text else PERCENT
    for direction, name in DIRECTIONS.items():
        rows_ = losses[losses.direction == direction]
        points, front = _front(rows_)
        for method in points.sort_values(["share", "lost"]).method:
            group = rows_[rows_.method == method]
            table.rows.append(
                [
                    name,
                    str(method),
                    cell(group, "lost", PLAIN),
                    cell(group, "test_on_ppl" if text else ON, unit),
                    str(len(group)),
                    cell(group, "share", SHARE),
                    "yes" if method in set(front.method) else "",
                ]
            )
    return table


def feedback(frame: pd.DataFrame) -> Table:
    """Every feedback of TopK both ways, keyed by the slot of a batch and by sample."""
    table = Table(
        "feedback_keys",
        "TopK with error feedback by key: test accuracy (%), and what memory adds to a message "
        "(relative to what is at the boundary)",
        [
            "Feedback",
            "Key",
            "compressed inference",
            "dense inference",
            "seeds",
            "remembered, forward",
            "remembered, backward",
        ],
    )
    rows_ = plain(frame)
    if "fwd.feedback.key" not in rows_ or ON not in rows_:
        return table
    rows_ = rows_[
        rows_["fwd.feedback.key"].notna()
        & (rows_["fwd.feedback.kind"] == rows_["bwd.feedback.kind"])
    ]
    if "sample" not in set(rows_["fwd.feedback.key"]):
        return Table("feedback_keys", "", [])
    for (kind, key), group in rows_.groupby(["fwd.feedback.kind", "fwd.feedback.key"], sort=False):
        cells = [cell(group, f"diagnosis.{side}.remembered", PLAIN) for side in ("fwd", "bwd")]
        score = cell(group, ON)
        table.rows.append(
            [
                kind,
                key,
                score,
                cell(group, OFF),
                str(len(score.values)),
                *(cell_ if cell_.values else "-" for cell_ in cells),
            ]
        )
    return table


def additive(frame: pd.DataFrame) -> Table:
    """Compression at the boundaries times that of four learners' gradients: what both lose, and the
    sum of each.
    """
    text = is_text(frame)
    table = Table(
        "additive",
        f"Boundaries and learners: {'nats' if text else 'points'} lost",
        ["Boundaries", "Gradients", "lost", "sum of the single losses", "seeds"],
    )
    for links, grads, both, first, second, _ in _factorial(frame):
        seeds = sorted(both.keys() & first.keys() & second.keys())
        if seeds:
            means = [
                sum(rows_[seed] for seed in seeds) / len(seeds) for rows_ in (both, first, second)
            ]
            table.rows.append(
                [links, grads, f"{means[0]:.3g}", f"{means[1] + means[2]:.3g}", str(len(seeds))]
            )
    return table


def _factorial(frame: pd.DataFrame) -> list[tuple[str, str, dict, dict, dict, list[str]]]:
    """(boundaries, gradients, what both lose by seed, what either alone loses, ids of all four
    arms).
    """
    rows_ = frame[(frame["grad.learners"] > 1) & (frame.status == "finished")]
    if rows_.empty:
        return []
    metric, sign = score_and_sign(rows_)
    rows_ = rows_.assign(
        grads=[exchange(row) for _, row in rows_.iterrows()],
        links=rows_.method.str.split("; ").map(
            lambda group: group[0] if len(group) > 1 else "dense"
        ),
    )
    plain_links, plain_grads = "dense", f"{int(rows_['grad.learners'].max())} learners"
    scores = {
        key: group.set_index("seed")[metric].to_dict()
        for key, group in rows_.groupby(["links", "grads"], sort=False)
    }
    dense = scores.get((plain_links, plain_grads), {})
    lost = {
        key: {seed: sign * (score - dense[seed]) for seed, score in group.items() if seed in dense}
        for key, group in scores.items()
    }
    return [
        (
            links,
            grads,
            group,
            lost.get((links, plain_grads), {}),
            lost.get((plain_links, grads), {}),
            list(
                rows_[
                    rows_.links.isin([links, plain_links]) & rows_.grads.isin([grads, plain_grads])
                ].id
            ),
        )
        for (links, grads), group in lost.items()
        if links != plain_links and grads != plain_grads
    ]


# Claims.


def _coded(ratio: float) -> Wanted:
    """TopK with values of 4 bits forward, its mask with values of 2 bits without bias backward."""
    return {
        "fwd.compressor.kind": "topk",
        "fwd.compressor.ratio": ratio,
        "fwd.compressor.values.kind": "uniform",
        "fwd.compressor.values.bits": 4,
        "bwd.compressor.kind": "forward_mask",
        "bwd.compressor.values.kind": "uniform",
        "bwd.compressor.values.bits": 2,
        "bwd.compressor.values.rounding": "stochastic",
    }


CODES: Wanted = {
    "fwd.compressor.kind": "uniform",
    "fwd.compressor.bits": 4,
    "fwd.compressor.scale": "group",
    "bwd.compressor.kind": "uniform",
    "bwd.compressor.bits": 2,
    "bwd.compressor.scale": "group",
    "bwd.compressor.rounding": "stochastic",
}


def _topk(ratio: float, **feedback: str) -> Wanted:
    values: Wanted = {
        f"{side}.compressor.{key}": value
        for side in ("fwd", "bwd")
        for key, value in (("kind", "topk"), ("ratio", ratio))
    }
    return values | {
        f"{side}.feedback.{key}": value
        for side in ("fwd", "bwd")
        for key, value in feedback.items()
    }


def f3a(frame: pd.DataFrame) -> Claim:
    """Codes: nothing lost."""
    return Claim(
        "F3a",
        "4 bits forward and 2 bits without bias backward, groups of 128, lose nothing (within "
        f"{SLIGHT:g} point, {NOTICEABLE:g} nats).",
        gained(
            plain(frame), "dense over 4 / 2 bit codes", DENSE, CODES, sign="within", text=NOTICEABLE
        ),
    )


def f3b(frame: pd.DataFrame) -> Claim:
    """The recipe: little lost."""
    return Claim(
        "F3b",
        "TopK 20 % with values of 4 bits forward, its mask with values of 2 bits without bias "
        f"backward, loses less than {SEVERE:g} points ({LARGE:g} nats).",
        gained(
            plain(frame), "dense over the recipe", DENSE, _coded(0.2), sign="below", image=SEVERE
        ),
    )


def f3c(frame: pd.DataFrame) -> Claim:
    """The recipe at half the level against plain TopK that sends more."""
    return Claim(
        "F3c",
        "The recipe at TopK 10 % is better than plain TopK 5 % both ways, which sends more.",
        gained(plain(frame), "recipe at 10 % over TopK 5 %", _coded(0.1), _topk(0.05)),
    )


def f4a(frame: pd.DataFrame) -> Claim:
    """Only EF21 makes dense inference lossless."""
    effects = []
    for kind, name, region in (
        ("ef21", "EF21", "below"),
        ("ef", "EF", "above"),
        ("ef_mixed", "EF-mixed", "above"),
    ):
        for key in ("slot", "sample"):
            effects += _kinds(
                frame,
                f"dense minus {name} by {key}, TopK 10 %, dense inference",
                DENSE,
                OFF,
                _topk(0.1, kind=kind, key=key),
                OFF,
                **{region: SEVERE},
            )
    return Claim(
        "F4a",
        f"EF21 makes dense inference almost lossless (within {SEVERE:g} points), EF and "
        "EF-mixed do not, whatever keys their memory.",
        effects,
    )


def f4b(frame: pd.DataFrame) -> Claim:
    """Keys of EF."""
    return Claim(
        "F4b",
        "Error feedback keyed by the slots of a batch harms, because it adds other samples' "
        "residues: by sample it is better, compressed inference.",
        _kinds(
            frame,
            "EF by sample minus EF by slot, TopK 10 %",
            _topk(0.1, kind="ef", key="sample"),
            ON,
            _topk(0.1, kind="ef", key="slot"),
            ON,
            above=SLIGHT,
        ),
    )


def f4c(frame: pd.DataFrame) -> Claim:
    """The residue's share of a message."""
    effect = Effect("|residue| / |activation|, EF by slot, TopK 10 %", above=1.0, digits=3)
    column = "diagnosis.fwd.remembered"
    if column in frame and "fwd.feedback.key" in frame:
        rows_ = frame[
            (frame["fwd.feedback.kind"] == "ef")
            & (frame["fwd.feedback.key"] == "slot")
            & frame[column].notna()
            & (frame["fwd.compressor.ratio"] == 0.1)
            & (frame["bwd.compressor.kind"] == "topk")
        ]
        effect.values, effect.ids, effect.by = list(rows_[column]), list(rows_.id), list(rows_.seed)
    return Claim(
        "F4c", "With error feedback by slot more of a message is residue than activation.", [effect]
    )


def _kinds(
    frame: pd.DataFrame, label: str, a: Wanted, on_a: str, b: Wanted, on_b: str, **region: Any
) -> list[Effect]:
    rows_ = plain(frame)
    if (
        is_text(rows_)
        or "fwd.feedback.key" not in rows_
        or "sample" not in set(rows_["fwd.feedback.key"])
    ):
        return []
    return difference(rows_, label, (a, on_a), (b, on_b), across=True, **region)


def f5(frame: pd.DataFrame) -> Claim:
    """Additivity."""
    margin, digits = (NOTICEABLE, 3) if is_text(frame) else (SLIGHT, 1)
    effects = [
        combined(
            f"lost by both minus sum of each: {links} and {grads}",
            [(1.0, both), (-1.0, first), (-1.0, second)],
            within=margin,
            digits=digits,
            ids=ids,
        )
        for links, grads, both, first, second, ids in _factorial(frame)
    ]
    return Claim(
        "F5",
        "What compression at the boundaries and of the learners' gradients loses adds up "
        f"(within {margin:g} {'points' if digits == 1 else 'nats'}).",
        effects,
    )


CLAIMS = [f3a, f3b, f3c, f4a, f4b, f4c, f5]


# Figures.


def fronts(frame: pd.DataFrame, _curves: pd.DataFrame) -> Figure | None:
    """The loss of settings against the bytes they send, forward alone, backward alone and both
    ways. The line joins settings that nothing with as few bytes beats; up to eight of them have a
    colour. Grey: the others; crosses: those of arXiv 2401.07788. Means over seeds. Bars: 95 %
    intervals of the mean.
    """
    losses_ = _losses(frame)
    if losses_.empty:
        return None
    unit = "nats" if is_text(frame) else "points"
    present = [key for key in DIRECTIONS if (losses_.direction == key).any()]
    with drawing():
        figure, axes = plt.subplots(
            len(present), 1, figsize=size(2, 2.1 * len(present)), squeeze=False, sharex=True
        )
        for axis, direction in zip(axes[:, 0], present, strict=True):
            rows_ = losses_[losses_.direction == direction]
            points, front = _front(rows_)
            named = list(front.method)[:8]
            styles = distinct_looks(named)
            for _, point in points.iterrows():
                method = point["method"]
                lost = ends(rows_[rows_.method == method].lost)
                x, paper = 100 * point["share"], method in PAPERS
                index = named.index(method) if method in named else None
                style = {"color": "0.6", "marker": "o"} if index is None else styles[method]
                style |= {"color": "0.2", "marker": "x"} if paper else {}
                ink = style["color"]
                below = index is not None and index % 2
                plot(axis, [x], [lost], **(style | {"ls": "none", "ms": 4}))
                if index is None and not paper:
                    continue
                axis.annotate(
                    _short(method),
                    (x, point["lost"]),
                    xytext=(-4, -8) if paper else (4, -9 if below else 4),
                    ha="right" if paper else "left",
                    textcoords="offset points",
                    fontsize="small",
                    color=ink,
                )
            _opposite(axis, points[~points["method"].isin([*named, *PAPERS])])
            axis.plot(100 * front.share, front.lost, color="0.5", lw=1, zorder=1)
            axis.axhline(0, color="0.7", lw=0.7)
            axis.set(title=DIRECTIONS[direction], ylabel=f"{unit} lost")
            axis.set_yscale("symlog", linthresh=2.0 if unit == "points" else 0.1)
            axis.margins(y=0.15)
            logarithmic(axis.xaxis)
        axes[-1, 0].set_xlabel("bytes (% of dense ones that way)")
        axes[-1, 0].set_xlim(right=1.6 * axes[-1, 0].get_xlim()[1])
    return figure


def _opposite(axis: Axes, points: pd.DataFrame) -> None:
    """Name the grey points: those of nearly equal bytes in one list, in the order of their loss."""
    ordered = points.sort_values("lost", ascending=False)
    for _, near in ordered.groupby((2 * np.log2(ordered["share"])).round()):
        names = "\n".join(_short(method) for method in near["method"])
        anchor = (100 * near["share"].max(), near["lost"].max())
        style: dict[str, Any] = {"fontsize": "x-small", "color": "0.45", "va": "top"}
        axis.annotate(names, anchor, xytext=(5, 3), textcoords="offset points", **style)


def _short(method: str) -> str:
    """A setting's name for a mark."""
    for long, short in (
        ("activations: ", ""),
        ("gradients: ", ""),
        (", group scale", ""),
        ("min-max ", ""),
        (" values", ""),
        ("shared mask, 2 bit stochastic", "its mask, 2 bit unbiased"),
        ("stochastic", "unbiased"),
    ):
        method = method.replace(long, short)
    return method


FIGURES: dict[str, Draw] = {"fronts": fronts}
