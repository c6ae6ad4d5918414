"""Findings of papers as tests over rows: effect, interval, n, verdict.

An effect is a difference of test accuracies in points (of losses in nats, for language models),
paired by seed and by every setting that is not compared. A claim says in which region the effect
lies, before there are runs; it is supported when the whole interval lies there, contradicted when
all of it lies elsewhere, undecided otherwise, and below three seeds there are not enough runs. A
claim of several effects says how many of them hold. "No loss" means within a margin both ways. The
level of an effect's interval follows from the number of effects in a report and from looks while
seeds are added (`statistics`). Values that are no draws of a seed (predictions, one a network) take
no interval: each lies in the region or not.

Where one side of a pair diverged it counts as guessing: it did happen, and dropping it would
flatter. Where both did, or where an effect is one within a run, there is nothing to compare: such
pairs are left out and counted. What the papers call "severe" or "almost lossless" is not defined
there; the margins here are ours. Settings of an arm that a claim does not name are those of the
specs' defaults.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from statistics import median
from typing import Any, NamedTuple

import pandas as pd

from commsweep.reporting.results import CHANCE, base, distinct, surroundings
from commsweep.reporting.statistics import (
    LEVEL,
    MOST,
    Estimate,
    Region,
    decided_by,
    estimate,
    far,
    grid_of,
    least_sd,
    levels,
    mean_sd,
    next_look,
    rate_interval,
    seeds_needed,
    weight,
)
from commsweep.reporting.statistics import difference as unpaired

SLIGHT = 1.0
MIN_SEEDS = 3
SUPPORTED, CONTRADICTED, UNDECIDED = "supported", "contradicted", "undecided"
PARTLY = "partly supported"  # of a claim: some effects hold, others do not or are undecided
NOT_SEEN = "not seen at this scale"  # what a paper claims of larger trainings than these
EXPLORED = "explored after the runs"  # of a claim that was not written down before them
TWO_OUTCOMES = "two outcomes"  # of an effect: a mean of both would speak of neither
APART = 0.2  # share of runs far from the others above which there are two outcomes
NOT_ENOUGH, NOT_EVALUABLE = "not enough runs", "not evaluable"
# Of arms that do not say otherwise; a ratio, bits and a scale always say.
DEFAULTS = {
    "compressor.scope": "sample",
    "compressor.rounding": "nearest",
    "compressor.group": 128,
    "feedback.key": "slot",
    "feedback.buffer": "float32",
    "start_epoch": 0,
    "start_step": None,
    "compressor.values.kind": None,
    "compressor.code.kind": None,
}
Wanted = dict[str, Any]


class Looked(NamedTuple):
    """The seeds that each look at an effect had, and the looks that were registered before."""

    seeds: list[int]
    registered: int = 1


SWEEP = "", ""  # of looks that are registered for all effects of a sweep
# By claim and effect; SWEEP holds what is registered of effects without a look.
Looks = Mapping[tuple[str, str], Looked]


@dataclass
class Effect:
    """A paired difference and the region that the claim wants it in: one of above, below and
    within.
    """

    what: str
    above: float | None = None  # claim: effect > above
    below: float | None = None  # claim: effect < below
    # one a seed, points of accuracy or nats of loss
    values: list[float] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    digits: int = 1
    lost: int = 0  # pairs without a number to compare, because runs diverged
    within: float | None = None  # claim: -within < effect < within
    by: list[int] = field(default_factory=list)  # the seed of each value, where each has one
    tests: int = 1  # effects of the report
    level: float = LEVEL  # of its interval, once the effects of a report are known
    each: str = "seed"  # what a value is of; others are no draws, and no launch adds any
    looks: list[int] = field(default_factory=list)  # values there were at each, this one included
    registered: int = 1  # looks that were registered before the first
    grid: float = 0.0  # the least step between two values; 0: none
    # where no seeds are shared: scores of both sides, whose means the effect is the difference of
    unmatched: tuple[list[float], list[float]] | None = None

    @property
    def region(self) -> Region:
        """Return where the claim wants it."""
        return Region(self.above, self.below, self.within)

    @property
    def _estimate(self) -> Estimate | None:
        """The mean with its error; None below two seeds, and of values that are no draws."""
        if self.each != "seed":
            return None
        if self.unmatched is not None:
            both = min(len(scores) for scores in self.unmatched) > 1
            return unpaired(*self.unmatched, self.grid) if both else None
        return estimate(self.values, self.grid) if len(self.values) > 1 else None

    @property
    def count(self) -> int:
        """Seeds: pairs, or where none are shared the fewer of both sides."""
        return len(self.values) if self.unmatched is None else min(map(len, self.unmatched))

    @property
    def seeds_text(self) -> str:
        """The number of its seeds, "n=5"; of both sides, where these are no pairs."""
        if self.unmatched is None:
            return f"n={len(self.values)}"
        return f"n={len(self.unmatched[0])} and {len(self.unmatched[1])}, unpaired (Welch)"

    @property
    def interval(self) -> tuple[float, float] | None:
        """The t interval of the mean at the effect's level; None below two seeds, and of values
        that are no draws.
        """
        mean = self._estimate
        return None if mean is None else mean.interval(self.level)

    @property
    def p(self) -> float | None:
        """The least level at which its interval lies on one side of every edge; None while there
        are too few seeds, and of values that are no draws.
        """
        mean = self._estimate
        return None if mean is None or self.count < MIN_SEEDS else mean.p(self.region)

    @property
    def verdict(self) -> str:
        """Return whether the effect is decided to lie in the claimed region, or outside."""
        if self.each != "seed":
            inside = self.inside
            if inside in (0, len(self.values)):
                return (SUPPORTED if inside else CONTRADICTED) if self.values else NOT_ENOUGH
            return UNDECIDED
        if self.count < MIN_SEEDS:
            return NOT_EVALUABLE if self.lost else NOT_ENOUGH
        if far(self.values) > APART * len(self.values):
            return TWO_OUTCOMES
        return UNDECIDED if self._open else SUPPORTED if self._inside else CONTRADICTED

    @property
    def _inside(self) -> bool | None:
        """True where its interval lies in the region, False: outside, None: across an edge."""
        mean = self._estimate
        if mean is None or (mean.error == 0 and mean.p(self.region) > 0):
            return None
        return decided_by(self.region, mean.interval(self.level))

    @property
    def _open(self) -> bool:
        """True where its interval, or mean and median, reach across an edge: nothing is decided."""
        return self._inside is None or self._split

    @property
    def _split(self) -> bool:
        """True where mean and median lie on two sides of an edge: a few runs decide the mean."""
        if self.unmatched is not None:
            return False
        return self.region.has(mean_sd(self.values)[0]) != self.region.has(median(self.values))

    @property
    def inside(self) -> int:
        """Return how many of the values lie in the claimed region."""
        return sum(self.region.has(value) for value in self.values)

    @property
    def enough(self) -> int | None:
        """Values that would decide it, if its mean and spread stayed as they are; None where there
        are too many, or nothing to decide.
        """
        if self.verdict == NOT_ENOUGH and self.values:
            return MIN_SEEDS
        if self.verdict != UNDECIDED:
            return None
        mean, sd = mean_sd(self.values)
        # as if it were the first of Holm's effects, whose level is the smallest
        next_weight = weight(max(1, len(self.looks)) + 1, self.registered)
        level = LEVEL / self.tests / next_weight
        return seeds_needed(
            self.region.distance(mean),
            max(sd, least_sd(self.grid)),
            level,
            least=next_look(len(self.values)),
        )

    @property
    def seeds(self) -> int | None:
        """The same where more seeds give more values."""
        return self.enough if self.each == "seed" else None

    @property
    def unusual(self) -> str:
        """Return how many values lie far from the others, with the interval of their rate; "" of
        none.
        """
        if not (count := far(self.values)):
            return ""
        low, high = (round(100 * edge) for edge in rate_interval(count, len(self.values)))
        return f"{count} of {len(self.values)} far from the others ({low} to {high} % of runs)"

    def text(self) -> str:
        """The effect for people."""
        lost = f"; {self.lost} diverged, nothing to compare" if self.lost else ""
        if not self.values:
            return f"{self.what} (claimed {self.region.text()}): no runs{lost}"
        mean = sum(self.values) / len(self.values)
        digits = self.digits
        lo, hi = self.interval or (mean, mean)
        spread = f"[{lo:+.{digits}f}, {hi:+.{digits}f}]" if self.interval else "no interval"
        spread += f" at {percent(self.level)}" if self.interval else ""
        middle = f", median {median(self.values):+.{digits}f}" if len(self.values) > 2 else ""
        unusual = f"; {self.unusual}" if self.unusual else ""
        return (
            f"{self.what} (claimed {self.region.text()}): {mean:+.{digits}f} {spread}{middle}, "
            f"{self.seeds_text}{unusual}{lost}"
        )

    def short(self) -> str:
        """The effect in a line of a terminal: its mean and interval, n, verdict, what it is."""
        if not self.values:
            return f"{'no runs':28} {self.what}"
        number = shown(self.values, self.interval, self.digits, self.level)
        number += f" n={len(self.values)}"
        return f"{number:28} {self.verdict:12} {self.what} (claimed {self.region.text()})"

    def judged(self) -> str:
        """Return its verdict for people, with p, and what would decide it."""
        if self.each != "seed" and self.values:
            return f"{self.verdict} ({self.inside} of {len(self.values)} {self.each}s)"
        if self.p is None:
            return self.verdict
        look = f", look {len(self.looks)} of {self.registered}" if len(self.looks) > 1 else ""
        if self.verdict == TWO_OUTCOMES:
            return f"{TWO_OUTCOMES}: {self.unusual}; no verdict on a mean of both"
        ends = self.interval
        assert ends is not None
        if ends[0] == ends[1] and self._inside is None:
            return f"{self.verdict} (all seeds give the same difference{look})"
        sentence = f"{self.verdict} (p {_p(self.p)}{look})"
        if self.verdict != UNDECIDED:
            return sentence
        if self._split:
            return f"{sentence}; mean and median lie on two sides of the edge"
        if (enough := self.enough) is None:
            return (
                f"{sentence}; it lies so near the edge that more than {MOST} {self.each}s would be "
                "needed"
            )
        missing = enough - len(self.values)
        return f"{sentence}; about {missing} more {self.each}{'s' * (missing > 1)} would decide it"


def shown(
    values: Sequence[float],
    ends: Sequence[float] | None,
    digits: int,
    level: float = LEVEL,
) -> str:
    """The mean with its interval, where there is one, and how sure that is where it is not 95 %:
    "+1.2 [+0.5, +1.9] at 99 %"; "no runs".
    """
    if not values:
        return "no runs"
    mean = f"{mean_sd(values)[0]:+.{digits}f}"
    if not ends:
        return mean
    sure = "" if level == LEVEL else f" at {percent(level)}"
    return f"{mean} [{ends[0]:+.{digits}f}, {ends[1]:+.{digits}f}]{sure}"


def percent(level: float) -> str:
    """The confidence of an interval at a level: "95 %", "99.4 %"."""
    return f"{100 * (1 - level):.6g} %" if level > 1e-6 else "all but one in a million"


def _p(value: float) -> str:
    return "< 0.001" if value < 0.001 else f"{value:.2g}" if value < 0.1 else f"{value:.1g}"


@dataclass
class Claim:
    """A finding with the effects it stands on; each of them has a verdict of its own."""

    name: str
    statement: str
    effects: list[Effect]
    # The paper that claims it, of larger trainings than ours; "" of our own; None: as its module.
    source: str | None = None
    scale: str = ""  # what was trained here
    # When it was written down, "2026-11-27T14:04:00+00:00", and in which commit; "": not before
    # its runs.
    registered: str = ""
    commit: str = ""
    first_run: str | None = None  # when the first of its runs ended, where all rows say so
    registrable: bool = True  # a launch can name it

    @property
    def verdict(self) -> str:
        """supported if all effects are, contradicted if those are that were decided, partly
        supported if only some hold.
        """
        verdicts = {effect.verdict for effect in self.effects}
        if SUPPORTED in verdicts:
            return SUPPORTED if len(verdicts) == 1 else PARTLY
        for verdict in (CONTRADICTED, NOT_EVALUABLE, TWO_OUTCOMES, UNDECIDED):
            if verdict in verdicts:
                return verdict
        return NOT_ENOUGH

    @property
    def answer(self) -> str:
        """The verdict for people. What a paper claims is not contradicted by smaller trainings."""
        if self.verdict == CONTRADICTED and self.source:
            return NOT_SEEN
        return self.verdict if self.verdict != PARTLY else self.counted

    @property
    def origin(self) -> str:
        """Return whether the claim was there before its runs, for people."""
        if self.source:
            return "published by the paper"
        if not self.registered or self.first_run is None:
            return EXPLORED
        written, ran = map(datetime.fromisoformat, (self.registered, self.first_run))
        return f"registered, commit {self.commit}" if written < ran else EXPLORED

    def explored(self) -> Claim:
        """Return the claim without its registration, which is of the sweep that it was made for: of
        other runs, some of its arms only perhaps, it is explored.
        """
        self.registered = self.commit = ""
        return self

    @property
    def counted(self) -> str:
        """Return how many of its effects hold: "2 of 3 hold, 1 does not"."""
        verdicts = [effect.verdict for effect in self.effects]
        sentences = [f"{verdicts.count(SUPPORTED)} of {len(verdicts)} hold"]
        if failed := verdicts.count(CONTRADICTED):
            sentences.append(f"{failed} {'does' if failed == 1 else 'do'} not")
        if open_ := len(verdicts) - verdicts.count(SUPPORTED) - failed:
            sentences.append(f"{open_} undecided")
        return ", ".join(sentences)

    @property
    def where(self) -> str:
        """Return where a paper's claim was looked for: " (arXiv ...; here: ...)"; "" of our own."""
        return f" ({self.source}; here: {self.scale})" if self.source and self.scale else ""

    @property
    def has_runs(self) -> bool:
        """Return whether any of its effects has runs at all."""
        return any(effect.values or effect.lost for effect in self.effects)

    @property
    def has_seeds(self) -> bool:
        """Return whether any of its effects has enough seeds for a verdict."""
        return any(len(effect.values) >= MIN_SEEDS for effect in self.effects)

    def record(self) -> dict:
        """For JSON."""
        effects = []
        for effect in self.effects:
            values = {
                "interval": effect.interval,
                "median": median(effect.values) if effect.values else None,
                "far": far(effect.values),
                "p": effect.p,
                "verdict": effect.verdict,
                "seeds_to_decide": effect.seeds,
                "said": effect.text(),
                "judged": effect.judged(),
            }
            effects.append(asdict(effect) | values)
        return {
            "claim": self.name,
            "statement": self.statement,
            "source": self.source,
            "scale": self.scale,
            "verdict": self.verdict,
            "answer": self.answer,
            "origin": self.origin,
            "effects": effects,
        }


