"""Sparse training at equal FLOPs (Mixed Sparsity Training, arXiv 2408.11746); claims M1 to M5.

FLOPs are those that a run counted, by pairs of tokens that attend, the head included; whether it is
sparse stands in the tables. Losses are the test split's at the last epoch, in nats. An arm's name
is what it does without its sparsity, which differs so that FLOPs do not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from commsweep.reporting.claim import Claim, Effect, paired
from commsweep.reporting.figure import COLUMN, INK, MARKS, legend, logarithmic, styled
from commsweep.reporting.labels import MST as WITHOUT
from commsweep.reporting.labels import boundaries, exchange, levelless, phases, sparse
from commsweep.reporting.results import base, distinct, is_text, masked
from commsweep.reporting.table import BYTES, PLAIN, SHARE, Cell, Table, cell
from commsweep.sparsity.flops import PARTS

NAME = "sparse"
SOURCE = "arXiv 2408.11746"
LOSS, PPL, TOTAL, RELATIVE = "test_on_loss", "test_on_ppl", "flops.total", "flops.relative"
EQUAL = 0.02  # nats: no difference that matters, the margin of M1, M3 and M5
DENSE, SHORT, NARROW, MST = "dense", "dense, fewer steps", "narrower dense model", "MST"
COMPARED = (
    "sparsity.",
    "model.width",
    "data.train_blocks",
    "epochs",
    "eval_every",
)  # what arms may differ in


def rows(frame: pd.DataFrame) -> pd.DataFrame:
    """The language models that counted their FLOPs, or would have."""
    text = masked(frame) & is_text(frame)
    return frame[text & frame["data.tokenizer"].notna()] if text.any() else frame.iloc[:0]


def trainings(frame: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """(what tells it from the others, runs) of every training whose arms are compared, of one
    learner.
    """
    alone = frame[(frame["grad.learners"] == 1) & (frame["fwd.compressor.kind"] == "none")]
    if alone.empty:
        return []
    every = base(alone, *COMPARED)
    found = [part for _, part in alone.groupby(every, sort=False)]
    if len(found) == 1:
        return [("", found[0])]
    firsts = pd.concat([part.iloc[:1] for part in found]).assign(
        setting_id=list(every.drop_duplicates())
    )
    names = {part.setting_id.iloc[0]: text.strip(" ()") for text, part in distinct(firsts, "")}
    return [(names[text], part) for text, part in zip(every.drop_duplicates(), found, strict=True)]


def arms(alone: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """(name, runs) of one training: dense ones first, then the best. The dense run is that of most
    steps and width.
    """
    names = alone.apply(lambda row: levelless(sparse(row.dropna().to_dict())) or DENSE, axis=1)
    dense = names == DENSE
    # absent: the model's own
    wide = alone.get("model.width", pd.Series(math.nan, alone.index)).fillna(math.inf)
    names[dense & (wide < wide[dense].max())] = NARROW
    dense = names == DENSE
    names[dense & (_steps(alone) < _steps(alone)[dense].max())] = SHORT
    found = [
        (text, part)
        for name, own in alone.groupby(names, sort=False)
        for text, part in distinct(own, str(name))
    ]
    order = {DENSE: 0, SHORT: 1, NARROW: 2}
    return sorted(found, key=lambda one: (order.get(one[0], 3), _mean(one[1], LOSS)))


def _steps(frame: pd.DataFrame) -> pd.Series:
    return frame["data.train_blocks"] * frame["epochs"]


def _mean(runs: pd.DataFrame, column: str) -> float:
    return float(runs[column].mean()) if column in runs and runs[column].notna().any() else math.inf


def _whole(found: list[tuple[str, pd.DataFrame]], column: str = TOTAL) -> float:
    """FLOPs, or another column, of the dense run that arms are compared with; not a number without
    one.
    """
    return next((_mean(runs, column) for name, runs in found if name == DENSE), math.nan)


# Tables.


def equal(frame: pd.DataFrame, title: str) -> Table:
    """Every arm of a training: FLOPs and loss."""
    table = Table(
        "flops",
        f"Sparse training ({_head(frame)}): FLOPs and test loss{title}",
        [
            "Arm",
            "most sparse %",
            "steps",
            "FLOPs (% of dense)",
            "without head",
            "loss (nats)",
            "perplexity",
            "loss - dense",
            "inference FLOPs (% of dense)",
            "ever active %",
            "seeds",
        ],
    )
    found = arms(frame)
    dense = _whole(found, LOSS)
    for name, runs in found:
        score = cell(runs, LOSS, PLAIN)
        done = runs[runs.status == "finished"]
        if done.empty:
            table.rows.append([name, *["-"] * 4, score, *["-"] * 5])
            continue
        first = done.iloc[0]
        sparsest = max(phase["sparsity"] for phase in phases(first.dropna().to_dict()).values())
        table.rows.append(
            [
                name,
                f"{100 * sparsest:.1f}",
                f"{first.steps:.0f}",
                *_shares(done, found),
                _three(score),
                cell(runs, PPL, PLAIN),
                f"{_mean(done, LOSS) - dense:+.3f}" if dense == dense else "-",
                _inference(done, found),
                cell(runs, "masks.ever", SHARE),
                str(len(score.values)),
            ]
        )
    return table


def _shares(done: pd.DataFrame, found: list[tuple[str, pd.DataFrame]]) -> list[str]:
    """FLOPs in % of the dense arm's, with and without the head; without such an arm, of the same
    model's.
    """
    whole = _whole(found)
    if whole != whole:
        return [
            f"{100 * _mean(done, name):.1f}" for name in (RELATIVE, "flops.relative_without_head")
        ]
    without = (done[TOTAL] - done["flops.head"]).mean() / (whole - _whole(found, "flops.head"))
    return [f"{100 * _mean(done, TOTAL) / whole:.1f}", f"{100 * without:.1f}"]


def _inference(done: pd.DataFrame, found: list[tuple[str, pd.DataFrame]]) -> str:
    whole = _whole(found, "flops.inference")
    share = (
        _mean(done, "flops.inference") / whole
        if whole == whole
        else _mean(done, "flops.inference_relative")
    )
    return f"{100 * share:.1f}"


def _three(score: Cell) -> str | Cell:
    if not score.values:
        return score
    return f"{score.mean:.3f}" + (f" ± {score.sd:.3f}" if score.sd is not None else "")


def _head(frame: pd.DataFrame) -> str:
    """Whether the head is counted, and sparse."""
    modules = set(frame["sparsity.modules"].dropna())
    how = (
        "sparse" if modules == {"all"} else "dense" if modules == {"blocks"} else "dense or sparse"
    )
    share = _whole(arms(frame), "flops.head_share")
    return f"head counted, {how}" + (
        f"; {100 * share:.1f} % of the dense run" if math.isfinite(share) else ""
    )


def parts(frame: pd.DataFrame, title: str) -> Table:
    """What the FLOPs of every arm of a training went into."""
    table = Table(
        "parts",
        f"FLOPs by part, as % of the dense run ({_head(frame)}){title}",
        ["Arm", *PARTS, "total"],
    )
    found = arms(frame)
    whole = _whole(found)
    for name, runs in found:
        if (runs.status == "finished").any() and whole == whole:
            table.rows.append(
                [
                    name,
                    *(f"{100 * _mean(runs, f'flops.{part}') / whole:.2f}" for part in PARTS),
                    f"{100 * _mean(runs, TOTAL) / whole:.2f}",
                ]
            )
    return table


def wire(frame: pd.DataFrame) -> Table:
    """What travels between learners, and across boundaries, with masks and without."""
    table = Table(
        "wire",
        "What sparsity saves on the wire: bytes of a learner's gradients and of boundaries, a step",
        [
            "Weights",
            "Message",
            "loss (nats)",
            "gradients up",
            "of dense %",
            "of it places",
            "boundaries (% of dense)",
            "seeds",
        ],
    )
    for weights, said, runs in sent(frame):
        score, up = cell(runs, LOSS, PLAIN), cell(runs, "gradients.up", BYTES)
        share = (
            100 * _mean(runs, "gradients.up") / _mean(runs, "gradients.dense")
            if up.values
            else math.nan
        )
        places = _mean(
            runs.assign(places=runs.get("gradients.places", pd.Series(0.0, runs.index)).fillna(0)),
            "places",
        )
        table.rows.append(
            [
                weights,
                said,
                _three(score),
                up if up.values else "-",
                f"{share:.1f}" if up.values else "-",
                f"{places:,.0f}" if up.values else "-",
                cell(runs, "bytes.ratio", SHARE),
                str(len(score.values)),
            ]
        )
    return table


def sent(frame: pd.DataFrame) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """(weights, what travels, runs) of learners and compressed boundaries."""
    several, linked = frame["grad.learners"] > 1, frame["fwd.compressor.kind"] != "none"
    own = frame[several | linked]
    for method, runs in own.groupby("method", sort=False):
        row = runs.iloc[0].dropna().to_dict()
        what = [boundaries(row)] if row["fwd.compressor.kind"] != "none" else []
        if row["grad.learners"] > 1:
            what.append(
                exchange(row)
                if row["grad.compressor.kind"] != "none"
                else f"all gradients, {row['grad.learners']} learners"
            )
        yield levelless(sparse(row)) or DENSE, "; ".join(what) or str(method), runs


def tables(frame: pd.DataFrame) -> list[Table]:
    """Loss at equal FLOPs, FLOPs by part, bytes."""
    made = []
    for turn, (title, own) in enumerate(trainings(frame)):
        for make in (equal, parts):
            table = make(own, f"; {title}" if title else "")
            table.name += f"_{turn + 1}" if turn else ""
            made.append(table)
    return [table for table in (*made, wire(frame)) if table.rows]


# Claims.


def _side(runs: pd.DataFrame, *compared: str) -> pd.DataFrame:
    """Runs as a side of `paired`: what is compared is no part of their base."""
    own = runs[runs.status.isin(["finished", "diverged"])]
    guess = math.log(256 if (own["data.tokenizer"] == "bytes").all() else 50257)  # among all tokens
    score = own[LOSS] if LOSS in own else pd.Series(math.nan, own.index)
    return pd.DataFrame(
        {
            "id": own.id,
            "seed": own.seed,
            "base": base(own, *compared) if len(own) else "",
            "kind": "none",
            "diverged": own.status == "diverged",
            "score": score.where(own.status == "finished", guess),
        }
    )


def _effects(
    frame: pd.DataFrame, what: str, a: str, b: str, equal: bool = False, **region: Any
) -> list[Effect]:
    """equal: only where both have the same FLOPs, within 2 %."""
    sides = [
        (_side(named[a], *COMPARED), _side(named[b], *COMPARED))
        for _, own in trainings(frame)
        if a in (named := dict(arms(own)))
        and b in named
        and not (equal and abs(_mean(named[a], TOTAL) / _mean(named[b], TOTAL) - 1) > 0.02)
    ]
    if not sides:
        return [Effect(what, **region, digits=3)]
    left, right = (pd.concat(every) for every in zip(*sides, strict=True))
    return paired(frame, what, left, right, unit=1.0, **region)


def m1(frame: pd.DataFrame) -> Claim:
    """A quarter of the FLOPs, the dense loss."""
    found = [
        (_mean(dict(own)[MST], RELATIVE), _head(part))
        for _, part in trainings(frame)
        if MST in dict(own := arms(part))
    ]
    here = "; ".join(
        f"here {100 * share:.1f} %, {head}" for share, head in found if math.isfinite(share)
    )
    return Claim(
        "M1",
        f"MST reaches the dense loss with a quarter of its FLOPs (ours: within {EQUAL:g} "
        f"nats{f'; {here}' if here else ''}).",
        _effects(frame, "loss, MST minus dense", MST, DENSE, below=EQUAL),
    )


def m2(frame: pd.DataFrame) -> Claim:
    """Each phase is needed."""
    return Claim(
        "M2",
        "Each phase of MST is needed: at equal FLOPs the loss is higher without it.",
        [
            effect
            for name in WITHOUT
            for effect in _effects(
                frame,
                f"loss, MST without {name} minus MST",
                f"{MST}, without {name}",
                MST,
                equal=True,
                above=0.0,
            )
        ],
    )


def m3(frame: pd.DataFrame) -> Claim:
    """Sparse attention costs nothing."""
    return Claim(
        "M3",
        f"Sparse attention costs nothing at the FLOPs that it saves (ours: within {EQUAL:g} "
        "nats; weights as sparse at any time).",
        _effects(
            frame,
            "loss, MST minus MST with dense attention",
            MST,
            f"{MST}, dense attention",
            within=EQUAL,
        ),
    )


def m4(frame: pd.DataFrame) -> Claim:
    """Ours: better than a narrower dense model."""
    return Claim(
        "M4",
        "MST beats a narrower dense model with the same FLOPs (ours).",
        _effects(frame, "loss, MST minus narrower dense model", MST, NARROW, equal=True, below=0.0),
        source="",
    )


def m5(frame: pd.DataFrame) -> Claim:
    """Ours: live gradients only."""
    every, live = (
        frame[(frame["grad.learners"] > 1) & (frame["grad.compressor.kind"] == kind)]
        for kind in ("none", "live")
    )
    bytes_of = Effect(
        "bytes of live gradients above those of the weights that live, in %",
        below=1.0,
        each="run",
    )
    if "gradients.up" in live and "masks.mean_density" in live:
        done = live[live.status == "finished"]
        wanted = done["gradients.dense"] - 4 * done["masks.weights"] * (
            1 - done["masks.mean_density"]
        )
        bytes_of.values, bytes_of.ids = (
            list(100 * (done["gradients.up"] / wanted - 1)),
            list(done.id),
        )
    sides = (_side(own, "grad.compressor.", "grad.feedback.") for own in (live, every))
    return Claim(
        "M5",
        f"Sending live gradients only costs no quality (within {EQUAL:g} nats), and as many "
        "bytes as live weights have, plus the places of what grows (ours; a count of bytes, "
        "less than 1 % above).",
        [
            *paired(frame, "loss, live gradients minus all", *sides, unit=1.0, within=EQUAL),
            bytes_of,
        ],
        source="",
    )


CLAIMS = [m1, m2, m3, m4, m5]


# Figures, of the first training where there are several.


def _finished(frame: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    every = trainings(frame)
    found = (
        [(name, runs[runs.status == "finished"]) for name, runs in arms(every[0][1])]
        if every
        else []
    )
    return [one for one in found if len(one[1])]


@styled
def _front(found: list[tuple[str, pd.DataFrame]]) -> Figure:
    whole = _whole(found)
    found = sorted(found, key=lambda arm: arm[1][LOSS].mean())
    figure, axis = plt.subplots(figsize=(1.4 * COLUMN, 0.8 + 0.18 * len(found)))
    names = []
    for turn, (name, runs) in enumerate(found):
        dense = name.startswith("dense") or "dense model" in name
        axis.errorbar(
            runs[LOSS].mean(),
            turn,
            xerr=runs[LOSS].std() if len(runs) > 1 else None,
            marker="*" if dense else "o",
            ms=6 if dense else 4,
            color="black" if dense else INK[0],
            elinewidth=0.7,
        )
        names.append(f"{name} ({100 * _mean(runs, TOTAL) / whole:.0f} % of FLOPs, n = {len(runs)})")
    axis.set_yticks(range(len(found)), names)
    axis.invert_yaxis()
    axis.set(xlabel="test loss (nats a byte)")
    return figure


def front(frame: pd.DataFrame, _curves: pd.DataFrame) -> Figure | None:
    """Test loss by arm, best first, with the FLOPs of its training, counted by pairs that attend,
    head included. Stars: dense models. Bars: ± one sample standard deviation over seeds.
    """
    found = _finished(frame)
    return _front(found) if len(found) > 1 and _whole(found) == _whole(found) else None


@styled
def _bytes(found: list[tuple[str, str, pd.DataFrame]]) -> Figure:
    figure, axis = plt.subplots(figsize=(COLUMN, 2.8))
    for turn, (weights, said, runs) in enumerate(found):
        loss = runs[LOSS]
        axis.errorbar(
            _mean(runs, "gradients.up") / 1e3,
            loss.mean(),
            yerr=loss.std() if len(loss) > 1 else None,
            marker=MARKS[turn % 9],
            color=INK[turn % 7],
            ls="none",
            elinewidth=0.7,
            label=f"{weights}: {said}",
        )
    axis.set(xlabel="kB of gradients a learner hands over a step", ylabel="test loss (nats)")
    logarithmic(axis.xaxis)
    legend(figure)
    return figure


def by_bytes(frame: pd.DataFrame, _curves: pd.DataFrame) -> Figure | None:
    """Test loss against the bytes of gradients between learners. Bars: ± one sample standard
    deviation over seeds.
    """
    found = [
        (weights, said, runs[runs.status == "finished"])
        for weights, said, runs in sent(frame)
        if runs["grad.learners"].iloc[0] > 1
    ]
    found = [one for one in found if len(one[2])]
    return _bytes(found) if len(found) > 1 else None


@styled
def _masks(told: dict[str, list[dict]]) -> Figure:
    names = list(told)
    figure, axes = plt.subplots(
        2,
        len(names),
        figsize=(1.05 * COLUMN * len(names), 3.6),
        squeeze=False,
        sharex=True,
        sharey="row",
    )
    for column, name in enumerate(names):
        steps = np.concatenate([one["steps"] for one in told[name]])
        kinds = told[name][0]["layers"]
        for row, what in enumerate(("density", "turnover")):
            every = np.concatenate([np.array(one[what]) for one in told[name] if one["steps"]])
            lines = {
                kind: every[:, [at for at, layer in enumerate(kinds) if _kind(layer) == kind]]
                for kind in dict.fromkeys(map(_kind, kinds))
            }
            for turn, (kind, own) in enumerate(_apart(lines).items()):
                axes[row, column].plot(
                    steps,
                    100 * own.mean(1),
                    color=INK[turn % 7],
                    label=kind,
                    marker=MARKS[turn % 9],
                    ms=2,
                )
            axes[row, column].set(ylabel=f"{what} (%)" if not column else "")
        axes[0, column].set_title(name)
        axes[1, column].set_xlabel("step")
    legend(figure)
    return figure


def _apart(lines: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The lines; those within a point of each other are drawn as one, with both names."""
    merged: list[tuple[list[str], np.ndarray]] = []
    for kind, line in lines.items():
        for kinds, first in merged:
            if np.abs(first.mean(1) - line.mean(1)).max() <= 0.01:
                kinds.append(kind)
                break
        else:
            merged.append(([kind], line))
    return {", ".join(kinds): line for kinds, line in merged}


