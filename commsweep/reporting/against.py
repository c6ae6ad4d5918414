"""Every setting of a sweep beside one of them, as a claim whose effects are judged together."""

from __future__ import annotations

import pandas as pd

from commsweep.errors import UserError, nearest
from commsweep.reporting.claim import Claim, Effect, paired
from commsweep.reporting.results import base, nothing_learned, score_and_sign
from commsweep.reporting.statistics import grid_of
from commsweep.reporting.tidy import tidy

NAME = "against"


def claim(frame: pd.DataFrame, reference: str) -> Claim:
    """The claim that each setting ends better than the reference, an effect a setting and training.

    frame: the rows of a sweep. reference: a codec in words, "bwd=eden:2", "eden:2" where one side
    alone has it, "dense", or the name of a setting in the tables. Pairs are runs of one seed that
    differ in their codecs alone. Raises UserError where no setting, or several of one training, is
    the reference.
    """
    rows = tidy(frame[frame.status.isin(["finished", "diverged"])].copy())
    text = rows.get("data.tokenizer")
    if text is not None and text.notna().nunique() > 1:
        raise UserError(
            "--against: the sweep has images and text, whose scores have different units; report "
            "on one of both"
        )
    words = rows.codec.map(lambda codec: codec.partition("=")[2] if " " not in codec else "")
    chosen = (rows.codec == reference) | (words == reference) | (rows.method == reference)
    codecs = sorted(set(rows.codec[chosen]))
    if not codecs:
        names = sorted(set(rows.codec))
        raise UserError(
            f"--against {reference}: no setting of the sweep is that{nearest(reference, names)} "
            f"(it has: {', '.join(names)})"
        )
    if len(codecs) > 1:
        raise UserError(f"--against {reference}: say which: {' or '.join(map(repr, codecs))}")
    metric, _ = score_and_sign(rows)
    is_accuracy = metric.endswith("acc")
    score = rows[metric].where(rows.status == "finished", nothing_learned(rows))
    arms = pd.DataFrame(
        {
            "id": rows.id,
            "seed": rows.seed,
            "base": base(rows, "fwd.", "bwd.", "grad.compressor.", "grad.feedback."),
            "kind": "none",
            "diverged": rows.status == "diverged",
            "score": score if is_accuracy else -score,
            "grid": grid_of(rows[metric].dropna()),
        }
    )
    effects: list[Effect] = []
    for codec, group in rows[~chosen].groupby("codec", sort=False):
        effects += paired(
            rows,
            f"{codec} over {codecs[0]}",
            arms.loc[group.index],
            arms[chosen],
            above=0.0,
            unit=100.0 if is_accuracy else 1.0,
        )
    better = "accuracy is higher" if is_accuracy else "loss is lower"
    return Claim(
        NAME,
        f"Each setting ends better than {codecs[0]}: its {better}.",
        [effect for effect in effects if effect.values or effect.lost],
        source="",
        registrable=False,
    )