def date(claims: list[Claim], frame: pd.DataFrame) -> list[Claim]:
    """The claims with the time of their first run, where each of their rows has one."""
    when = dict(zip(frame.id, frame["when"], strict=True)) if "when" in frame else {}
    for claim in claims:
        dates = [str(when.get(name)) for effect in claim.effects for name in effect.ids]
        if dates and all(moment[:1].isdigit() for moment in dates):
            claim.first_run = min(dates, key=datetime.fromisoformat)
    return claims


def adjust(claims: list[Claim], interim: Looks | None = None) -> list[Claim]:
    """The claims of a report, their effects tested together. interim: those before this one, which
    is one more where an effect has other values by now.
    """
    tested: list[Effect] = []
    for claim in claims:
        for effect in claim.effects:
            looked = (interim or {}).get((claim.name, effect.what))
            if looked is None:
                looked = Looked([], (interim or {}).get(SWEEP, Looked([])).registered)
            before, effect.registered = list(looked.seeds), looked.registered
            n = effect.count
            if n < MIN_SEEDS or effect.each != "seed":
                continue
            effect.looks = before if before and before[-1] == n else [*before, n]
            tested.append(effect)
    ps = [1.0 if effect.p is None else effect.p for effect in tested]
    weights = [weight(len(effect.looks), effect.registered) for effect in tested]
    for effect, level in zip(tested, levels(ps, weights), strict=True):
        effect.level, effect.tests = level, len(tested)
    return claims


