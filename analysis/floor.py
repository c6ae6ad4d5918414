"""Ours: what is a message worth, and how much of it does a compressor keep? Claims Z1 to Z13.

The worth of a message is what a training loses when nothing travels: the score of the control minus
that of dense. What a setting keeps of it is 100 % for dense, 0 % for nothing, and below 0 % for a
message that does harm. The claims were committed before the runs; margins are nats of test loss and
points of test accuracy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import mean
from typing import Any

import pandas as pd

from commsweep.reporting.claim import DENSE, Claim, Effect, Wanted, combined, weighted
from commsweep.reporting.results import is_text, plain
from commsweep.reporting.style import Draw
from commsweep.reporting.table import ON, Table
from commsweep.reporting.worth import Kept, of_settings

from .bias import LARGE, LOSS
from .ladders import at_best_rates, over

NAME = "floor"
POINT = 1.0
HALF, THIRD, MOST = 0.5, 1 / 3, 0.8


def rows(frame: pd.DataFrame) -> pd.DataFrame:
    """The runs of boundaries in a sweep that has the control."""
    runs = plain(frame)
    kinds = runs[["fwd.compressor.kind", "bwd.compressor.kind"]] if len(runs) else runs
    return runs if len(runs) and (kinds == "zero").any(axis=None) else runs.iloc[:0]


def tables(frame: pd.DataFrame) -> list[Table]:
    """None of its own: what each setting keeps stands in the table of all settings."""
    return []


# Claims.


def _backward(kind: str, feedback: str = "none", **settings: object) -> Wanted:
    return {
        "fwd.compressor.kind": "none",
        "bwd.compressor.kind": kind,
        "bwd.feedback.kind": feedback,
    } | {f"bwd.compressor.{key}": value for key, value in settings.items()}


ZERO, MEAN = _backward("zero"), _backward("mean")
TOP_10 = _backward("topk", ratio=0.1)
TOP_10_EF = _backward("topk", "ef", ratio=0.1)
NEAREST, UNBIASED = (
    _backward("uniform", bits=2, scale="group", rounding=rounding)
    for rounding in ("nearest", "stochastic")
)
EDEN_2 = _backward("eden", bits=2)
RECIPE: Wanted = {
    "fwd.compressor.kind": "topk",
    "fwd.compressor.ratio": 0.2,
    "fwd.compressor.values.kind": "uniform",
    "bwd.compressor.kind": "forward_mask",
    "bwd.compressor.values.kind": "uniform",
}


def _swapped(backward: Wanted) -> Wanted:
    """The arm that does to activations what `backward` does to their gradients."""
    names = {"fwd": "bwd", "bwd": "fwd"}
    return {names[key[:3]] + key[3:]: value for key, value in backward.items()} | {
        "bwd.compressor.kind": "none"
    }


def gain(
    frame: pd.DataFrame, label: str, arms: list[tuple[float, Wanted]], **region: Any
) -> list[Effect]:
    """The weighted sum of scores, in nats or points that are better where they are more; nothing of
    no runs.
    """
    if frame.empty:
        return []
    if is_text(frame):
        negated = [(-factor, values) for factor, values in arms]
        return weighted(frame, label, negated, LOSS, guess=math.log(256), digits=3, **region)
    scaled = [(100 * factor, values) for factor, values in arms]
    return weighted(frame, label, scaled, ON, guess=0.1, **region)


def over_share(
    frame: pd.DataFrame, label: str, arm: Wanted, share: float, **region: float
) -> list[Effect]:
    """Return what an arm gains over nothing, less a share of what dense gains over nothing."""
    label = f"{label}: gain over nothing, less {100 * share:.0f} % of dense's"
    return gain(frame, label, [(1.0, arm), (share - 1.0, ZERO), (-share, DENSE)], **region)


def _models(frame: pd.DataFrame, *names: str) -> pd.DataFrame:
    return frame[frame["model.name"].isin(names)]


def z1(frame: pd.DataFrame) -> Claim:
    """Harm on GPT-2."""
    gpt, arms = _models(frame, "gpt2-nano"), [(1.0, TOP_10), (-1.0, ZERO)]
    return Claim(
        "Z1",
        "On a nano GPT-2, tied and untied, TopK 10 % of activation gradients is worse than sending "
        f"none (by more than {LARGE:g} nats).",
        gain(gpt, "TopK 10 % over nothing", arms, below=-LARGE),
    )


def z2(frame: pd.DataFrame) -> Claim:
    """Unbiased codes."""
    return Claim(
        "Z2",
        "Two unbiased bits of activation gradients keep more than half of what they are worth, in "
        "every architecture.",
        over_share(frame, "2 bits, unbiased", UNBIASED, HALF, above=0.0),
    )


def z3(frame: pd.DataFrame) -> Claim:
    """Error feedback on GPT-2."""
    gpt, arms = _models(frame, "gpt2-nano"), [(1.0, TOP_10_EF), (-1.0, ZERO)]
    return Claim(
        "Z3",
        "On a nano GPT-2 error feedback does not save TopK 10 %: it stays worse than nothing.",
        gain(gpt, "EF + TopK 10 % over nothing", arms, below=0.0),
    )


def z4(frame: pd.DataFrame) -> Claim:
    """The recipe's worth."""
    return Claim(
        "Z4",
        "TopK 20 % in 4 bits forward and its mask in 2 unbiased bits back keep less than a third "
        "of what the gradient's message is worth.",
        over_share(frame, "the recipe", RECIPE, THIRD, below=0.0),
    )


