"""The statistics of the verdicts: one interval, which decides, and how many seeds would decide.

The interval of an effect's mean is Student's: of paired differences where seeds match, Welch's of
two samples where they do not. It is two-sided. An effect lies in a region when its whole interval
does. The level is 5 % of a report, divided by what Holm's procedure (1979) leaves of its effects
and by the looks that were registered before the first one.

The scatter is of the effect's own values, and at least a score's grid / sqrt(12): seeds that round
to one accuracy scatter nevertheless. Values without any scatter may show that an effect is small,
never that it is better or worse.

Wrong decisions are at most 5 % of reports by simulation, under normal and under unequal scatter
(tests/reporting/test_statistics.py).

`stdtr`, `stdtrit` and `betaincinv` are of scipy.special; scipy.stats, which wraps them, takes
seconds to import.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from scipy.special import betaincinv, stdtr, stdtrit

LEVEL = 0.05  # of the verdicts of a report together
POWER = 0.8
MOST = 100  # seeds; more than these decide nothing worth knowing
LATE = 20  # a look that was not registered counts its p-value so often, and each further one twice
ROUNDING = 1e-12  # a smaller scatter beside the mean is none
FAR = 5.0  # robust standard deviations from the median: a run unlike the others


@dataclass(frozen=True)
class Region:
    """The region in which a claim wants an effect: above a number, below one, or closer to zero
    than one (`within`).
    """

    above: float | None = None
    below: float | None = None
    within: float | None = None

    def __post_init__(self) -> None:
        if sum(edge is not None for edge in (self.above, self.below, self.within)) != 1:
            raise ValueError("a region has one of above, below and within")

    def has(self, value: float) -> bool:
        """Return whether a value lies in it."""
        if self.within is not None:
            return abs(value) < self.within
        if self.above is not None:
            return value > self.above
        return self.below is not None and value < self.below

    @property
    def edge(self) -> float:
        """Return its edge; of two, the upper one."""
        return next(edge for edge in (self.above, self.below, self.within) if edge is not None)

    def distance(self, value: float) -> float:
        """From a value to the nearest edge."""
        return abs((abs(value) if self.within is not None else value) - self.edge)

    @property
    def supposed(self) -> float:
        """Return how far from the edge an effect that bears the claim out is supposed to lie before
        there are runs: none at all where the claim bounds it, twice the margin where it is claimed
        to exceed that. A margin of zero says nothing of it.
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


def pooled_sd(samples: Iterable[Sequence[float]]) -> float:
    """Return the standard deviation within samples, pooled over these; NaN where none has two
    values.
    """
    squares, degrees = 0.0, 0
    for sample in samples:
        if len(sample) > 1:
            squares += mean_sd(sample)[1] ** 2 * (len(sample) - 1)
            degrees += len(sample) - 1
    return math.sqrt(squares / degrees) if degrees else math.nan


def pair_spread(samples: Iterable[Sequence[float]]) -> float:
    """Return what two draws of a sample differ by at most, in 95 of 100 pairs; NaN where none has
    two values.
    """
    return 1.96 * math.sqrt(2) * pooled_sd(samples)


def interval(values: Sequence[float], level: float = LEVEL) -> tuple[float, float] | None:
    """The t interval of a mean, which misses it in a share `level` of samples; None below two
    values.
    """
    return estimate(values).interval(level) if len(values) > 1 else None


@dataclass(frozen=True)
class Estimate:
    """A mean with its standard error, and the degrees of freedom of that.

    An error of zero says nothing of the scatter: the values are all the same.
    """

    mean: float
    error: float
    degrees: float

    def interval(self, level: float = LEVEL) -> tuple[float, float]:
        """The two-sided interval that misses the mean in a share `level` of samples."""
        half = float(stdtrit(self.degrees, 1 - level / 2)) * self.error
        return self.mean - half, self.mean + half

    def p(self, region: Region) -> float:
        """The least level whose interval lies on one side of every edge of a region.

        Of values that are all the same: 0 where they show that an effect is small, else 1.
        """
        if self.error == 0:
            return 0.0 if region.within is not None and region.has(self.mean) else 1.0
        ratio = region.distance(self.mean) / self.error
        return min(1.0, 2 * float(stdtr(self.degrees, -ratio)))


def least_sd(grid: float) -> float:
    """The scatter that rounding to a grid of this step alone leaves: that of a uniform value."""
    return grid / math.sqrt(12)


