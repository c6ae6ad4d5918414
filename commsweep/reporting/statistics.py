"""The statistics of the verdicts: intervals, tests against a margin, their adjustment, and how many
seeds decide.

An effect's mean is tested against the edge of the region that the claim wants it in, by Student's t
over seeds, two- sided, so that a test at 5 % decides exactly when the 95 % interval does not reach
across the edge. A region with two edges ("within m") is two one-sided tests (Schuirmann 1987), at
2.5 % each for the same reason. The effects of a report are as many chances to err, so their
p-values are adjusted together (Holm 1979). So is every look at an effect that more seeds are added
to because it is undecided: a report that asks for the seeds which would decide it, and is written
anew with them, would decide an effect at the very edge in 12 cases of a hundred at 5 % (one effect,
from three seeds), and in up to four times as many as it should among thirty. So every p-value
counts `LOOKS` times, and no look comes before there are half as many seeds again. `stdtr` and
`stdtrit` are Student's distribution and its quantile; scipy.stats, which wraps them, takes seconds
to import.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.special import stdtr, stdtrit

LEVEL = 0.05  # of the verdicts of a report together
POWER = 0.8
MOST = 100  # seeds; more than these decide nothing worth knowing
# With it the rule errs in at most 5 % of reports: simulated for 1 to 30 effects at their edges, 3
# to 5 seeds at first.
LOOKS = 5


@dataclass(frozen=True)
class Region:
    """Where a claim wants an effect: above a number, below one, or closer to zero than one
    (`within`).
    """

    above: float | None = None
    below: float | None = None
    within: float | None = None

    def __post_init__(self) -> None:
        if sum(edge is not None for edge in (self.above, self.below, self.within)) != 1:
            raise ValueError("a region has one of above, below and within")

    def has(self, value: float) -> bool:
        """Whether a value lies in it."""
        if self.within is not None:
            return abs(value) < self.within
        return value > self.above if self.above is not None else value < self.below  # pyright: ignore[reportOperatorIssue]

    @property
    def edge(self) -> float:
        """Its edge; of two, the upper one."""
        return next(edge for edge in (self.above, self.below, self.within) if edge is not None)

    def distance(self, value: float) -> float:
        """From a value to the nearest edge."""
        return abs((abs(value) if self.within is not None else value) - self.edge)

    @property
    def supposed(self) -> float:
        """How far from the edge an effect that bears the claim out is supposed to lie before there
        are runs: none at all where the claim bounds it, twice the margin where it is claimed to
        exceed that. A margin of zero says nothing of it.
        """
        return abs(self.edge)

    def text(self) -> str:
        """For people."""
        if self.within is not None:
            return f"within ±{self.within:g}"
        return f"> {self.above:g}" if self.above is not None else f"< {self.below:g}"


def mean_sd(values: Sequence[float]) -> tuple[float, float]:
    """Mean and sample standard deviation (0 of one value)."""
    n = len(values)
    mean = math.fsum(values) / n
    return mean, math.sqrt(
        math.fsum((value - mean) ** 2 for value in values) / (n - 1)
    ) if n > 1 else 0.0


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """95 % t interval of the mean; None below two values."""
    n = len(values)
    if n < 2:
        return None
    mean, sd = mean_sd(values)
    half = float(stdtrit(n - 1, 0.975)) * sd / math.sqrt(n)
    return mean - half, mean + half


def p_value(values: Sequence[float], region: Region) -> float:
    """Two-sided p of the mean against the region's edge; where it has two, of the mean inside
    against the one that is less clearly not reached, of the mean outside against the nearer. Values
    that do not scatter decide (p = 0).
    """
    n = len(values)
    mean, sd = mean_sd(values)
    if sd == 0:
        return 0.0
    error = sd / math.sqrt(n)
    return min(1.0, 2 * float(stdtr(n - 1, -region.distance(mean) / error)))


def holm(ps: Sequence[float]) -> list[float]:
    """Adjusted p-values: the i-th smallest times the number of those not smaller, none below the
    one before it.
    """
    order, out, before = sorted(range(len(ps)), key=lambda place: ps[place]), [0.0] * len(ps), 0.0
    for rank, place in enumerate(order):
        before = max(before, min(1.0, (len(ps) - rank) * ps[place]))
        out[place] = before
    return out


def adjusted(ps: Sequence[float]) -> list[float]:
    """The p-values of a report's effects, for their number and for the looks at them."""
    return holm([min(1.0, LOOKS * p) for p in ps])


def next_look(n: int) -> int:
    """Seeds at which an effect that n did not decide may be looked at again."""
    return n + -(-n // 2)


def seeds_needed(
    distance: float, sd: float, tests: int = 1, least: int = 3, most: int = MOST
) -> int | None:
    """Seeds with which an effect so far from the edge is decided with a power of 80 %, among so
    many tests of a report (as if it were the first of Holm's, which asks for the smallest p); None
    where more than `most` are needed.

    sd: of the paired differences over seeds. The power is the usual approximation: distance / error
    reaches the critical value and the 80 % quantile of t.
    """
    for n in range(max(2, least), most + 1):
        wanted = float(stdtrit(n - 1, 1 - LEVEL / LOOKS / tests / 2)) + float(stdtrit(n - 1, POWER))
        if distance * math.sqrt(n) >= wanted * sd and distance > 0:
            return n
    return None