def z5(frame: pd.DataFrame) -> Claim:
    """Images."""
    digits = frame[frame["data.name"] == "digits"]
    effects = over_share(digits, "TopK 10 %", TOP_10, MOST, above=0.0)
    return Claim("Z5", "On digits TopK 10 % keeps more than four fifths.", effects)


def z6(frame: pd.DataFrame) -> Claim:
    """The other control. Of text alone: on digits both controls gave the same scores, seed by seed,
    which decides nothing.
    """
    runs = frame if is_text(frame) else frame.iloc[:0]
    return Claim(
        "Z6",
        f"A running mean of the gradient is worth no more than nothing (within {LARGE:g} nats).",
        gain(runs, "mean over nothing", [(1.0, MEAN), (-1.0, ZERO)], within=LARGE),
    )


def z7(frame: pd.DataFrame) -> Claim:
    """Bias by architecture."""
    gpt, gru = _models(frame, "gpt2-nano"), _models(frame, "gru", "gru-residual", "gru-prenorm")
    label, arms = "2 bits, unbiased over nearest", [(1.0, UNBIASED), (-1.0, NEAREST)]
    effects = gain(gpt, f"{label}, GPT-2", arms, above=0.0)
    effects += gain(gru, f"{label}, GRU", arms, within=LARGE / 2)
    return Claim(
        "Z7",
        f"Without bias is better on GPT-2; between GRU layers it makes no difference (within "
        f"{LARGE / 2:g} nats).",
        effects,
    )


def z8(frame: pd.DataFrame) -> Claim:
    """Return what makes TopK harmful."""
    bare, residual = _models(frame, "gru"), _models(frame, "gru-residual", "gru-prenorm")
    effects = over_share(bare, "TopK 10 %", TOP_10, HALF, above=0.0)
    effects += over_share(residual, "TopK 10 %, residual", TOP_10, HALF, below=0.0)
    return Claim(
        "Z8",
        "Residual streams make TopK of activation gradients costly: it keeps more than half of "
        "their worth between plain GRU layers, and less than half between residual ones.",
        effects,
    )


def _at_own_rates(frame: pd.DataFrame, optimizer: str) -> list[Effect]:
    """TopK 10 % over nothing, each at its best learning rate of those tried."""
    group = frame[(frame["model.name"] == "gpt2-nano") & (frame["optim.kind"] == optimizer)]
    chosen = at_best_rates(group) if len(group) else {}
    nothing = chosen.get("gradients: nothing")
    effects = []
    for arm, scores in chosen.items():
        if "TopK 10 %" in arm:
            label = f"nats lost by {arm} against nothing, each at its own best rate, {optimizer}"
            effects.append(over(label, scores, nothing, above=0.0))
    return effects