def difference(
    frame: pd.DataFrame,
    label: str,
    a: tuple[Wanted, str],
    b: tuple[Wanted, str],
    *,
    above: float | None = None,
    below: float | None = None,
    within: float | None = None,
    unit: float = 100.0,
    guess: float = CHANCE,
    across: bool = False,
) -> list[Effect]:
    """metric of arm a minus metric of arm b times `unit`, paired by seed and by everything not
    compared.

    One effect for each training that both arms have in common, named by what tells it from the
    others. A diverged run scores `guess` against one that trained; see the head of this file.
    across: compressors of different kinds are compared, too.
    """
    left, right = (_arm(frame, *arm, guess) for arm in (a, b))
    if across:
        left, right = (arm.assign(kind="none") for arm in (left, right))
    return paired(frame, label, left, right, above=above, below=below, within=within, unit=unit)


def weighted(
    frame: pd.DataFrame,
    label: str,
    arms: Sequence[tuple[float, Wanted]],
    metric: str,
    *,
    guess: float,
    digits: int = 1,
    **region: Any,
) -> list[Effect]:
    """The sum of factor times metric over arms, paired by seed, of each training that has all of
    them. A diverged run scores `guess`.
    """
    arms_ = [_arm(frame, values_wanted, metric, guess) for _, values_wanted in arms]
    if any(arm.empty for arm in arms_):
        return [Effect(label, digits=digits, **region)]
    columns = ["seed", "base", "id", "score", "diverged", "surroundings"]
    pairs = arms_[0][["seed", "base", "surroundings", "grid"]].assign(
        sum=0.0, diverged=True, ids="", kind=""
    )
    for (factor, _), arm in zip(arms, arms_, strict=True):
        pairs = pairs.merge(arm[columns], on=["seed", "base"])
        pairs = pairs[_alike(pairs.surroundings_x, pairs.surroundings_y)]
        pairs = pairs.assign(
            surroundings=pairs.surroundings_x.fillna(pairs.surroundings_y),
            sum=pairs["sum"] + factor * pairs.score,
            diverged=pairs.diverged_x & pairs.diverged_y,
            ids=pairs.ids + " " + pairs.id,
            id_a=pairs.id,
        )[["seed", "base", "sum", "diverged", "ids", "id_a", "kind", "surroundings", "grid"]]
    titles = _titles(frame, pairs) if len(pairs) else {}
    effects = []
    for training, rows in pairs.groupby("base", sort=False):
        effect = Effect(label + titles[training, ""], digits=digits, **region)
        compared = rows[~rows.diverged]
        effect.values = [float(value) for value in compared["sum"]]
        effect.by = [int(seed) for seed in compared.seed]
        effect.grid = max(abs(factor) for factor, _ in arms) * float(rows.grid.max())
        effect.ids = sorted(set(" ".join(rows.ids).split()))
        effect.lost = int(rows.diverged.sum())
        effects.append(effect)
    return effects or [Effect(label, digits=digits, **region)]