def _kind(layer: str) -> str:
    """A layer without the number of its block: "attn.c_attn"."""
    return (
        ".".join(part for part in layer.split(".")[1:] if not part.isdigit() and part != "h")
        or layer
    )


def masks(frame: pd.DataFrame, curves: pd.DataFrame) -> Figure | None:
    """Density of the layers and their turnover (weights that grow in an update, as a share of the
    live ones) over time; layers of one kind as their mean over blocks, one seed.
    """
    told = {
        name: [
            mask for mask in curves[curves.id == runs.id.iloc[0]].masks if isinstance(mask, dict)
        ]
        for name, runs in _finished(frame)
        if name in (MST, "RigL", "GraNet") and "masks" in curves
    }
    told = {name: own for name, own in told.items() if any(one["steps"] for one in own)}
    return _masks(told) if told else None


@styled
def _ever(found: list[tuple[str, pd.DataFrame]]) -> Figure:
    figure, axis = plt.subplots(figsize=(COLUMN, 2.8))
    for turn, (name, runs) in enumerate(found):
        axis.errorbar(
            100 * runs["masks.ever"].mean(),
            runs[LOSS].mean(),
            label=name,
            marker=MARKS[turn % 9],
            yerr=runs[LOSS].std() if len(runs) > 1 else None,
            color=INK[turn % 7],
            ls="none",
            elinewidth=0.7,
        )
    axis.set(xlabel="weights ever active (%)", ylabel="test loss (nats)")
    legend(figure)
    return figure


def ever(frame: pd.DataFrame, _curves: pd.DataFrame) -> Figure | None:
    """Test loss against the share of weights that were ever active (ITOP's rate), arms with
    masks.
    """
    found = [(name, runs) for name, runs in _finished(frame) if name not in (DENSE, SHORT, NARROW)]
    return _ever(found) if len(found) > 1 else None


FIGURES = {"front": front, "bytes": by_bytes, "masks": masks, "ever": ever}
