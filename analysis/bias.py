"""Ours: must gradients be compressed more mildly than activations, or without bias? Claims F1a to
F1i.

Gains are points of accuracy (images) or nats of test loss saved (text), compression on at
inference. What a message's error and bias are, see `commsweep/boundary/diagnosis.py`; they are
there of runs with --diagnose.
"""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from commsweep.config import labels
from commsweep.reporting.claim import DENSE, SLIGHT, Claim, Effect, Wanted, contrast, difference
from commsweep.reporting.results import base, distinct, is_text, nothing_learned, plain
from commsweep.reporting.style import (
    Draw,
    drawing,
    ends,
    legend,
    logarithmic,
    look,
    plot,
    plt,
    size,
)
from commsweep.reporting.table import ON, PLAIN, SHARE, Cell, Table, cell
from commsweep.reporting.words import in_words

NAME = "bias"
LOSS, PERPLEXITY = "test_on_loss", "test_on_ppl"
LARGE, NOTICEABLE = 0.1, 0.02  # nats
# a bias below this share of the error is taken for none: chance leaves some in what is measured
FREE = 0.25


def rows(frame: pd.DataFrame) -> pd.DataFrame:
    """The runs that it speaks of: boundaries of one learner, in a sweep that rounds gradients both
    ways.
    """
    rows = plain(frame)
    column = "bwd.compressor.rounding"
    return (
        rows
        if column in rows and set(rows[column].dropna()) >= {"nearest", "stochastic"}
        else rows.iloc[:0]
    )


def tables(frame: pd.DataFrame) -> list[Table]:
    """Every setting with what its messages are like."""
    tables = []
    for index, (name, group) in enumerate(_trainings(frame)):
        table = Table(
            "messages" + (f"_{index + 1}" if index else ""),
            f"Messages and what they cost: {name}",
            [
                "Setting",
                "score",
                "seeds",
                "activation error",
                "activation bias",
                "gradient error",
                "gradient bias",
                "gradient energy kept",
                "fwd bytes (%)",
                "bwd bytes (%)",
            ],
        )
        metric, unit = (PERPLEXITY, PLAIN) if is_text(group) else (ON, "percent")
        groups = sorted(
            group.groupby("method", sort=False),
            key=lambda entry: _rank(cell(entry[1], metric), unit),
        )
        for method, rows in groups:
            score = cell(rows, metric, unit)
            table.rows.append(
                [
                    str(method),
                    score,
                    str(len(score.values)),
                    *(
                        _measure(rows, f"diagnosis.{column}")
                        for column in (
                            "fwd.error",
                            "fwd.bias",
                            "bwd.error",
                            "bwd.bias",
                            "bwd.energy",
                        )
                    ),
                    cell(rows, "bytes.fwd_ratio", SHARE),
                    cell(rows, "bytes.bwd_ratio", SHARE),
                ]
            )
        tables.append(table)
    return tables