def combined(
    label: str,
    arms_: list[tuple[float, dict[int, float]]],
    *,
    ids: list[str],
    digits: int = 1,
    **region: Any,
) -> Effect:
    """An effect made of others: the sum of factor times value over `arms_` (by seed), of the seeds
    that all have.
    """
    shared = sorted(set.intersection(*(set(values) for _, values in arms_))) if arms_ else []
    return Effect(
        label,
        values=[sum(factor * values[seed] for factor, values in arms_) for seed in shared],
        ids=ids,
        by=shared,
        digits=digits,
        **region,
    )


def contrast(label: str, first: Effect, second: Effect, **region: Any) -> Effect:
    """Return how much larger one effect is than another, by seed."""
    minuend, subtrahend = (
        dict(zip(effect.by, effect.values, strict=True)) for effect in (first, second)
    )
    return combined(
        label,
        [(1.0, minuend), (-1.0, subtrahend)],
        ids=sorted({*first.ids, *second.ids}),
        grid=max(first.grid, second.grid),
        **region,
    )


def paired(
    frame: pd.DataFrame,
    label: str,
    left: pd.DataFrame,
    right: pd.DataFrame,
    *,
    above: float | None = None,
    below: float | None = None,
    within: float | None = None,
    unit: float = 100.0,
) -> list[Effect]:
    """The effects of two arms, each with columns id, seed, base, kind, diverged and score."""

    def effect_(text: str) -> Effect:
        return Effect(text, above, below, within=within, digits=1 if unit == 100 else 3)

    if left.empty or right.empty:
        return [effect_(label)]
    pairs = left.merge(right, on=["seed", "base"], suffixes=("_a", "_b"))
    if "surroundings_a" in pairs:
        pairs = pairs[_alike(pairs.surroundings_a, pairs.surroundings_b)]
    pairs = pairs[
        (pairs.kind_a == pairs.kind_b) | (pairs.kind_a == "none") | (pairs.kind_b == "none")
    ]
    if pairs.empty:
        return [effect_(label)]
    kinds = pairs.kind_a.where(pairs.kind_a != "none", pairs.kind_b)
    one_run = pairs.id_a == pairs.id_b
    compared = ~(pairs.diverged_a & pairs.diverged_b) & ~(one_run & pairs.diverged_a)
    pairs = pairs.assign(
        effect=unit * (pairs.score_a - pairs.score_b), compared=compared, kind=kinds
    )
    titles = _titles(frame, pairs)
    effects = []
    for (training, kind), rows in pairs.groupby(["base", "kind"], sort=False):
        effect = effect_(label + titles[training, kind])
        compared_rows = rows[rows.compared]
        effect.values = [float(value) for value in compared_rows["effect"]]
        effect.by = [int(seed) for seed in compared_rows["seed"]]
        if "grid_a" in rows:
            effect.grid = unit * float(rows[["grid_a", "grid_b"]].max(axis=None))
        effect.ids, effect.lost = sorted({*rows.id_a, *rows.id_b}), int((~rows.compared).sum())
        effects.append(effect)
    return effects


