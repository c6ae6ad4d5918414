"""Findings of arXiv 2401.07788 as tests over rows: effect, 95 % interval, n, verdict.

An effect is a difference of test accuracies in points (of losses in nats: analysis/text.py), paired by
seed (levels averaged within a seed first), with Student's t interval. A claim says where the effect lies;
it is supported when the whole interval lies there, contradicted when none of it does, and otherwise there
are not enough runs. A diverged run counts as guessing: it did happen, and dropping it would flatter. What
the papers call "severe" or "almost lossless" is not defined there; the margins here are ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import pandas as pd
from scipy.special import stdtrit

from commsweep.analysis.results import CHANCE
from commsweep.analysis.tables import OFF, ON

SEVERE = 2.0  # points of accuracy
SLIGHT = 1.0
MIN_SEEDS = 3
SUPPORTED, CONTRADICTED, NOT_ENOUGH = "supported", "contradicted", "not enough runs"
Wanted = dict[str, object]


@dataclass
class Effect:
    """One paired difference and where the claim wants it."""

    what: str
    above: float | None  # claim: effect > above
    below: float | None  # claim: effect < below
    values: list[float] = field(default_factory=list)  # one a seed, points of accuracy or nats of loss
    ids: list[str] = field(default_factory=list)
    digits: int = 1

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % t interval of the mean; None below two seeds. (`stdtrit` is Student's quantile; scipy.stats, which
        wraps it, takes seconds to import.)"""
        n = len(self.values)
        if n < 2:
            return None
        series = pd.Series(self.values)
        half = float(stdtrit(n - 1, 0.975)) * series.std() / math.sqrt(n)
        return series.mean() - half, series.mean() + half

    @property
    def verdict(self) -> str:
        """Whether the interval lies inside the claimed region, outside, or across its edge."""
        if len(self.values) < MIN_SEEDS:
            return NOT_ENOUGH
        lo, hi = self.interval
        if self.above is not None:
            return SUPPORTED if lo > self.above else CONTRADICTED if hi <= self.above else NOT_ENOUGH
        return SUPPORTED if hi < self.below else CONTRADICTED if lo >= self.below else NOT_ENOUGH

    def text(self) -> str:
        """The effect for people."""
        region = f"> {self.above:g}" if self.above is not None else f"< {self.below:g}"
        if not self.values:
            return f"{self.what} (claimed {region}): no runs"
        mean = sum(self.values) / len(self.values)
        digits = self.digits
        lo, hi = self.interval or (mean, mean)
        spread = f"[{lo:+.{digits}f}, {hi:+.{digits}f}]" if self.interval else "no interval"
        return f"{self.what} (claimed {region}): {mean:+.{digits}f} {spread}, n={len(self.values)}"


@dataclass
class Claim:
    """A finding with the effects it stands on; it holds when all of them do."""

    name: str
    statement: str
    effects: list[Effect]

    @property
    def verdict(self) -> str:
        """contradicted if any effect is, supported if all are."""
        verdicts = {effect.verdict for effect in self.effects}
        return CONTRADICTED if CONTRADICTED in verdicts else NOT_ENOUGH if NOT_ENOUGH in verdicts else SUPPORTED

    def record(self) -> dict:
        """For JSON."""
        effects = [asdict(e) | {"interval": e.interval, "verdict": e.verdict} for e in self.effects]
        return {"claim": self.name, "statement": self.statement, "verdict": self.verdict, "effects": effects}


def c1(frame: pd.DataFrame, scale: str = "tensor") -> Claim:
    """Same bits on activations only against gradients only, one range for the whole batch."""
    arms = [{f"{side}.compressor.kind": "uniform", f"{side}.compressor.scale": scale,
             f"{other}.compressor.kind": "none"} for side, other in (("fwd", "bwd"), ("bwd", "fwd"))]
    effect = difference(frame, "accuracy, activations only minus gradients only, equal bits",
                        (arms[0], ON), (arms[1], ON), levels=("bits",), above=SLIGHT)
    return Claim("C1", "Gradients need milder compression than activations (min-max, batch-wide range).", [effect])


def c1_group(frame: pd.DataFrame) -> Claim:
    """C1 where every 128 elements have a range of their own."""
    claim = c1(frame, scale="group")
    return Claim("C1-group", "Gradients need milder compression than activations even with a scale per group of 128 "
                 "(ours: does C1 survive?).", claim.effects)


def c2(frame: pd.DataFrame) -> Claim:
    """10 % harms little, the next stronger level a lot."""
    def harm(ratio: float, **region: float) -> Effect:
        return difference(frame, f"accuracy, dense minus TopK {100 * ratio:g} %", (DENSE, ON), (_topk(ratio), ON),
                          **region)
    return Claim("C2", f"K = 10 % is the strongest TopK without severe harm (severe: {SEVERE:g} points).",
                 [harm(0.1, below=SEVERE), harm(0.05, above=SEVERE)])


def c3(frame: pd.DataFrame) -> Claim:
    """TopK models need compression at inference."""
    effects = [difference(frame, f"TopK {100 * ratio:g} %: accuracy, compression on minus off at inference",
                          (_topk(ratio), ON), (_topk(ratio), OFF), above=SLIGHT) for ratio in (0.1, 0.05)]
    return Claim("C3", "Models trained with TopK perform well only with compression on at inference.", effects)


