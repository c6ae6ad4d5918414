"""The power of a sweep's claims, written down before its runs: margin, direction, planned
and needed seeds.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import pandas as pd

from commsweep.reporting.claim import Claim, Effect
from commsweep.reporting.report_parts import all_claims
from commsweep.reporting.results import base
from commsweep.reporting.statistics import LEVEL, MOST, POWER, pooled_sd, seeds_needed

SCORES = tuple(f"test_{mode}_{name}" for mode in ("on", "off") for name in ("acc", "loss", "ppl"))


def planned(frame: pd.DataFrame, papers: Collection[str] = ()) -> list[Claim]:
    """The claims of these cells as if all had run; their effects hold as many values, all zero, as
    there will be.
    """
    text = (
        frame["data.tokenizer"].notna()
        if "data.tokenizer" in frame
        else pd.Series(False, frame.index)
    )
    columns = {
        name: 0.0
        if name.endswith("loss")
        else pd.Series(0.0, frame.index).where(text if name.endswith("ppl") else ~text)
        for name in SCORES
    }
    return all_claims(frame.assign(status="finished", **columns), papers)


def spread(frame: pd.DataFrame, metric: str) -> tuple[float, int]:
    """(standard deviation over seeds of the recorded dense runs, pooled over trainings, how many
    runs that rests on); (nan, 0) where no training has two.
    """
    kinds = [f"{side}.compressor.kind" for side in ("fwd", "bwd", "grad")]
    dense = frame[(frame.status == "finished") & (frame[kinds] == "none").all(axis=1)]
    if dense.empty or metric not in dense:
        return math.nan, 0
    groups = [
        scores
        for _, scores in dense.assign(base=base(dense, "fwd.", "bwd."))[["base", metric]].groupby(
            "base"
        )
    ]
    several = [group[metric].dropna() for group in groups if group[metric].count() > 1]
    return pooled_sd([list(group) for group in several]), sum(map(len, several))


def markdown(frame: pd.DataFrame, papers: Collection[str] = ()) -> str:
    """The claims of these cells with what their planned seeds can decide; `frame`: recorded and
    missing ones.
    """
    claims = planned(frame, papers)
    tests = max(1, sum(bool(effect.values) for claim in claims for effect in claim.effects))
    spreads = {
        unit: spread(frame, metric)
        for unit, metric in (("points", "test_on_acc"), ("nats", "test_on_loss"))
    }
    lines = [
        f"{tests} effects are tested together at {100 * LEVEL:g} % (Holm), by one look at all of "
        f"their seeds. Seeds needed: for a power of {100 * POWER:g} % to decide an effect that "
        "lies one margin from the edge, by the spread "
        "of the dense runs over seeds, as if both sides of a pair were independent."
    ]
    for unit, (sd, n) in spreads.items():
        if n:
            lines.append(
                f"Spread of {n} dense runs: {100 * sd if unit == 'points' else sd:.2g} {unit}."
            )
    lines.append("")
    for claim in claims:
        lines.append(f"- **{claim.name}.** {claim.statement}")
        lines += [f"  - {_line(effect, spreads, tests)}" for effect in claim.effects]
    return "\n".join(lines) + "\n"


def _line(effect: Effect, spreads: dict[str, tuple[float, int]], tests: int) -> str:
    sentence = f"{effect.what} (claimed {effect.region.text()}): {len(effect.values)} seeds planned"
    sd, n = spreads["points" if effect.digits == 1 else "nats"]
    if not n:
        return f"{sentence}; needed: unknown, fewer than two dense runs are recorded"
    if not effect.region.supposed:
        return f"{sentence}; needed: open, the margin is zero"
    seeds_wanted = seeds_needed(
        effect.region.supposed,
        math.sqrt(2) * sd * (100 if effect.digits == 1 else 1),
        LEVEL / tests,
    )
    return f"{sentence}; needed: {seeds_wanted or f'more than {MOST}'}"
