"""arXiv 2401.07788, the image section: TopK, bits, error feedback, AQ-SGD, each with inference
compressed and dense; claims C1 to C6.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from commsweep.reporting.claim import DENSE, SLIGHT, Claim, Effect, Wanted, contrast, difference
from commsweep.reporting.results import base, distinct, plain
from commsweep.reporting.style import Draw, drawing, ends, legend, look, plot, plt, size
from commsweep.reporting.table import BYTES, OFF, ON, SHARE, Cell, Table, cell
from commsweep.reporting.words import in_words

NAME = "images"
SOURCE = "arXiv 2401.07788"
SEVERE = 2.0  # points of accuracy


def rows(frame: pd.DataFrame) -> pd.DataFrame:
    """The runs that it speaks of: one learner, images."""
    rows = plain(frame)
    return rows[rows["data.tokenizer"].isna()] if "data.tokenizer" in rows else rows


# Tables.


def tables(frame: pd.DataFrame) -> list[Table]:
    """Every table of the paper's image section that the rows name cells for."""
    tables = [topk(frame), *quantization(frame), feedback(frame), aqsgd(frame)]
    return [table for table in tables if len(table.rows)]


def topk(frame: pd.DataFrame) -> Table:
    """TopK at each level, inference with and without compression."""
    table = _listing("topk", "TopK both ways: test accuracy (%) of the last epoch", ["K"])
    plain = frame[with_feedback(frame, "none", "none")]
    for label, rows in [*distinct(plain[kinds(plain, "none", "none")], "dense"), *levels(plain)]:
        if len(rows):
            table.rows.append([label, *_scores(rows)])
    return table if len(table.rows) > 1 else _listing("topk", "", [])


def feedback(frame: pd.DataFrame) -> Table:
    """TopK with EF, EF-mixed and EF21 beside plain TopK at the same levels."""
    table = _listing(
        "feedback",
        "TopK with error feedback: test accuracy (%) of the last epoch",
        ["Feedback", "K"],
    )
    names = {"ef": "EF", "ef_mixed": "EF-mixed", "ef21": "EF21"}
    corrected = {kind: dict(levels(frame[with_feedback(frame, kind, kind)])) for kind in names}
    present = {label.split(" (")[0] for by_level in corrected.values() for label in by_level}
    plain = {
        label: rows
        for label, rows in levels(frame[with_feedback(frame, "none", "none")])
        if label.split(" (")[0] in present
    }
    for name, by_level in [("none", plain), *((names[kind], corrected[kind]) for kind in names)]:
        table.rows += [[name, label, *_scores(rows)] for label, rows in by_level.items()]
    return table if present else _listing("feedback", "", [])


def aqsgd(frame: pd.DataFrame) -> Table:
    """AQ-SGD with TopK, by augmentation arm."""
    table = _listing(
        "aqsgd",
        "AQ-SGD with TopK (activations): test accuracy (%) of the last epoch",
        ["Augmentation", "K"],
    )
    rows = frame[with_feedback(frame, "aqsgd", "none")]
    for (augment, fixed), arm in rows.groupby(["data.augment", "data.fixed_augment"]):
        name = (
            augment
            if augment == "none"
            else f"{augment}, {'fixed per sample' if fixed else 'new each epoch'}"
        )
        table.rows += [[name, label, *_scores(level)] for label, level in levels(arm)]
    return table


def quantization(frame: pd.DataFrame) -> list[Table]:
    """Bit-width grids, one a scale and inference mode: forward bits down, backward bits across."""
    tables = []
    sides = [
        f"{side}.compressor.{key}" for side in ("fwd", "bwd") for key in ("kind", "bits", "scale")
    ]
    if not set(sides) <= set(frame.columns):
        return []
    plain = frame[with_feedback(frame, "none", "none")]
    sides = plain[["fwd.compressor.kind", "bwd.compressor.kind"]]
    plain = plain[sides.isin(["uniform", "none"]).all(axis=1)]
    either = plain[(sides.loc[plain.index] == "uniform").any(axis=1)]
    dense = plain.drop(either.index)
    scale = either["fwd.compressor.scale"].fillna(either["bwd.compressor.scale"])
    for name, rows in either.groupby(scale):
        for index, (_, group) in enumerate(rows.groupby(_other_settings(rows), sort=False)):
            pool = pd.concat([group, dense])
            pool = pool[_other_settings(pool).isin(_other_settings(group))]
            grids = [
                _bit_grid(
                    group,
                    pool,
                    f"{name}{_distinguished(group) if index else ''}",
                    f"{name}{index + 1 if index else ''}",
                    metric,
                    mode,
                )
                for metric, mode in ((ON, "on"), (OFF, "off"))
            ]
            tables += [grid for grid in grids if len(grid.rows) > 1 or len(grid.header) > 3]
    return tables


