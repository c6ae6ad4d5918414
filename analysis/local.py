"""Learners that train apart and exchange rarely (DiLoCo and after): loss against bytes up a step,
at equal tokens; claims L1 to L8.

Effects are nats of test loss, paired by seed. Margins are ours: a noticeable difference is 0.02
nats.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from commsweep.reporting.claim import Claim, Effect, combined
from commsweep.reporting.style import (
    Draw,
    chosen,
    distinct_looks,
    drawing,
    front_of,
    legend,
    logarithmic,
    plt,
    scatter,
    size,
)
from commsweep.reporting.table import BYTES, PLAIN, RATE, Table, cell

from .bias import LOSS, NOTICEABLE, PERPLEXITY

NAME = "local"
UP = "gradients.up"
APART = "grad.outer.interval"


def rows(frame: pd.DataFrame) -> pd.DataFrame:
    """The runs that it speaks of: sweeps of language models in which learners train apart, and what
    they are beside.
    """
    present = APART in frame and bool(frame[APART].notna().any()) and LOSS in frame
    return frame if present else frame.iloc[:0]


def tables(frame: pd.DataFrame) -> list[Table]:
    """Every method, from many bytes to few; DiLoCo by its learners."""
    table_ = Table(
        "local",
        "Learners that train apart: test perplexity, and what a learner sends up",
        ["Method", "perplexity", "seeds", "bytes up a step", "rate", "boundaries' bytes a step"],
    )
    groups = [(str(name), group) for name, group in frame.groupby("method", sort=False)]
    for name, group in sorted(groups, key=lambda entry: -_bytes(entry[1])):
        score = cell(group, PERPLEXITY, PLAIN)
        sent = [
            cell(group, column, unit) for column, unit in ((UP, BYTES), ("gradients.rate", RATE))
        ]
        crossed = sum(group[f"bytes.{side}_per_step"].mean() for side in ("fwd", "bwd"))
        table_.rows.append(
            [
                name,
                score,
                str(len(score.values)),
                *(learner_bytes if learner_bytes.values else "-" for learner_bytes in sent),
                f"{crossed:,.0f}",
            ]
        )
    return [table_]


def _bytes(group: pd.DataFrame) -> float:
    return float(group[UP].mean()) if UP in group and group[UP].notna().any() else float("inf")


# Claims.


def _arm(frame: pd.DataFrame, values: dict[str, Any]) -> pd.DataFrame:
    """The finished runs with these settings; None: absent."""
    rows_ = frame[frame.status == "finished"]
    for key, value in ({"fwd.compressor.kind": "none", "optim.kind": "adamw"} | values).items():
        column = rows_[key] if key in rows_ else pd.Series(None, rows_.index, dtype=object)
        rows_ = rows_[column.isna() if value is None else column == value]
    return rows_


DENSE = {
    "grad.compressor.kind": "none",
    "grad.outer.overlap": 0,
    "grad.outer.fragments": 1,
    "grad.outer.peers": None,
    "grad.learners": 4,
}
PLAIN_RUN = {APART: None, "grad.learners": 1}
DILOCO = DENSE | {APART: 10}
OFTEN = {"grad.compressor.kind": "topk", "grad.compressor.values.kind": "statistical", APART: 1}
SPARSE = OFTEN | {APART: 10, "grad.compressor.index_coding": None, "grad.outer.aggregate": "all"}
DEMO = {"grad.outer.sign": True, "grad.transform": "dct", "optim.kind": "sgd"}


def _code(kind: str, bits: int | None = None, feedback: str = "none") -> dict[str, Any]:
    """DiLoCo with these codes."""
    return {
        APART: 10,
        "grad.compressor.kind": kind,
        "grad.compressor.bits": bits,
        "grad.feedback.kind": feedback,
        "grad.outer.overlap": 0,
        "optim.kind": "adamw",
    }


def _difference(
    frame: pd.DataFrame, label: str, a: dict[str, Any], b: dict[str, Any], **region: Any
) -> Effect:
    """Nats that arm a loses more than arm b."""
    left, right = _arm(frame, a), _arm(frame, b)
    sides = [
        (sign, dict(zip(arm.seed, arm[LOSS], strict=True)))
        for sign, arm in ((1.0, left), (-1.0, right))
    ]
    return combined(label, sides, ids=[*left.id, *right.id], digits=3, **region)


def l1(frame: pd.DataFrame) -> Claim:
    """Learners of DiLoCo."""
    group = _arm(frame, {key: value for key, value in DILOCO.items() if key != "grad.learners"})
    sizes = sorted(int(n) for n in group["grad.learners"].unique())
    effects = [
        _difference(
            frame,
            f"loss with {n} learners minus with {m}",
            DILOCO | {"grad.learners": n},
            DILOCO | {"grad.learners": m},
            above=0.0,
        )
        for m, n in pairwise(sizes)
    ]
    return Claim(
        "L1",
        "DiLoCo's loss grows with the number of learners, and one learner is better than plain "
        "training (arXiv 2503.09799 finds both).",
        [
            _difference(
                frame,
                "loss of plain training minus of one learner",
                PLAIN_RUN,
                DILOCO | {"grad.learners": 1},
                above=0.0,
            ),
            *effects,
        ],
    )


def l2(frame: pd.DataFrame) -> Claim:
    """SparseLoCo at equal bytes."""
    return Claim(
        "L2",
        "At no more bytes SparseLoCo, every step, is better than DiLoCo (every 100 steps) and "
        f"DeMo by more than {NOTICEABLE:g} nats.",
        [
            _difference(
                frame,
                f"loss of {name} minus of SparseLoCo{_sizes(frame, arm, OFTEN)}",
                arm,
                OFTEN,
                above=NOTICEABLE,
            )
            for name, arm in (("DiLoCo", DENSE | {APART: 100}), ("DeMo", DEMO))
        ],
    )


def _sizes(frame: pd.DataFrame, *arms: dict[str, Any]) -> str:
    """(bytes of one, of the other)."""
    arm_rows = [_arm(frame, arm) for arm in arms]
    return (
        ""
        if any(rows_.empty or UP not in rows_ for rows_ in arm_rows)
        else (" (" + ", ".join(f"{rows_[UP].mean():,.0f}" for rows_ in arm_rows) + " bytes a step)")
    )


def l3(frame: pd.DataFrame) -> Claim:
    """Codes of pseudo-gradients."""
    effects = [
        _difference(frame, f"loss with {name} minus dense", arm, DILOCO, within=NOTICEABLE)
        for name, arm in (("E3M0", _code("e3m0")), ("min-max 4 bits", _code("uniform", 4)))
    ]
    effects += [
        _difference(
            frame,
            f"loss with min-max 2 bits minus with statistical 2 bits{suffix}",
            _code("uniform", 2, memory),
            _code("statistical", 2, memory),
            above=NOTICEABLE,
        )
        for memory, suffix in (("none", ""), ("ef", ", EF"))
    ]
    return Claim(
        "L3",
        f"Pseudo-gradients in four bits cost nothing (within {NOTICEABLE:g} nats); in two bits "
        "statistical levels are better than min-max levels.",
        effects,
    )


def l4(frame: pd.DataFrame) -> Claim:
    """Overlap."""
    return Claim(
        "L4",
        f"An overlap of one step costs nothing (within {NOTICEABLE:g} nats).",
        [
            _difference(
                frame,
                "loss with an overlap of 1 minus without",
                DILOCO | {"grad.outer.overlap": 1},
                DILOCO,
                within=NOTICEABLE,
            )
        ],
    )


def l5(frame: pd.DataFrame) -> Claim:
    """Readings of the aggregation."""
    return Claim(
        "L5",
        "The two readings of SparseLoCo's aggregation differ: the mean of senders is better "
        f"than the mean of all by more than {NOTICEABLE:g} nats.",
        [
            _difference(
                frame,
                "loss with the mean of all minus of senders",
                SPARSE,
                SPARSE | {"grad.outer.aggregate": "senders"},
                above=NOTICEABLE,
            )
        ],
    )


def l6(frame: pd.DataFrame) -> Claim:
    """Both parallelisms."""
    boundaries = {APART: 25, "fwd.compressor.kind": "topk", "bwd.compressor.kind": "forward_mask"}
    learners = {"grad.compressor.kind": "statistical", "fwd.compressor.kind": "uniform"}
    return Claim(
        "L6",
        "With about 200 kB a step for boundaries and learners together, squeezing the learners' "
        "messages harder is better than squeezing the boundaries harder, by more than "
        f"{NOTICEABLE:g} nats.",
        [
            _difference(
                frame,
                "loss with the boundaries harder minus with the learners harder"
                f"{_together(frame, boundaries, learners)}",
                boundaries,
                learners,
                above=NOTICEABLE,
            )
        ],
    )


def _together(frame: pd.DataFrame, *arms: dict[str, Any]) -> str:
    """(bytes a step of everything, of one and of the other)."""
    frames = []
    for rows_ in (_arm(frame, arm) for arm in arms):
        if rows_.empty or UP not in rows_:
            return ""
        total = (
            rows_["bytes.fwd_per_step"]
            + rows_["bytes.bwd_per_step"]
            + rows_["grad.learners"] * rows_[UP]
        )
        frames.append(f"{total.mean():,.0f}")
    return f" ({', '.join(frames)} bytes a step in all)"


def l7(frame: pd.DataFrame) -> Claim:
    """Transforms."""
    return Claim(
        "L7",
        f"DeMo needs its transform: without one it is worse by more than {NOTICEABLE:g} nats, "
        "and a Hadamard transform does as well.",
        [
            _difference(
                frame,
                "loss without a transform minus with the DCT",
                DEMO | {"grad.transform": None},
                DEMO,
                above=NOTICEABLE,
            ),
            _difference(
                frame,
                "loss with Hadamard minus with the DCT",
                DEMO | {"grad.transform": "hadamard"},
                DEMO,
                within=NOTICEABLE,
            ),
        ],
    )


def l8(frame: pd.DataFrame) -> Claim:
    """Each beside plain training with the same optimizer inside."""
    muon = {"optim.kind": "muon"}
    rare_muon, coded = muon | {APART: 10}, "grad.compressor.kind"
    effects = []
    for name, rare, plain in (
        ("DiLoCo minus of plain AdamW", DILOCO, PLAIN_RUN),
        ("MuLoCo minus of plain Muon", rare_muon | {coded: "statistical"}, muon | PLAIN_RUN),
        (
            "MuLoCo, uncompressed, minus of plain Muon",
            rare_muon | {coded: "none"},
            muon | PLAIN_RUN,
        ),
    ):
        effect = _difference(frame, f"loss of {name}", rare, plain, below=0.1)
        if effect.values:
            effects.append(effect)
    return Claim(
        "L8",
        "Four learners that exchange every tenth step lose less than 0.1 nats, whichever optimizer "
        "is inside (each beside plain training with that optimizer, rates tuned alike).",
        effects,
    )


CLAIMS = [l1, l2, l3, l4, l5, l6, l7, l8]


# Figures.


# Settings that have a name in the figure, beside those on the front.
KEPT = ("DiLoCo, every 10", "DiLoCo, every 100", "EF + statistical 2 bit, every 10 (optim muon)")


def bytes_up(frame: pd.DataFrame, _curves: pd.DataFrame) -> Figure | None:
    """Test perplexity against the bytes a learner sends up a step, at equal tokens, with the Pareto
    front.

    Bars: 95 % intervals over seeds. At most eight settings have names.
    Dashed and dotted: plain training, whose gradients would travel every step, with AdamW and with
    Muon (beside which MuLoCo stands).
    """
    done = frame[
        (frame.status == "finished")
        & frame[APART].notna()
        & (frame["fwd.compressor.kind"] == "none")
    ]
    if done.empty or UP not in done:
        return None
    points = []
    for method, runs in done.groupby("method", sort=False):
        up, values = float(runs[UP].mean()), list(runs[PERPLEXITY])
        points.append({"name": _short(str(method)), "x": up, "values": values})
    with drawing():
        figure, axes = plt.subplots(figsize=size(2, 3.4))
        scores = pd.DataFrame(points)
        front = front_of(scores)
        styles = distinct_looks(chosen(scores["name"], [*front["name"], *KEPT]))
        scatter(axes, scores, styles, front, log=False)
        plain = _arm(frame, PLAIN_RUN)
        if len(plain):
            score = plain[PERPLEXITY].mean()
            axes.axhline(score, color="0.4", ls="--", lw=0.8, label="plain training, AdamW")
        muon = frame[(frame["optim.kind"] == "muon") & (frame["grad.learners"] == 1)]
        if len(muon):
            score = muon[PERPLEXITY].mean()
            axes.axhline(score, color="0.4", ls=":", lw=0.8, label="plain training, Muon")
        axes.set(xlabel="bytes a learner sends up a step", ylabel="test perplexity")
        logarithmic(axes.xaxis)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:g} k")
        legend(figure)
    return figure


def _short(method: str) -> str:
    """A method for a legend: what all share is left out."""
    for long, short in (
        (", 4 learners", ""),
        ("4 learners, ", "DiLoCo, "),
        ("outer step every ", "every "),
        ("mean of senders", "senders"),
        (" in tiles", ""),
        ("TopK 1.5625 %, 2 bit values", "SparseLoCo"),
        ("TopK 0.78125 %", "DeMo"),
        (", sign", ""),
    ):
        method = method.replace(long, short)
    return method


FIGURES: dict[str, Draw] = {"bytes_up": bytes_up}