def z9(frame: pd.DataFrame) -> Claim:
    """Rates of AdamW."""
    return Claim(
        "Z9",
        "No learning rate saves TopK 10 % with error feedback on a nano GPT-2 with AdamW: at its "
        "best rate it stays worse than nothing sent at the best rate of that.",
        _at_own_rates(frame, "adamw"),
    )


def z10(frame: pd.DataFrame) -> Claim:
    """Rates of SGD."""
    return Claim(
        "Z10",
        "So it is with SGD: TopK 10 % at its best rate is worse than nothing sent at its own.",
        _at_own_rates(frame, "sgd"),
    )


def _of_optimizers(frame: pd.DataFrame, kind: str) -> pd.DataFrame:
    """The runs of an optimizer in a sweep that has two of them."""
    both = frame["optim.kind"].nunique() > 1
    return frame[frame["optim.kind"] == kind] if both else frame.iloc[:0]


def z11(frame: pd.DataFrame) -> Claim:
    """Harm with AdamW at dense's best rate."""
    adamw, arms = _of_optimizers(frame, "adamw"), [(1.0, TOP_10), (-1.0, ZERO)]
    return Claim(
        "Z11",
        "On a nano GPT-2 with AdamW at dense's best rate TopK 10 % of activation gradients is "
        f"worse than sending none (by more than {LARGE:g} nats).",
        gain(adamw, "TopK 10 % over nothing, AdamW", arms, below=-LARGE),
    )


def z12(frame: pd.DataFrame) -> Claim:
    """Harm with Muon."""
    muon, arms = _of_optimizers(frame, "muon"), [(1.0, TOP_10), (-1.0, ZERO)]
    return Claim(
        "Z12",
        f"With Muon TopK 10 % costs little beside sending none (within {LARGE:g} nats).",
        gain(muon, "TopK 10 % over nothing, Muon", arms, within=LARGE),
    )


def z13(frame: pd.DataFrame) -> Claim:
    """Two EDEN bits with both optimizers."""
    effects = []
    for kind in ("adamw", "muon"):
        runs = _of_optimizers(frame, kind)
        effects += over_share(runs, f"EDEN 2 bits, {kind}", EDEN_2, HALF, above=0.0)
    return Claim(
        "Z13",
        "Two EDEN bits of activation gradients keep more than half of their worth with either "
        "optimizer.",
        effects,
    )


def _finetuned(frame: pd.DataFrame) -> pd.DataFrame:
    """The runs that fine-tune a pretrained model, in a sweep that has the untouched one."""
    if "model.weights" not in frame:
        return frame.iloc[:0]
    runs = frame[frame["model.weights"].fillna("") != ""]
    return runs if (runs["optim.lr"] == 0).any() else runs.iloc[:0]


def z14(frame: pd.DataFrame) -> Claim:
    """Gradients of a fine-tuning."""
    runs, effects = _finetuned(frame), []
    arms = (("TopK 10 %", TOP_10), ("2 bits, unbiased", UNBIASED), ("EDEN 2 bits", EDEN_2))
    for label, arm in arms:
        effects += over_share(runs, f"{label}, fine-tuning", arm, HALF, above=0.0)
    return Claim(
        "Z14",
        "Fine-tuning SmolLM2-135M, TopK 10 %, two unbiased bits and two EDEN bits of activation "
        "gradients each keep more than half of what they are worth.",
        effects,
    )


def z15(frame: pd.DataFrame) -> Claim:
    """Activations of a fine-tuning beside the untouched model."""
    runs, effects = _finetuned(frame), []
    untouched = runs[(runs["optim.lr"] == 0) & (runs.status == "finished")]
    for label, backward in (
        ("TopK 10 %", TOP_10),
        ("EF + TopK 10 %", TOP_10_EF),
        ("2 bits, unbiased", UNBIASED),
        ("EDEN 2 bits", EDEN_2),
    ):
        for arm in gain(runs, label, [(-1.0, _swapped(backward))], above=0.0):
            losses = dict(zip(arm.by, arm.values, strict=True))
            floor = dict.fromkeys(losses, float(untouched[LOSS].mean()))
            effects.append(
                combined(
                    f"nats above the untouched model, activations by {label}",
                    [(1.0, losses), (-1.0, floor)],
                    ids=[*arm.ids, *untouched.id],
                    digits=3,
                    above=0.0,
                )
            )
    return Claim(
        "Z15",
        "Fine-tuning SmolLM2-135M with TopK 10 % (with or without error feedback), two unbiased "
        "bits or two EDEN bits of activations ends worse than the untouched model.",
        effects,
    )