USUAL = {"rounding": "nearest", "group": 128.0}  # of codes, and of runs that have none


def _distinguished(rows: pd.DataFrame) -> str:
    """Return what a grid's runs have that is not plain, in brackets."""
    texts = []
    for side in ("fwd", "bwd"):
        coded = rows[rows[f"{side}.compressor.kind"] != "none"]
        grouped = (coded[f"{side}.compressor.scale"] == "group").any()
        for key, text in (("rounding", "{}"), ("group", "groups of {:g}")):
            column = f"{side}.compressor.{key}"
            texts += [
                text.format(value)
                for value in (coded[column].dropna().unique() if column in coded else ())
                if value != USUAL[key] and (key != "group" or grouped)
            ]
    suffix = rows.method.iloc[0].partition(" (")[2].rstrip(")")
    return f" ({', '.join(dict.fromkeys([*texts, *([suffix] if suffix else [])])) or 'otherwise'})"


def _other_settings(rows: pd.DataFrame) -> pd.Series:
    """Return what a grid of bits holds equal: all but the bits and whether a side is compressed;
    scales have one rounding.
    """
    columns = [
        rows[f"{side}.compressor.{key}"].fillna(usual).astype(str)
        if f"{side}.compressor.{key}" in rows
        else pd.Series(str(usual), index=rows.index)
        for side in ("fwd", "bwd")
        for key, usual in USUAL.items()
    ]
    return sum(
        (column + "|" for column in columns),
        base(rows, "fwd.compressor.", "bwd.compressor.") + "|",
    )


def _bit_grid(
    rows: pd.DataFrame, pool: pd.DataFrame, scale: str, name: str, metric: str, mode: str
) -> Table:
    fwd, bwd = (
        sorted(rows[f"{side}.compressor.bits"].dropna().unique(), reverse=True)
        for side in ("fwd", "bwd")
    )
    title = (
        f"Min-max quantization, scale per {scale}, inference with compression {mode}: test "
        "accuracy (%)"
    )
    table = Table(
        f"quantization_{name}_{mode}",
        title,
        ["fwd \\ bwd", "dense", *(f"{bits:g} bit" for bits in bwd)],
    )
    for down in [None, *fwd]:
        line = [_pick(_pick(pool, "fwd", down), "bwd", across) for across in [None, *bwd]]
        table.rows.append(
            [
                "dense" if down is None else f"{down:g} bit",
                *(cell(piece, metric) if len(piece) else "" for piece in line),
            ]
        )
    return table


def _pick(rows: pd.DataFrame, side: str, bits: float | None) -> pd.DataFrame:
    if bits is None:
        return rows[rows[f"{side}.compressor.kind"] == "none"]
    return rows[rows[f"{side}.compressor.bits"] == bits]


def _listing(name: str, title: str, labels: list[str]) -> Table:
    columns = [
        "compressed inference",
        "dense inference",
        "seeds",
        "fwd bytes/step",
        "bwd bytes/step",
    ]
    return Table(name, title, [*labels, *columns, "bytes (% of dense)"])


def _scores(rows: pd.DataFrame) -> list[Cell | str]:
    n = int((rows.status == "finished").sum())
    sent = [cell(rows, f"bytes.{side}_per_step", BYTES) for side in ("fwd", "bwd")]
    return [cell(rows, ON), cell(rows, OFF), str(n), *sent, cell(rows, "bytes.ratio", SHARE)]


def with_feedback(frame: pd.DataFrame, fwd: str, bwd: str) -> pd.Series:
    """Return which rows have these feedbacks."""
    return (frame["fwd.feedback.kind"] == fwd) & (frame["bwd.feedback.kind"] == bwd)


def kinds(frame: pd.DataFrame, fwd: str, bwd: str) -> pd.Series:
    """Return which rows have these compressors."""
    return (frame["fwd.compressor.kind"] == fwd) & (frame["bwd.compressor.kind"] == bwd)