def _trainings(frame: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """(name, rows) of each training: a model, its data, its optimizer."""
    keys = base(frame, "fwd.", "bwd.")
    firsts = frame.assign(setting_id=keys)
    named = {
        group.setting_id.iloc[0]: text.strip(" ()") or _called(group)
        for text, group in distinct(firsts.drop_duplicates("setting_id"), "")
    }
    return [
        (named[key] if keys.nunique() > 1 else _called(group), group)
        for key, group in frame.groupby(keys, sort=False)
    ]


def _called(group: pd.DataFrame) -> str:
    return ", ".join(group[name].iloc[0] for name in ("model.name", "data.name", "optim.kind"))


def _rank(score: Cell, unit: str) -> float:
    return math.inf if not score.values else score.mean if unit == PLAIN else -score.mean


def _measure(group: pd.DataFrame, column: str) -> Cell | str:
    cell_ = cell(group, column, PLAIN)
    return cell_ if cell_.values else "-"


# Claims.


def _code(side: str, bits: int, scale: str | int, rounding: str) -> Wanted:
    grouped = {"scale": "group", "group": scale} if isinstance(scale, int) else {"scale": scale}
    return _one_direction(side, "uniform", bits=bits, rounding=rounding, **grouped)


def _one_direction(side: str, kind: str, feedback: str = "none", **parameters: object) -> Wanted:
    """Compression of one direction, the other dense."""
    opposite = {"fwd": "bwd", "bwd": "fwd"}[side]
    return {
        f"{side}.compressor.kind": kind,
        f"{opposite}.compressor.kind": "none",
        f"{side}.feedback.kind": feedback,
    } | {f"{side}.compressor.{key}": value for key, value in parameters.items()}


def gained(
    frame: pd.DataFrame,
    label: str,
    a: Wanted,
    b: Wanted,
    media: str = "both",
    *,
    sign: str = "above",
    image: float = SLIGHT,
    text: float = LARGE,
) -> list[Effect]:
    """Return what arm a gains over arm b, in every training that has both; the region is `sign` the
    margin of the medium.
    """
    effects: list[Effect] = []
    is_text = (
        frame["data.tokenizer"].notna()
        if "data.tokenizer" in frame
        else pd.Series(False, frame.index)
    )
    if media != "text" and not is_text.all():
        effects += difference(
            frame[~is_text],
            f"points gained, {label}",
            (a, ON),
            (b, ON),
            across=True,
            **{sign: image},
        )
    if media != "image" and is_text.any():
        effects += difference(
            frame[is_text],
            f"nats saved, {label}",
            (b, LOSS),
            (a, LOSS),
            across=True,
            unit=1.0,
            guess=math.log(256),
            **{sign: text},
        )
    return effects


def _scale(scale: str | int) -> str:
    return {"tensor": "one range a batch", "sample": "one range a sample"}.get(
        str(scale), f"groups of {scale}"
    )


def _rounding(
    frame: pd.DataFrame,
    side: str,
    bits: tuple[int, ...],
    scales: tuple[str | int, ...],
    media: str = "both",
    **region: Any,
) -> list[Effect]:
    return [
        effect
        for scale in scales
        for b in bits
        for effect in gained(
            frame,
            f"stochastic over nearest, {b} bit, {_scale(scale)}",
            _code(side, b, scale, "stochastic"),
            _code(side, b, scale, "nearest"),
            media,
            **region,
        )
    ]


def f1a(frame: pd.DataFrame) -> Claim:
    """Claim F1a, a single range for the batch: rounding without bias."""
    return Claim(
        "F1a",
        "Where one range serves the batch, gradients of few bits must be rounded without bias.",
        _rounding(frame, "bwd", (2, 4), ("tensor",)),
    )


def f1b(frame: pd.DataFrame) -> Claim:
    """Fine scales, images: no difference."""
    return Claim(
        "F1b",
        f"With fine scales rounding makes no difference on images (within {SLIGHT:g} point): "
        "there the range decides, not the bias.",
        _rounding(frame, "bwd", (2,), (128, 32), "image", sign="within"),
    )


def f1c(frame: pd.DataFrame) -> Claim:
    """Fine scales, text: a difference."""
    return Claim(
        "F1c",
        f"On language models it does even with fine scales (at least {LARGE:g} nats).",
        _rounding(frame, "bwd", (2,), (128, 32), "text"),
    )


def f1d(frame: pd.DataFrame) -> Claim:
    """Activations do not need it."""
    return Claim(
        "F1d",
        "Activations gain nothing from rounding without bias.",
        _rounding(frame, "fwd", (2,), ("tensor", 128), sign="below"),
    )


def f1e(frame: pd.DataFrame) -> Claim:
    """Equal bytes."""
    return Claim(
        "F1e",
        "At nearly equal bytes (7.8 and 6.3 % against TopK's 6.9 %) gradients lose less in codes "
        "without bias than under TopK.",
        [
            *gained(
                frame,
                "2 bit stochastic, groups of 128, over TopK 5 %",
                _code("bwd", 2, 128, "stochastic"),
                _one_direction("bwd", "topk", ratio=0.05),
            ),
            *gained(
                frame,
                "TernGrad over TopK 5 %",
                _one_direction("bwd", "tern"),
                _one_direction("bwd", "topk", ratio=0.05),
            ),
        ],
    )


def f1f(frame: pd.DataFrame) -> Claim:
    """More error without bias against less error with bias."""
    pairs = [
        (
            "scaled RandomK 50 %",
            _one_direction("bwd", "randomk", ratio=0.5, scaled=True),
            "TopK 50 %",
            _one_direction("bwd", "topk", ratio=0.5),
        ),
        (
            "TernGrad",
            _one_direction("bwd", "tern"),
            "TopK 10 %",
            _one_direction("bwd", "topk", ratio=0.1),
        ),
        (
            "2 bit stochastic",
            _code("bwd", 2, 128, "stochastic"),
            "2 bit nearest",
            _code("bwd", 2, 128, "nearest"),
        ),
    ]
    return Claim(
        "F1f",
        "A gradient with more error but no bias harms less than one with less error and bias "
        "(pairs whose measured errors are so).",
        [
            effect
            for name, a, opposite, b in pairs
            if not (chosen := _more_error(frame, a, b)).empty
            for effect in gained(chosen, f"{name} over {opposite}", a, b, image=0.0, text=0.0)
        ],
    )


def f1g(frame: pd.DataFrame) -> Claim:
    """Error feedback averages the bias out over time."""
    return Claim(
        "F1g",
        "Error feedback, which averages a bias out over steps, makes TopK of gradients better.",
        [
            effect
            for ratio in (0.5, 0.1, 0.05)
            for effect in gained(
                frame,
                f"EF over none, TopK {100 * ratio:g} %",
                _one_direction("bwd", "topk", "ef", ratio=ratio),
                _one_direction("bwd", "topk", ratio=ratio),
            )
        ],
    )


def f1h(frame: pd.DataFrame) -> Claim:
    """AdamW suffers more from bias than SGD."""
    effects = []
    for name, arm in (
        ("TopK 5 %", _one_direction("bwd", "topk", ratio=0.05)),
        ("TopK 10 %", _one_direction("bwd", "topk", ratio=0.1)),
        ("2 bit nearest, groups of 128", _code("bwd", 2, 128, "nearest")),
    ):
        lost = {
            kind: gained(group, name, DENSE, arm, "image")
            for kind, group in frame.groupby("optim.kind")
        }
        if {"sgd", "adamw"} <= lost.keys() and all(len(loss) == 1 for loss in lost.values()):
            effects.append(
                contrast(
                    f"points lost by {name}, with AdamW minus with SGD",
                    lost["adamw"][0],
                    lost["sgd"][0],
                    above=SLIGHT,
                )
            )
    return Claim(
        "F1h",
        "A biased gradient harms a training with AdamW more than one with SGD, on the same images.",
        effects,
    )


def f1i(frame: pd.DataFrame) -> Claim:
    """Return what C8 is about: the gradient of what was sent."""
    forward: Wanted = {"fwd.compressor.kind": "topk", "fwd.compressor.ratio": 0.2}
    mask = forward | {"bwd.compressor.kind": "forward_mask"}
    coded = {
        f"bwd.compressor.values.{key}": value
        for key, value in (("kind", "uniform"), ("bits", 2), ("rounding", "stochastic"))
    }
    return Claim(
        "F1i",
        "The gradient must be one of what was really sent: of a sparse activation, masked alike "
        "(then 2 bits without bias suffice for its values); a dense gradient is no better than "
        "a TopK of its own.",
        [
            *gained(
                frame,
                "shared mask over dense gradient, activations TopK 20 %",
                mask,
                forward | {"bwd.compressor.kind": "none"},
            ),
            *gained(
                frame,
                "dense gradient over TopK 20 % of its own, activations TopK 20 %",
                forward | {"bwd.compressor.kind": "none"},
                forward | {"bwd.compressor.kind": "topk", "bwd.compressor.ratio": 0.2},
                sign="below",
            ),
            *gained(
                frame,
                "values of 2 bit stochastic over float32, shared mask of TopK 20 %",
                mask | coded,
                mask,
                sign="within",
                text=NOTICEABLE,
            ),
        ],
    )


def _more_error(frame: pd.DataFrame, a: Wanted, b: Wanted) -> pd.DataFrame:
    """Return the trainings in which messages of arm a have more error and less bias than those of
    arm b, as measured.
    """
    chosen = []
    for _, group in _trainings(frame):
        picked = [_picked(group, arm) for arm in (a, b)]
        error = [
            rows["diagnosis.bwd.error"].mean() if "diagnosis.bwd.error" in rows else math.nan
            for rows in picked
        ]
        bias = [
            rows["diagnosis.bwd.bias"].mean() if "diagnosis.bwd.bias" in rows else math.nan
            for rows in picked
        ]
        if error[0] > error[1] and bias[0] < FREE * error[0] and bias[1] > FREE * error[1]:
            chosen.append(group)
    return pd.concat(chosen) if chosen else frame.iloc[:0]


def _picked(group: pd.DataFrame, values: Wanted) -> pd.DataFrame:
    for key, value in ({"bwd.feedback.kind": "none"} | values).items():
        group = group[group[key] == value] if key in group else group.iloc[:0]
    return group


def _ticks(limits: tuple[float, float], linear: float) -> tuple[list[float], list[str]]:
    """Plain numbers for an axis that is linear up to `linear` and logarithmic beyond."""
    sizes = [size for size in (0.1, 0.5, 1, 2, 5, 10, 20, 50, 100) if size > linear]
    signed = [sign * size for size in sizes for sign in (-1, 1)]
    ticks = [tick for tick in sorted([*signed, 0]) if limits[0] <= tick <= limits[1]]
    return ticks, [f"{tick:g}" for tick in ticks]


CLAIMS = [f1a, f1b, f1c, f1d, f1e, f1f, f1g, f1h, f1i]


# Figures.


def error_and_harm(frame: pd.DataFrame, _curves: pd.DataFrame) -> Figure | None:
    """The loss of each setting's gradients against dense ones, over the error of their
    messages, by bias.

    Gradients compressed only; points of accuracy or nats, mean over seeds; full marks: bias below a
    quarter of the error, hollow ones: more. A panel a training; bars: ± one sample standard
    deviation. Dotted: a network that learned nothing (guessing, or the frequencies of letters).
    """
    if "diagnosis.bwd.error" not in frame:
        return None
    panels = [
        (name, dense, backward)
        for name, group in _trainings(frame)
        if len(
            dense := group[
                (group[["fwd.compressor.kind", "bwd.compressor.kind"]] == "none").all(axis=1)
            ]
        )
        and len(
            backward := group[
                (group["fwd.compressor.kind"] == "none")
                & (group["bwd.compressor.kind"] != "none")
                & group["diagnosis.bwd.error"].notna()
            ]
        )
    ]
    if not panels:
        return None
    with drawing():
        figure, axes = plt.subplots(
            1, len(panels), figsize=size(min(2, len(panels)), 2.9), squeeze=False
        )
        for axis, (name, dense, backward) in zip(axes[0], panels, strict=True):
            metric, sign, unit = (
                (LOSS, 1.0, "nats") if is_text(backward) else (ON, -100.0, "points")
            )
            for kind, rows in backward.groupby("bwd.compressor.kind", sort=False):
                style = look(labels.label(labels.CROSSING, kind))
                for _, runs in rows.groupby("method", sort=False):
                    error, bias = (
                        runs[f"diagnosis.bwd.{measure}"].mean() for measure in ("error", "bias")
                    )
                    lost = sign * (runs[metric] - dense[metric].mean())
                    free = bias < FREE * error
                    mark = style | {"ls": "none", "ms": 4, "mfc": None if free else "white"}
                    plot(axis, [error], [ends(lost)], **mark)
                name = labels.label(labels.CROSSING, kind)
                axis.errorbar([], [], label=name, **(style | {"ls": "none", "ms": 4}))
            axis.axhline(0, color="0.5", lw=0.8)
            # what a network loses that learned nothing
            ceiling = sign * (nothing_learned(backward) - dense[metric].mean())
            axis.axhline(ceiling, color="0.5", lw=0.8, ls=":", label="nothing learned")
            axis.set(
                title=in_words(name),
                xlabel="relative error of the gradient's message",
                ylabel=f"{unit} lost",
            )
            logarithmic(axis.xaxis)
            worst = sign * (
                backward.groupby("method")[metric].agg("max" if sign > 0 else "min")
                - dense[metric].mean()
            )
            axis.set_yscale("symlog", linthresh=1.0 if unit == "points" else 0.05)
            axis.set_ylim(top=2 * max(worst.max(), 0.1))
            axis.set_yticks(*_ticks(axis.get_ylim(), 1.0 if unit == "points" else 0.05))
        legend(figure)
    return figure


FIGURES: dict[str, Draw] = {"error_and_harm": error_and_harm}