def estimate(values: Sequence[float], grid: float = 0.0) -> Estimate:
    """The mean of two or more values. grid: the least step between two of them, or 0."""
    n = len(values)
    mean, sd = mean_sd(values)
    sd = sd if sd > ROUNDING * abs(mean) else 0.0  # of one value, added up
    return Estimate(mean, max(sd, least_sd(grid)) / math.sqrt(n), n - 1)


def difference(first: Sequence[float], second: Sequence[float], grid: float = 0.0) -> Estimate:
    """The mean of the first sample minus that of the second, which share no seeds (Welch 1947)."""
    (mean, sd), (other_mean, other_sd) = mean_sd(first), mean_sd(second)
    least = least_sd(grid)
    variance = max(sd, least) ** 2 / len(first)
    other_variance = max(other_sd, least) ** 2 / len(second)
    both = variance + other_variance
    if both == 0:
        return Estimate(mean - other_mean, 0.0, len(first) + len(second) - 2)
    squares = variance**2 / (len(first) - 1) + other_variance**2 / (len(second) - 1)
    degrees = both**2 / squares
    return Estimate(mean - other_mean, math.sqrt(both), degrees)


def grid_of(scores: Iterable[float]) -> float:
    """The step of scores that are all multiples of one, such as shares of test samples; 0 of
    others.
    """
    ordered = sorted({score for score in scores if math.isfinite(score)})
    steps = [high - low for low, high in pairwise(ordered)]
    steps = [step for step in steps if step > 1e-9]
    if len(steps) < 2:
        return 0.0
    least = min(steps)
    are_multiples = all(abs(step / least - round(step / least)) < 1e-3 for step in steps)
    return least if are_multiples else 0.0


def decided_by(region: Region, ends: tuple[float, float]) -> bool | None:
    """True where an interval lies in a region, False: outside of it, None: across an edge."""
    low, high = ends
    edges = [region.edge] if region.within is None else [-region.within, region.within]
    if any(low <= edge <= high for edge in edges):
        return None
    return region.has((low + high) / 2)


def weight(look: int, registered: int = 1) -> int:
    """The factor of a p-value at this look (1, 2, ...), of so many that were registered.

    Looks that were registered share the level. Each that was not counts `LATE` times or more, so
    that all of them together add less than a tenth of the level.
    """
    return registered if look <= registered else LATE * registered * 2 ** (look - registered - 1)


def levels(ps: Sequence[float], weights: Sequence[int]) -> list[float]:
    """The level at which each effect of a report is decided, by Holm's procedure.

    ps: of each effect. weights: how often its p-value counts. An effect is decided where its p is
    at most its level; the interval at that level says the same.
    """
    counted = [p * times for p, times in zip(ps, weights, strict=True)]
    order = sorted(range(len(ps)), key=lambda index: counted[index])
    out, left = [LEVEL] * len(ps), len(ps)
    stopped = False
    for index in order:
        out[index] = LEVEL / left / weights[index]
        stopped = stopped or counted[index] > LEVEL / left
        if not stopped:
            left -= 1
    return out


def next_look(n: int) -> int:
    """Seeds at which an effect that n did not decide may be looked at again."""
    return n + -(-n // 2)


def seeds_needed(
    distance: float, sd: float, level: float = LEVEL, least: int = 3, most: int = MOST
) -> int | None:
    """Seeds with which an effect so far from the edge is decided with a power of 80 % at a level;
    None where more than `most` are needed.

    sd: of the paired differences over seeds. The power is the usual approximation: distance / error
    reaches the critical value and the 80 % quantile of t.
    """
    for n in range(max(2, least), most + 1):
        quantile_sum = float(stdtrit(n - 1, 1 - level / 2)) + float(stdtrit(n - 1, POWER))
        if distance * math.sqrt(n) >= quantile_sum * sd and distance > 0:
            return n
    return None


def far(values: Sequence[float]) -> int:
    """Return how many of eight or more values lie further than `FAR` robust standard deviations
    (1.4826 times the median absolute deviation) from their median.
    """
    if len(values) < 8:  # of fewer, two that happen to be near make all others look far
        return 0
    middle = median(values)
    deviations = [abs(value - middle) for value in values]
    robust = 1.4826 * median(deviations)
    return sum(deviation > FAR * robust for deviation in deviations) if robust else 0


def rate_interval(count: int, n: int) -> tuple[float, float]:
    """95 % interval of a rate of `count` in n (Clopper and Pearson 1934)."""
    low = float(betaincinv(count, n - count + 1, 0.025)) if count else 0.0
    high = float(betaincinv(count + 1, n - count, 0.975)) if count < n else 1.0
    return low, high