def _warm(
    frame: pd.DataFrame, label: str, within: float | None, below: float | None
) -> list[Effect]:
    """TopK 10 % over nothing, both from the same step on."""
    if "bwd.start_step" not in frame:
        return []
    starts, effects = frame["bwd.start_step"].dropna().unique(), []
    for start in sorted(starts):
        arms = [(1.0, TOP_10 | {"bwd.start_step": start}), (-1.0, ZERO | {"bwd.start_step": start})]
        effects += gain(frame, f"{label} from step {start:g} on", arms, within=within, below=below)
    return effects


def z16(frame: pd.DataFrame) -> Claim:
    """A dense start with AdamW."""
    runs = _of_optimizers(frame, "adamw")
    return Claim(
        "Z16",
        "With AdamW a dense start does not save TopK 10 % of activation gradients: from the middle "
        f"of a training on it is worse than sending none (by more than {LARGE:g} nats).",
        _warm(runs, "TopK 10 % over nothing, AdamW,", None, -LARGE),
    )


def z17(frame: pd.DataFrame) -> Claim:
    """A dense start with Muon."""
    runs = _of_optimizers(frame, "muon")
    return Claim(
        "Z17",
        f"With Muon TopK 10 % from the middle of a training on costs little (within {LARGE:g} "
        "nats) beside sending none.",
        _warm(runs, "TopK 10 % over nothing, Muon,", LARGE, None),
    )


# When each claim was written down, and the commit that first held it.
REGISTERED = {f"Z{number}": ("2026-11-27T14:02:54+00:00", "bacd491") for number in range(1, 9)}
REGISTERED |= {f"Z{number}": ("2026-11-27T16:37:21+00:00", "d17cb4c") for number in (9, 10)}
REGISTERED |= {f"Z{number}": ("2026-11-29T11:33:38+00:00", "f8ba22d") for number in (11, 12, 13)}
REGISTERED |= {f"Z{number}": ("2026-11-29T13:30:52+00:00", "c0dbe21") for number in range(14, 18)}
CLAIMS = [z1, z2, z3, z4, z5, z6, z7, z8, z9, z10, z11, z12, z13, z14, z15, z16, z17]


# Figures.

SHOWN = (-260, 260)  # percent, at most; what lies farther is drawn at the edge
TRAININGS = {
    "gpt2-nano": "GPT-2",
    "gpt2-nano untied": "GPT-2, untied head",
    "gru": "GRU",
    "gru-residual": "GRU, residual",
    "gru-prenorm": "GRU, residual and norm",
    "resnet_small": "ResNet",
}


def _arms(frame: pd.DataFrame) -> dict[str, dict[str, Kept]]:
    """Return what each arm keeps, by arm and training; those that compress gradients of
    activations.
    """
    keeps, arms = of_settings(frame), {}
    first = frame.drop_duplicates("setting_id")
    for row in first[first["fwd.compressor.kind"] == "none"].to_dict("records"):
        arm = row["method"].partition(" (")[0].removeprefix("gradients: ")
        share = keeps.get(row["setting_id"])
        if share is None or not share.tells or arm in ("dense", "nothing"):
            continue
        untied = " untied" if row.get("model.tied") is False else ""
        training: str = TRAININGS.get(row["model.name"] + untied) or row["model.name"] + untied
        if first["optim.kind"].nunique() > 1:
            training += f", {row['optim.kind']}"
        arms.setdefault(arm, {})[training] = share
    return arms


def _middle(shares: Iterable[Kept]) -> float:
    """The mean share of those that rank; the lowest of all where none does."""
    percents = [share.percent for share in shares if share.ranks]
    return mean(percents) if percents else -math.inf


FIGURES: dict[str, Draw] = {}  # the report draws worth_kept