def _alike(first: pd.Series, second: pd.Series) -> pd.Series:
    """Return whether two runs were executed in the same environment, as far as their rows say."""
    return (first == second).fillna(False) | first.isna() | second.isna()


def _titles(frame: pd.DataFrame, pairs: pd.DataFrame) -> dict[tuple[str, str], str]:
    """Return what tells the trainings of these pairs apart, by (base, kind); "" when there is only
    one.
    """
    first = pairs.drop_duplicates(["base", "kind"])
    if len(first) < 2:
        return {(itertuple.base, itertuple.kind): "" for itertuple in first.itertuples()}
    rows = (
        frame.set_index("id")
        .loc[list(first.id_a)]
        .reset_index()
        .assign(setting_id=list(first.base))
    )
    labels = {rows.setting_id.iloc[0]: text for text, rows in distinct(rows, "")}
    several = first.kind.nunique() > 1
    return {
        (itertuple.base, itertuple.kind): (
            labels[itertuple.base] if first.base.nunique() > 1 else ""
        )
        + (f" ({itertuple.kind})" if several else "")
        for itertuple in first.itertuples()
    }


def _grids(frame: pd.DataFrame, metric: str) -> pd.Series:
    """The step between two scores of each run's data set; 0 where there is none."""
    finished = frame[metric].where(frame.status == "finished")
    if "data.name" not in frame:
        return pd.Series(grid_of(finished.dropna()), frame.index)
    return finished.groupby(frame["data.name"], dropna=False).transform(
        lambda scores: grid_of(scores.dropna())
    )


