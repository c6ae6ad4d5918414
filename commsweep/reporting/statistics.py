"""The statistics of the verdicts: intervals, tests against a margin, their adjustment, and how many
seeds decide.

An effect's mean over seeds is tested against the edge of the region that the claim wants it in. The
test is Student's t, two-sided: at 5 % it decides exactly when the 95 % interval does not reach
across the edge. A region with two edges ("within m") takes two one-sided tests (Schuirmann 1987).

Few seeds say little of the scatter, so effects of a report share it (moderated t, Smyth 2004). An
effect is decided when it passes both Student's test and the moderated one. Below `FEW` seeds, where
Student's test is weak, it is enough to pass the moderated one with at least the scatter that all
effects have together. Simulation under normal scatter and under that of the recorded rows found
wrong decisions in about 5 % of reports (tests/reporting/test_statistics.py).

A verdict speaks of the typical run. Where the mean and the median lie on two sides of the edge, a
few unusual runs decide the mean, and nothing is decided. Runs far from the others are counted.

The tests of a report are adjusted for their number (Holm 1979). Every look at an effect is
recorded: at look j its p-value counts j (j + 1) times, and these shares of the level add up to no
more than the level.

`stdtr`, `stdtrit` and `betaincinv` are of scipy.special; scipy.stats, which wraps them, takes
seconds to import.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from scipy.special import betaincinv, digamma, polygamma, stdtr, stdtrit

LEVEL = 0.05  # of the verdicts of a report together
POWER = 0.8
MOST = 100  # seeds; more than these decide nothing worth knowing
LOOKS = 12  # at one effect; a thirteenth would count its p-value 182 times
FEW = 6  # seeds; below them the scatter of the other effects is asked, too
SHARING = 8  # effects that have to share their scatter, or its prior is only noise
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


@dataclass(frozen=True)
class Scatter:
    """The prior of a report's effects for the variance of one of them."""

    variance: float  # the prior's
    degrees: float  # that it counts as
    pooled: float  # variance of all effects together, weighted by their degrees of freedom


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


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """95 % t interval of the mean; None below two values."""
    n = len(values)
    if n < 2:
        return None
    mean, sd = mean_sd(values)
    half = float(stdtrit(n - 1, 0.975)) * sd / math.sqrt(n)
    return mean - half, mean + half


def shared_scatter(samples: Sequence[Sequence[float]]) -> Scatter | None:
    """The prior of Smyth 2004 (limma's fitFDist, by moments of the log variances), in one unit;
    without a prior (0 degrees) below `SHARING` samples that scatter; None below two.
    """
    variances, degrees = [], []
    for values in samples:
        variance = mean_sd(values)[1] ** 2 if len(values) > 1 else 0.0
        if variance > 0:
            variances.append(variance)
            degrees.append(len(values) - 1)
    if len(variances) < 2:
        return None
    products = [v * freedom for v, freedom in zip(variances, degrees, strict=True)]
    pooled = math.fsum(products) / sum(degrees)
    if len(variances) < SHARING:
        return Scatter(0.0, 0.0, pooled)
    logs = []
    for variance, freedom in zip(variances, degrees, strict=True):
        logs.append(math.log(variance) - float(digamma(freedom / 2)) + math.log(freedom / 2))
    mean, sd = mean_sd(logs)
    chance = math.fsum(float(polygamma(1, freedom / 2)) for freedom in degrees) / len(degrees)
    excess = sd**2 - chance
    if excess <= 0:  # no more spread than chance gives: all effects scatter alike
        return Scatter(math.exp(mean), math.inf, pooled)
    prior = 2 * _trigamma_inverse(excess)
    return Scatter(math.exp(mean + float(digamma(prior / 2)) - math.log(prior / 2)), prior, pooled)


def _trigamma_inverse(value: float) -> float:
    """Return where the trigamma function has a value > 0, by Newton's method (limma's
    trigammaInverse).
    """
    if value > 1e7:
        return 1 / math.sqrt(value)
    if value < 1e-6:
        return 1 / value
    y = 0.5 + 1 / value
    for _ in range(50):
        trigamma = float(polygamma(1, y))
        step = trigamma * (1 - trigamma / value) / float(polygamma(2, y))
        y += step
        if -step / y < 1e-8:
            break
    return y


def p_value(values: Sequence[float], region: Region, scatter: Scatter | None = None) -> float:
    """Two-sided p of the mean against the region's edge; where it has two, of the mean inside
    against the one that is less clearly not reached, of the mean outside against the nearer.

    scatter: what the other effects say of it. Values that do not scatter decide (p = 0). Where
    mean and median lie on two sides of the edge nothing is decided (p = 1).
    """
    n = len(values)
    mean, sd = mean_sd(values)
    distance = region.distance(mean)
    if region.has(mean) != region.has(median(values)):
        return 1.0
    if sd == 0:
        return 0.0
    student = _student(distance, sd**2, n, n - 1)
    if scatter is None:
        return student
    if math.isinf(scatter.degrees):
        variance, degrees = scatter.variance, math.inf
    else:
        degrees = scatter.degrees + n - 1
        variance = (scatter.degrees * scatter.variance + (n - 1) * sd**2) / degrees
    both = max(student, _student(distance, variance, n, degrees))
    if n >= FEW:
        return both
    # two ways to be decided: each may err half as often
    return min(1.0, 2 * min(both, _student(distance, max(variance, scatter.pooled), n, degrees)))


def _student(distance: float, variance: float, n: int, degrees: float) -> float:
    """Two-sided p of a mean of n values so far from the edge."""
    ratio = distance / math.sqrt(variance / n)
    if math.isinf(degrees):
        return math.erfc(ratio / math.sqrt(2))
    return min(1.0, 2 * float(stdtr(degrees, -ratio)))


def holm(ps: Sequence[float]) -> list[float]:
    """Adjusted p-values: the i-th smallest times the number of those not smaller, none below the
    one before it.
    """
    order, out, before = sorted(range(len(ps)), key=lambda index: ps[index]), [0.0] * len(ps), 0.0
    for rank, index in enumerate(order):
        before = max(before, min(1.0, (len(ps) - rank) * ps[index]))
        out[index] = before
    return out


def weight(look: int) -> int:
    """Return how often a p-value counts at this look (1, 2, ...): the shares 1 / (j (j + 1)) of the
    level add up to less than one. Raises ValueError beyond `LOOKS`.
    """
    if not 1 <= look <= LOOKS:
        raise ValueError(f"look {look}: the level is spent over at most {LOOKS} looks")
    return look * (look + 1)


def adjusted(ps: Sequence[float], interim: Sequence[int]) -> list[float]:
    """The p-values of a report's effects, for their number and for the looks at each."""
    counted = [min(1.0, weight(look) * p) for p, look in zip(ps, interim, strict=True)]
    return holm(counted)


def next_look(n: int) -> int:
    """Seeds at which an effect that n did not decide may be looked at again."""
    return n + -(-n // 2)


def seeds_needed(
    distance: float,
    sd: float,
    tests: int = 1,
    least: int = 3,
    most: int = MOST,
    look: int = 1,
) -> int | None:
    """Seeds with which an effect so far from the edge is decided with a power of 80 % at this look,
    among so many tests of a report (as if it were the first of Holm's, which asks for the smallest
    p); None where more than `most` are needed.

    sd: of the paired differences over seeds. The power is the usual approximation: distance / error
    reaches the critical value and the 80 % quantile of t.
    """
    if look > LOOKS:
        return None
    level = LEVEL / weight(look) / tests
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
