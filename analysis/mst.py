"""Sparse training at equal FLOPs (Mixed Sparsity Training, arXiv 2408.11746); claims M1 to M5.

FLOPs are those that a run counted, by pairs of tokens that attend, the head included; whether it is
sparse stands in the tables. Losses are the test split's at the last epoch, in nats. An arm's name
is what it does without its sparsity, which differs so that FLOPs do not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from commsweep.config.labels import MST as WITHOUT
from commsweep.config.labels import boundaries, exchange, levelless, phases, sparse
from commsweep.reporting.claim import Claim, Effect, paired
from commsweep.reporting.results import base, distinct, is_text, masked
from commsweep.reporting.style import (
    ends,
    legend,
    logarithmic,
    look,
    plot,
    plt,
    size,
    styled,
)
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
    dense_wires = frame[(frame["grad.learners"] == 1) & (frame["fwd.compressor.kind"] == "none")]
    if dense_wires.empty:
        return []
    keys = base(dense_wires, *COMPARED)
    groups = [group for _, group in dense_wires.groupby(keys, sort=False)]
    if len(groups) == 1:
        return [("", groups[0])]
    firsts = pd.concat([group.iloc[:1] for group in groups]).assign(
        setting_id=list(keys.drop_duplicates())
    )
    names = {group.setting_id.iloc[0]: text.strip(" ()") for text, group in distinct(firsts, "")}
    return [
        (names[text], group) for text, group in zip(keys.drop_duplicates(), groups, strict=True)
    ]


def arms(rows_: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """(name, runs) of one training: dense ones first, then the best. The dense run is that of most
    steps and width.
    """
    names = rows_.apply(lambda row: levelless(sparse(row.dropna().to_dict())) or DENSE, axis=1)
    dense = names == DENSE
    # absent: the model's own
    wide = rows_.get("model.width", pd.Series(math.nan, rows_.index)).fillna(math.inf)
    names[dense & (wide < wide[dense].max())] = NARROW
    dense = names == DENSE
    names[dense & (_steps(rows_) < _steps(rows_)[dense].max())] = SHORT
    arms = [
        (text, group)
        for name, group_ in rows_.groupby(names, sort=False)
        for text, group in distinct(group_, str(name))
    ]
    order = {DENSE: 0, SHORT: 1, NARROW: 2}
    return sorted(arms, key=lambda entry: (order.get(entry[0], 3), _mean(entry[1], LOSS)))


def _steps(frame: pd.DataFrame) -> pd.Series:
    return frame["data.train_blocks"] * frame["epochs"]


def _mean(runs: pd.DataFrame, column: str) -> float:
    return float(runs[column].mean()) if column in runs and runs[column].notna().any() else math.inf


def _total(arms_: list[tuple[str, pd.DataFrame]], column: str = TOTAL) -> float:
    """FLOPs, or another column, of the dense run that arms are compared with; not a number without
    one.
    """
    return next((_mean(runs, column) for name, runs in arms_ if name == DENSE), math.nan)


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
    arms_ = arms(frame)
    dense = _total(arms_, LOSS)
    for name, runs in arms_:
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
                *_shares(done, arms_),
                _three(score),
                cell(runs, PPL, PLAIN),
                f"{_mean(done, LOSS) - dense:+.3f}" if dense == dense else "-",
                _inference(done, arms_),
                cell(runs, "masks.ever", SHARE),
                str(len(score.values)),
            ]
        )
    return table


def _shares(done: pd.DataFrame, arms_: list[tuple[str, pd.DataFrame]]) -> list[str]:
    """FLOPs in % of the dense arm's, with and without the head; without such an arm, of the same
    model's.
    """
    total = _total(arms_)
    if total != total:
        return [
            f"{100 * _mean(done, name):.1f}" for name in (RELATIVE, "flops.relative_without_head")
        ]
    without = (done[TOTAL] - done["flops.head"]).mean() / (total - _total(arms_, "flops.head"))
    return [f"{100 * _mean(done, TOTAL) / total:.1f}", f"{100 * without:.1f}"]


def _inference(done: pd.DataFrame, arms_: list[tuple[str, pd.DataFrame]]) -> str:
    total = _total(arms_, "flops.inference")
    share = (
        _mean(done, "flops.inference") / total
        if total == total
        else _mean(done, "flops.inference_relative")
    )
    return f"{100 * share:.1f}"


def _three(score: Cell) -> str | Cell:
    if not score.values:
        return score
    return f"{score.mean:.3f}" + (f" ± {score.sd:.3f}" if score.sd is not None else "")


def _head(frame: pd.DataFrame) -> str:
    """Return whether the head is counted, and sparse."""
    modules = set(frame["sparsity.modules"].dropna())
    how = (
        "sparse" if modules == {"all"} else "dense" if modules == {"blocks"} else "dense or sparse"
    )
    share = _total(arms(frame), "flops.head_share")
    return f"head counted, {how}" + (
        f"; {100 * share:.1f} % of the dense run" if math.isfinite(share) else ""
    )


def flops_parts(frame: pd.DataFrame, title: str) -> Table:
    """Return what the FLOPs of every arm of a training went into."""
    table = Table(
        "parts",
        f"FLOPs by part, as % of the dense run ({_head(frame)}){title}",
        ["Arm", *PARTS, "total"],
    )
    arms_ = arms(frame)
    total = _total(arms_)
    for name, runs in arms_:
        if (runs.status == "finished").any() and total == total:
            table.rows.append(
                [
                    name,
                    *(f"{100 * _mean(runs, f'flops.{name}') / total:.2f}" for name in PARTS),
                    f"{100 * _mean(runs, TOTAL) / total:.2f}",
                ]
            )
    return table


def wire(frame: pd.DataFrame) -> Table:
    """Return what travels between learners, and across boundaries, with masks and without."""
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
    for weights, messages, runs in sent(frame):
        score, up = cell(runs, LOSS, PLAIN), cell(runs, "gradients.up", BYTES)
        share = (
            100 * _mean(runs, "gradients.up") / _mean(runs, "gradients.dense")
            if up.values
            else math.nan
        )
        place_bytes = _mean(
            runs.assign(places=runs.get("gradients.places", pd.Series(0.0, runs.index)).fillna(0)),
            "places",
        )
        table.rows.append(
            [
                weights,
                messages,
                _three(score),
                up if up.values else "-",
                f"{share:.1f}" if up.values else "-",
                f"{place_bytes:,.0f}" if up.values else "-",
                cell(runs, "bytes.ratio", SHARE),
                str(len(score.values)),
            ]
        )
    return table


def sent(frame: pd.DataFrame) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """(weights, what travels, runs) of learners and compressed boundaries."""
    several, linked = frame["grad.learners"] > 1, frame["fwd.compressor.kind"] != "none"
    rows = frame[several | linked]
    for method, runs in rows.groupby("method", sort=False):
        row = runs.iloc[0].dropna().to_dict()
        texts = [boundaries(row)] if row["fwd.compressor.kind"] != "none" else []
        if row["grad.learners"] > 1:
            texts.append(
                exchange(row)
                if row["grad.compressor.kind"] != "none"
                else f"all gradients, {row['grad.learners']} learners"
            )
        yield levelless(sparse(row)) or DENSE, "; ".join(texts) or str(method), runs


def tables(frame: pd.DataFrame) -> list[Table]:
    """Loss at equal FLOPs, FLOPs by part, bytes."""
    tables = []
    for index, (title, group) in enumerate(trainings(frame)):
        for make in (equal, flops_parts):
            table = make(group, f"; {title}" if title else "")
            table.name += f"_{index + 1}" if index else ""
            tables.append(table)
    return [table for table in (*tables, wire(frame)) if table.rows]


# Claims.


def _side(runs: pd.DataFrame, *compared: str) -> pd.DataFrame:
    """Runs as a side of `paired`: what is compared is no part of their base."""
    finished = runs[runs.status.isin(["finished", "diverged"])]
    guess = math.log(
        256 if (finished["data.tokenizer"] == "bytes").all() else 50257
    )  # among all tokens
    score = finished[LOSS] if LOSS in finished else pd.Series(math.nan, finished.index)
    return pd.DataFrame(
        {
            "id": finished.id,
            "seed": finished.seed,
            "base": base(finished, *compared) if len(finished) else "",
            "kind": "none",
            "diverged": finished.status == "diverged",
            "score": score.where(finished.status == "finished", guess),
        }
    )


def _effects(
    frame: pd.DataFrame, label: str, a: str, b: str, equal: bool = False, **region: Any
) -> list[Effect]:
    """equal: only where both have the same FLOPs, within 2 %."""
    sides = [
        (_side(named[a], *COMPARED), _side(named[b], *COMPARED))
        for _, group in trainings(frame)
        if a in (named := dict(arms(group)))
        and b in named
        and not (equal and abs(_mean(named[a], TOTAL) / _mean(named[b], TOTAL) - 1) > 0.02)
    ]
    if not sides:
        return [Effect(label, **region, digits=3)]
    left, right = (pd.concat(values) for values in zip(*sides, strict=True))
    return paired(frame, label, left, right, unit=1.0, **region)


def m1(frame: pd.DataFrame) -> Claim:
    """A quarter of the FLOPs, the dense loss."""
    shares = [
        (_mean(dict(arms_)[MST], RELATIVE), _head(group))
        for _, group in trainings(frame)
        if MST in dict(arms_ := arms(group))
    ]
    measured = "; ".join(
        f"here {100 * share:.1f} %, {head}" for share, head in shares if math.isfinite(share)
    )
    return Claim(
        "M1",
        f"MST reaches the dense loss with a quarter of its FLOPs (ours: within {EQUAL:g} "
        f"nats{f'; {measured}' if measured else ''}).",
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
    dense_rows, live = (
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
        expected = done["gradients.dense"] - 4 * done["masks.weights"] * (
            1 - done["masks.mean_density"]
        )
        bytes_of.values, bytes_of.ids = (
            list(100 * (done["gradients.up"] / expected - 1)),
            list(done.id),
        )
    sides = (_side(rows, "grad.compressor.", "grad.feedback.") for rows in (live, dense_rows))
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
    trainings_ = trainings(frame)
    arms_ = (
        [(name, runs[runs.status == "finished"]) for name, runs in arms(trainings_[0][1])]
        if trainings_
        else []
    )
    return [entry for entry in arms_ if len(entry[1])]


@styled
def _front(arms_: list[tuple[str, pd.DataFrame]]) -> Figure:
    total = _total(arms_)
    arms_ = sorted(arms_, key=lambda arm: arm[1][LOSS].mean())
    figure, axis = plt.subplots(figsize=size(2, 0.8 + 0.18 * len(arms_)))
    names = []
    for index, (name, runs) in enumerate(arms_):
        dense = name.startswith("dense") or "dense model" in name
        mark = {"marker": "*", "ms": 6} if dense else {"marker": "o", "ms": 4}
        colour = "black" if dense else look("masked")["color"]
        plot(axis, [index], [ends(runs[LOSS])], sideways=True, color=colour, **mark)
        names.append(f"{name} ({100 * _mean(runs, TOTAL) / total:.0f} % of FLOPs, n = {len(runs)})")
    axis.set_yticks(range(len(arms_)), names)
    axis.invert_yaxis()
    axis.set(xlabel="test loss (nats a byte)")
    return figure


def front(frame: pd.DataFrame, _curves: pd.DataFrame) -> Figure | None:
    """Test loss by arm, best first, with the FLOPs of its training, counted by pairs that attend,
    head included. Stars: dense models. Bars: 95 % intervals over seeds.
    """
    arms = _finished(frame)
    return _front(arms) if len(arms) > 1 and _total(arms) == _total(arms) else None


@styled
def _bytes(entries: list[tuple[str, str, pd.DataFrame]]) -> Figure:
    figure, axis = plt.subplots(figsize=size(1, 2.8))
    for weights, messages, runs in entries:
        label = f"{weights}: {messages}"
        mark = look(label, ls="none")
        plot(axis, [_mean(runs, "gradients.up") / 1e3], [ends(runs[LOSS])], label, **mark)
    axis.set(xlabel="kB of gradients a learner hands over a step", ylabel="test loss (nats)")
    logarithmic(axis.xaxis)
    legend(figure)
    return figure


def by_bytes(frame: pd.DataFrame, _curves: pd.DataFrame) -> Figure | None:
    """Test loss against the bytes of gradients between learners. Bars: ± one sample standard
    deviation over seeds.
    """
    entries = [
        (weights, messages, runs[runs.status == "finished"])
        for weights, messages, runs in sent(frame)
        if runs["grad.learners"].iloc[0] > 1
    ]
    entries = [entry for entry in entries if len(entry[2])]
    return _bytes(entries) if len(entries) > 1 else None


@styled
def _masks(masks_by_arm: dict[str, list[dict]]) -> Figure:
    names = list(masks_by_arm)
    figure, axes = plt.subplots(
        2,
        len(names),
        figsize=size(min(2, len(names)), 3.6),
        squeeze=False,
        sharex=True,
        sharey="row",
    )
    for column, name in enumerate(names):
        steps = np.concatenate([record["steps"] for record in masks_by_arm[name]])
        kinds = masks_by_arm[name][0]["layers"]
        for row, measure in enumerate(("density", "turnover")):
            values = np.concatenate(
                [np.array(record[measure]) for record in masks_by_arm[name] if record["steps"]]
            )
            lines = {
                kind: values[:, [at for at, layer in enumerate(kinds) if _kind(layer) == kind]]
                for kind in dict.fromkeys(map(_kind, kinds))
            }
            for kind, records in _by_kind(lines).items():
                axes[row, column].plot(
                    steps,
                    100 * records.mean(1),
                    label=kind,
                    **look(kind, ms=2),
                )
            axes[row, column].set(ylabel=f"{measure} (%)" if not column else "")
        axes[0, column].set_title(name)
        axes[1, column].set_xlabel("step")
    legend(figure)
    return figure


def _by_kind(lines: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
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
        ".".join(word for word in layer.split(".")[1:] if not word.isdigit() and word != "h")
        or layer
    )


def masks(frame: pd.DataFrame, curves: pd.DataFrame) -> Figure | None:
    """Density of the layers and their turnover (weights that grow in an update, as a share of the
    live ones) over time; layers of one kind as their mean over blocks, one seed.
    """
    masks_by_arm = {
        name: [
            mask for mask in curves[curves.id == runs.id.iloc[0]].masks if isinstance(mask, dict)
        ]
        for name, runs in _finished(frame)
        if name in (MST, "RigL", "GraNet") and "masks" in curves
    }
    masks_by_arm = {
        name: records
        for name, records in masks_by_arm.items()
        if any(record["steps"] for record in records)
    }
    return _masks(masks_by_arm) if masks_by_arm else None


@styled
def _ever(arms_: list[tuple[str, pd.DataFrame]]) -> Figure:
    figure, axis = plt.subplots(figsize=size(1, 2.8))
    for name, runs in arms_:
        x, mark = 100 * runs["masks.ever"].mean(), look(name, ls="none")
        plot(axis, [x], [ends(runs[LOSS])], name, **mark)
    axis.set(xlabel="weights ever active (%)", ylabel="test loss (nats)")
    legend(figure)
    return figure


def ever(frame: pd.DataFrame, _curves: pd.DataFrame) -> Figure | None:
    """Test loss against the share of weights that were ever active (ITOP's rate), arms with
    masks.
    """
    arms = [(name, runs) for name, runs in _finished(frame) if name not in (DENSE, SHORT, NARROW)]
    return _ever(arms) if len(arms) > 1 else None


FIGURES = {"front": front, "bytes": by_bytes, "masks": masks, "ever": ever}