def _arm(frame: pd.DataFrame, values_wanted: Wanted, metric: str, guess: float) -> pd.DataFrame:
    """id, seed, base, kind, score and whether it diverged, of the runs that fit."""
    fits = frame.status.isin(["finished", "diverged"])
    plain = {
        f"{side}.{key}": (value, None) for side in ("fwd", "bwd") for key, value in DEFAULTS.items()
    }
    plain |= {f"{side}.feedback.kind": "none" for side in ("fwd", "bwd")}
    for key, value in (plain | values_wanted).items():
        options = value if isinstance(value, tuple) else (value,)
        if key in frame:
            fits &= frame[key].isin([option for option in options if option is not None]) | (
                frame[key].isna() if None in options else False
            )
        elif None not in options:
            fits &= False
    chosen = frame[fits]
    if chosen.empty or metric not in chosen:
        return pd.DataFrame()
    out = pd.DataFrame(
        {
            "id": chosen.id,
            "seed": chosen.seed,
            "base": base(chosen, "fwd.", "bwd."),
            "kind": chosen["fwd.compressor.kind"].where(
                chosen["fwd.compressor.kind"] != "none", chosen["bwd.compressor.kind"]
            ),
        }
    )
    out["surroundings"] = surroundings(chosen)
    out["grid"] = _grids(frame, metric).loc[chosen.index]
    out["diverged"] = chosen.status == "diverged"
    out["score"] = chosen[metric].where(chosen.status == "finished", guess)
    return out