def levels(frame: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Runs with TopK at the same level both ways, by level, mildest first."""
    if "fwd.compressor.ratio" not in frame or "bwd.compressor.ratio" not in frame:
        return []
    both = frame[
        frame["fwd.compressor.kind"].isin(["topk", "topk_strict"])
        & (frame["fwd.compressor.kind"] == frame["bwd.compressor.kind"])
        & (frame["fwd.compressor.ratio"] == frame["bwd.compressor.ratio"])
    ]
    groups = both.groupby("fwd.compressor.ratio")
    return [
        level
        for ratio in sorted(groups.groups, reverse=True)
        for level in distinct(groups.get_group(ratio), f"{100 * ratio:g} %")
    ]


# Claims.


def c1(frame: pd.DataFrame, scale: str = "tensor") -> list[Claim]:
    """Same bits on activations only against gradients only, one range for the whole batch; a
    verdict for each width.
    """
    widths = {
        bits
        for side in ("fwd", "bwd")
        if (column := f"{side}.compressor.bits") in frame
        for bits in frame[column].dropna()
    }

    def arm(side: str, opposite: str, bits: float) -> Wanted:
        return {
            f"{side}.compressor.kind": "uniform",
            f"{side}.compressor.scale": scale,
            f"{side}.compressor.bits": bits,
            f"{opposite}.compressor.kind": "none",
        }

    name, ending = (
        ("C1", "(min-max, batch-wide range)")
        if scale == "tensor"
        else ("C1-group", "even with a scale per group of 128 (ours: does C1 survive?)")
    )
    return [
        Claim(
            f"{name}, {bits:g} bit",
            f"Gradients need milder compression than activations {ending}.",
            difference(
                frame,
                f"accuracy, activations only minus gradients only, bits {bits:g}",
                (arm("fwd", "bwd", bits), ON),
                (arm("bwd", "fwd", bits), ON),
                above=SLIGHT,
            ),
            source=None if scale == "tensor" else "",
        )
        for bits in sorted(widths)
    ]


def c1_group(frame: pd.DataFrame) -> list[Claim]:
    """C1 where every 128 elements have a range of their own."""
    return c1(frame, scale="group")


def c2(frame: pd.DataFrame) -> Claim:
    """10 % harms little, the next stronger level a lot."""

    def harm(ratio: float, **region: Any) -> list[Effect]:
        return difference(
            frame,
            f"accuracy, dense minus TopK {100 * ratio:g} %",
            (DENSE, ON),
            (_topk(ratio), ON),
            **region,
        )

    return Claim(
        "C2",
        f"K = 10 % is the strongest TopK without severe harm (severe: {SEVERE:g} points).",
        harm(0.1, below=SEVERE) + harm(0.05, above=SEVERE),
    )


def c3(frame: pd.DataFrame) -> Claim:
    """TopK models need compression at inference."""
    effects = [
        effect
        for ratio in (0.1, 0.05)
        for effect in difference(
            frame,
            f"TopK {100 * ratio:g} %: accuracy, compression on minus off at inference",
            (_topk(ratio), ON),
            (_topk(ratio), OFF),
            above=SLIGHT,
        )
    ]
    return Claim(
        "C3",
        "Models trained with TopK perform well only with compression on at inference.",
        effects,
    )


def c4(frame: pd.DataFrame) -> Claim:
    """Quantization, too, becomes a part of the model."""
    both = {
        f"{side}.compressor.{key}": value
        for side in ("fwd", "bwd")
        for key, value in (("kind", "uniform"), ("scale", "tensor"))
    }
    two = both | {"fwd.compressor.bits": 2, "bwd.compressor.bits": 8}
    effects = difference(
        frame,
        "2-bit activations: accuracy, compression on minus off at inference",
        (two, ON),
        (two, OFF),
        above=SLIGHT,
    )
    return Claim("C4", "Turning quantization off at inference also lowers quality.", effects)


def c5(frame: pd.DataFrame) -> Claim:
    """Feedback does not help training but makes inference without compression almost lossless."""
    effects = []
    for kind, name in (("ef", "EF"), ("ef21", "EF21")):
        arm = _topk(0.1, kind)
        effects += difference(
            frame,
            f"{name} + TopK 10 % minus plain, compressed inference",
            (arm, ON),
            (_topk(0.1), ON),
            below=SLIGHT,
        )
        effects += difference(
            frame,
            f"dense minus {name} + TopK 10 %, dense inference",
            (DENSE, OFF),
            (arm, OFF),
            below=SEVERE,
        )
    return Claim(
        "C5",
        "EF and EF21 do not improve training over plain TopK, but make inference without "
        f"compression almost lossless (within {SEVERE:g} points).",
        effects,
    )


def c6(frame: pd.DataFrame) -> Claim:
    """AQ-SGD bears TopK 30 % but nothing stronger. Dense inference: a sample's first visit travels
    dense.
    """

    def harm(ratio: float, **region: Any) -> list[Effect]:
        arm = _topk(ratio, "aqsgd", "none")
        return difference(
            frame,
            f"dense minus AQ-SGD + TopK {100 * ratio:g} %, dense inference",
            (DENSE, OFF),
            (arm, OFF),
            **region,
        )

    return Claim(
        "C6",
        f"TopK stronger than 30 % under AQ-SGD worsens the model significantly ({SEVERE:g} "
        "points).",
        harm(0.3, below=SEVERE) + harm(0.1, above=SEVERE),
    )


def f2(frame: pd.DataFrame) -> Claim:
    """Ours: AQ-SGD's trouble with TopK is that a sample looks different at every visit."""
    effects = []
    for ratio in (0.3, 0.1):
        by_augment = {
            fixed: difference(
                group, "", (DENSE, OFF), (_topk(ratio, "aqsgd", "none"), OFF), above=0.0
            )
            for fixed, group in frame.groupby("data.fixed_augment")
        }
        if {True, False} <= by_augment.keys() and all(
            len(effect) == 1 and effect[0].ids for effect in by_augment.values()
        ):
            effects.append(
                contrast(
                    f"points lost by AQ-SGD + TopK {100 * ratio:g} %, new minus fixed augmentation",
                    by_augment[False][0],
                    by_augment[True][0],
                    above=SLIGHT,
                )
            )
    return Claim(
        "F2",
        "AQ-SGD with TopK fails because augmentation changes a sample's activations: with each "
        "sample's augmentation fixed it loses less (ours).",
        effects,
        source="",
    )


CLAIMS: list[Callable[[pd.DataFrame], Claim | list[Claim]]] = [c1, c1_group, c2, c3, c4, c5, c6, f2]


def _topk(ratio: float, fwd: str = "none", bwd: str | None = None) -> Wanted:
    arm: Wanted = {
        f"{side}.compressor.{key}": value
        for side in ("fwd", "bwd")
        for key, value in (("kind", ("topk", "topk_strict")), ("ratio", ratio))
    }
    return arm | {"fwd.feedback.kind": fwd, "bwd.feedback.kind": fwd if bwd is None else bwd}


# Figures.


def on_off(frame: pd.DataFrame, _curves: pd.DataFrame) -> Figure | None:
    """TopK and its feedbacks: accuracy with compression on and off at inference, joined by a line.

    Bars: 95 % intervals over seeds.
    """
    both = summary(frame, ON).merge(summary(frame, OFF), on="method", suffixes=("_on", "_off"))
    both = both[~both.family_on.str.startswith("min-max")].iloc[::-1]
    if both.empty:
        return None
    wide = 2 if both.method.str.len().max() > 24 else 1
    with drawing():
        figure, axis = plt.subplots(figsize=size(wide, 1.0 + 0.17 * len(both)))
        height = range(len(both))
        axis.hlines(height, 100 * both.mean_on, 100 * both.mean_off, color="0.7", lw=1, zorder=1)
        for side, label in (("on", "compressed inference"), ("off", "dense inference")):
            means = [ends(100 * np.array(values)) for values in both[f"values_{side}"]]
            style = look(label, ls="none")
            plot(axis, list(height), means, label, sideways=True, **style)
        axis.set_yticks(list(height), [in_words(method) for method in both.method])
        axis.set(xlabel="test accuracy (%)")
        legend(figure)
    return figure


def summary(frame: pd.DataFrame, metric: str = ON) -> pd.DataFrame:
    """Mean, spread, n and bytes of every finished setting; `family` is its method without the
    level.
    """
    done = frame[frame.status == "finished"]
    if metric not in done:
        return pd.DataFrame(columns=["method", "mean", "sd", "n", "bytes.ratio", "family"])
    out = (
        done[done[metric].notna()]
        .groupby("method", sort=False)
        .agg(
            mean=(metric, "mean"),
            sd=(metric, "std"),
            values=(metric, list),
            n=(metric, "size"),
            **{"bytes.ratio": ("bytes.ratio", "mean")},
        )
    )
    return out.reset_index().assign(family=lambda entry: entry.method.map(family))


def family(method: str) -> str:
    """The method without its level."""
    method = method.partition(" (")[0]
    if "min-max" in method:
        return "min-max, group scale" if "group" in method else "min-max"
    activations = method.split(" / ")[0]
    return (
        activations.split(" + ")[0] + " + TopK"
        if " + " in activations
        else activations.split(" ")[0]
    )


FIGURES: dict[str, Draw] = {"on_off": on_off}