def c4(frame: pd.DataFrame) -> Claim:
    """Quantization, too, becomes a part of the model."""
    both = {f"{side}.compressor.{key}": value for side in ("fwd", "bwd")
            for key, value in (("kind", "uniform"), ("scale", "tensor"))}
    two = both | {"fwd.compressor.bits": 2, "bwd.compressor.bits": 8}
    effect = difference(frame, "2-bit activations: accuracy, compression on minus off at inference",
                        (two, ON), (two, OFF), above=SLIGHT)
    return Claim("C4", "Turning quantization off at inference also lowers quality.", [effect])


def c5(frame: pd.DataFrame) -> Claim:
    """Feedback does not help training but makes inference without compression almost lossless."""
    effects = []
    for kind, name in (("ef", "EF"), ("ef21", "EF21")):
        arm = _topk(0.1, kind)
        effects.append(difference(frame, f"{name} + TopK 10 % minus plain, compressed inference",
                                  (arm, ON), (_topk(0.1), ON), below=SLIGHT))
        effects.append(difference(frame, f"dense minus {name} + TopK 10 %, dense inference",
                                  (DENSE, OFF), (arm, OFF), below=SEVERE))
    return Claim("C5", "EF and EF21 do not improve training over plain TopK, but make inference without compression "
                 f"almost lossless (within {SEVERE:g} points).", effects)


def c6(frame: pd.DataFrame) -> Claim:
    """AQ-SGD bears TopK 30 % but nothing stronger. Dense inference: a sample's first visit travels dense."""
    def harm(ratio: float, **region: float) -> Effect:
        arm = _topk(ratio, "aqsgd", "none")
        return difference(frame, f"dense minus AQ-SGD + TopK {100 * ratio:g} %, dense inference",
                          (DENSE, OFF), (arm, OFF), **region)
    return Claim("C6", f"TopK stronger than 30 % under AQ-SGD worsens the model significantly ({SEVERE:g} points).",
                 [harm(0.3, below=SEVERE), harm(0.1, above=SEVERE)])


CLAIMS: list[Callable[[pd.DataFrame], Claim]] = [c1, c1_group, c2, c3, c4, c5, c6]


def difference(frame: pd.DataFrame, what: str, a: tuple[Wanted, str], b: tuple[Wanted, str], *,
               levels: tuple[str, ...] = (), above: float | None = None, below: float | None = None,
               unit: float = 100.0, guess: float = CHANCE) -> Effect:
    """metric of arm a minus metric of arm b times `unit`, paired by seed and by everything not compared.

    A diverged run scores `guess`.

    `levels` names compressor parameters matched across the arms whichever side they are on ("bits").
    """
    effect = Effect(what, above, below, digits=1 if unit == 100 else 3)
    left, right = (_arm(frame, *arm, levels, guess) for arm in (a, b))
    keys = ["seed", "setting", *levels]
    if left.empty or right.empty:
        return effect
    pairs = left.merge(right, on=keys, suffixes=("_a", "_b"))
    if pairs.setting.nunique() > 1:
        raise ValueError("the rows mix several base settings; load one sweep")
    pairs["effect"] = unit * (pairs.score_a - pairs.score_b)
    effect.values = [float(value) for value in pairs.groupby("seed").effect.mean()]
    effect.ids = sorted({*pairs.id_a, *pairs.id_b})
    return effect


def _arm(frame: pd.DataFrame, wanted: Wanted, metric: str, levels: tuple[str, ...], guess: float) -> pd.DataFrame:
    """seed, setting, level columns, score and id of the runs that fit; feedback is none unless wanted otherwise."""
    chosen = frame[frame.status.isin(["finished", "diverged"])]
    for key, value in ({"fwd.feedback.kind": "none", "bwd.feedback.kind": "none"} | wanted).items():
        options = value if isinstance(value, tuple) else (value,)
        chosen = chosen[chosen[key].isin(options)] if key in chosen else chosen.iloc[:0]
    if chosen.empty or metric not in chosen:
        return pd.DataFrame()
    out = pd.DataFrame({"id": chosen.id, "seed": chosen.seed, "setting": _setting(chosen)})
    out["score"] = chosen[metric].where(chosen.status == "finished", guess)
    for level in levels:
        out[level] = chosen[f"fwd.compressor.{level}"].fillna(chosen[f"bwd.compressor.{level}"])
    return out


def _setting(rows: pd.DataFrame) -> pd.Series:
    """Everything of a run but its links and seed, as one text to pair by."""
    names = [name for name in rows.columns if name.startswith(("model.", "data.", "optim.", "schedule."))]
    return rows[[*names, "epochs", "precision"]].astype(str).agg("|".join, axis=1)


DENSE: Wanted = {"fwd.compressor.kind": "none", "bwd.compressor.kind": "none"}


def _topk(ratio: float, fwd: str = "none", bwd: str | None = None) -> Wanted:
    arm: Wanted = {f"{side}.compressor.{key}": value for side in ("fwd", "bwd")
                   for key, value in (("kind", ("topk", "topk_strict")), ("ratio", ratio))}
    return arm | {"fwd.feedback.kind": fwd, "bwd.feedback.kind": fwd if bwd is None else bwd}


def markdown(claims: list[Claim]) -> str:
    """The verdicts as a list for people."""
    lines = []
    for claim in claims:
        lines += [f"- **{claim.name}: {claim.verdict}.** {claim.statement}",
                  *(f"  - {effect.text()}: {effect.verdict}" for effect in claim.effects)]
    return "\n".join(lines) + "\n"