DENSE: Wanted = {"fwd.compressor.kind": "none", "bwd.compressor.kind": "none"}


def adjustment(claims: list[Claim]) -> str:
    """Return what was done to the verdicts, in a sentence; "" where nothing was tested."""
    tested = [effect for claim in claims for effect in claim.effects if effect.p is not None]
    if not tested:
        return ""
    together = f" for all {len(tested)} effects together (Holm)" if len(tested) > 1 else ""
    again = ""
    if any(len(effect.looks) > effect.registered for effect in tested):
        again = " Looks that were not registered cost an effect most of its level."
    return (
        f"The interval decides: verdicts hold at {100 * LEVEL:g} %{together}, so each interval "
        f"prints how sure it is.{again}"
    )


def markdown(claims: list[Claim], note: str = "", commands: dict[str, str] | None = None) -> str:
    """The verdicts as a list for people; `note`: what must be known of the runs first; `commands`:
    by claim, what would decide it.
    """
    sentence = " ".join(sentence for sentence in (note, adjustment(claims)) if sentence)
    lines = [sentence, ""] if sentence else []
    if not claims:
        lines.append("No claim of the papers has enough runs in this sweep.")
    for claim in claims:
        lines += [
            f"- **{claim.name}: {claim.answer}** ({claim.origin}). {claim.statement}{claim.where}",
            *(f"  - {effect.text()}: {effect.judged()}" for effect in claim.effects),
        ]
        if commands and claim.name in commands:
            lines.append(f"  - to decide it: `{commands[claim.name]}`")
    return "\n".join(lines) + "\n"


def deciding(
    claims: list[Claim], sweep: str, frame: pd.DataFrame, papers: Collection[str] = ()
) -> dict[str, str]:
    """By claim, the command that runs the seeds which would decide it; of claims that rest on the
    sweep's runs.

    papers: that the report is restricted to: its effects are fewer, and so are the seeds.
    """
    ids, only = set(frame.id), f" --papers {','.join(papers)}" if papers else ""
    return {
        claim.name: f"commsweep sweep launch {sweep} --claim '{claim.name}' --decide{only}"
        for claim in claims
        if claim.registrable
        and any(effect.seeds and set(effect.ids) <= ids for effect in claim.effects)
    }
