"""Iterations of data-parallel training as activities of a timeline: S-SGD, and K-FAC's distributed
kinds.

All GPUs do the same until factors are inverted, so one of them is simulated until then, and all of
them after. Messages of gradients, factors and inverses take turns on one network. Times are whoever
asks for them: a network's layers with the published seconds, or a profile that real processes
measured.

Sources: S-SGD with wait-free backward, D-, MPD- and SPD-KFAC arXiv 2107.06533 and the first
author's code; DP-KFAC arXiv 2206.15143; DeAR arXiv 2302.12445.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

from commsweep.second_order.fusion import groups as fused
from commsweep.second_order.placement import EVERYWHERE, Factor, Placed, below, cheaper
from commsweep.second_order.placement import placed_factors as assign
from commsweep.timing.timeline.activities import HANDLE, Activity, Span, simulate

PASSES, FACTORS, INVERSION, GRADIENT_MESSAGES, FACTOR_MESSAGES, INVERSE_MESSAGES = PARTS = (
    "passes",
    "factors",
    "inversion",
    "gradients",
    "factor messages",
    "inverse messages",
)
STACK = (
    PASSES,
    GRADIENT_MESSAGES,
    FACTORS,
    FACTOR_MESSAGES,
    INVERSION,
    INVERSE_MESSAGES,
)  # as the paper stacks them
BUCKET = 25 * 2**20 // 4  # elements of gradients in a message
Line = tuple[float, float]  # alpha, beta: m elements take alpha + beta m seconds


@dataclass(frozen=True)
class Item:
    """The next work of a GPU, and what is ready after it: a factor (by its place), elements of
    gradients.
    """

    seconds: float
    part: str = PASSES
    factor: int | None = None
    gradient: int = 0
    forward: bool = False


@dataclass(frozen=True)
class Work:
    """The forward and backward of an iteration on one GPU."""

    items: list[Item]
    factors: list[Factor]

    def weights(self) -> list[int]:
        """Elements of every layer's gradient as a matrix."""
        return [a.size * g.size for a, g in zip(self.factors[::2], self.factors[1::2], strict=True)]


@dataclass(frozen=True)
class Cluster:
    """GPUs, what messages between them take, and what inverting a factor of d rows takes."""

    gpus: int
    reduce: Line  # of a message to all, summed up
    broadcast: Line
    invert: Callable[[int], float]
    # of the factors' messages, where they go another way than gradients
    collect: Line | None = None
    # Seconds for which a message keeps its own GPU from computing: of factors, and of an inverse.
    handling: Line = (0.0, 0.0)
    handing_out: Line = (0.0, 0.0)

    def seconds(self, kind: str, elements: float) -> float:
        """Return the seconds of one message; nothing is sent on one GPU."""
        alpha, beta = {
            INVERSE_MESSAGES: self.broadcast,
            FACTOR_MESSAGES: self.collect or self.reduce,
        }.get(kind, self.reduce)
        return alpha + beta * elements if self.gpus > 1 else 0.0

    def small(self, size: int) -> bool:
        """Return whether inverting a factor of so many rows is cheaper than receiving its
        inverse.
        """
        return cheaper(self.invert, lambda elements: self.seconds(INVERSE_MESSAGES, elements))(size)


@dataclass(frozen=True)
class Algorithm:
    """The division of work among the learners of K-FAC; kfac=False: plain S-SGD.

    small: rows below which a factor is inverted everywhere (None: where that is cheaper).
    gradients: "overlapped" with the backward, "after" it, or "dear", reduce-scatter in the backward
    and all-gather in the next forward.
    """

    kfac: bool = True
    fusion: str = "after"
    placement: str = "everywhere"
    small: int | None = None
    fraction: float = 1.0
    gradients: str = "overlapped"
    buffer: int = 2**24
    bucket: int = BUCKET
    # of factors, where they are known
    groups: list[list[int]] | None = field(default=None, hash=False)
    inverters: list[int] | None = field(default=None, hash=False)  # likewise


ALGORITHMS: dict[str, Algorithm] = {
    "s-sgd": Algorithm(kfac=False),
    "s-sgd+dear": Algorithm(kfac=False, gradients="dear"),
    "d": Algorithm(),
    "mpd": Algorithm(placement="spread"),
    "d+pipelining": Algorithm(fusion="pipelined"),
    "d+balance": Algorithm(placement="balanced"),
    "spd": Algorithm(fusion="pipelined", placement="balanced"),
    "dp": Algorithm(placement="owner"),
}
SPD = ("spd", "d+pipelining", "d+balance", "d")  # what SPD-KFAC chooses among
NAMES = {
    "s-sgd": "S-SGD",
    "s-sgd+dear": "S-SGD, DeAR",
    "d": "D-KFAC",
    "mpd": "MPD-KFAC",
    "d+pipelining": "D-KFAC + pipelining",
    "d+balance": "D-KFAC + balance",
    "spd": "SPD-KFAC",
    "dp": "DP-KFAC",
}


@dataclass(frozen=True)
class Iteration:
    """Seconds of an iteration, by part (exposed time, in the order of PARTS), and when everything
    happened.
    """

    seconds: float
    parts: dict[str, float]
    activities: list[Activity]
    spans: list[Span]


def ring(gpus: int, bandwidth: float, latency: float) -> Line:
    """All-reduce over a ring: 2 (P - 1) rounds of m / P elements of 4 bytes. bandwidth: bits a
    second, 0: infinite.
    """
    beta = 2 * (gpus - 1) / gpus * 32 / bandwidth if bandwidth else 0.0
    return 2 * (gpus - 1) * latency, beta


def tree(gpus: int, bandwidth: float, latency: float) -> Line:
    """All-reduce over a double binary tree: 2 log2 P rounds, all elements up and down,
    pipelined.
    """
    return 2 * (
        gpus - 1
    ).bit_length() * latency, 2 * 32 / bandwidth if bandwidth and gpus > 1 else 0.0


def broadcast(gpus: int, bandwidth: float, latency: float) -> Line:
    """Broadcast over a tree, pipelined."""
    return (gpus - 1).bit_length() * latency, 32 / bandwidth if bandwidth and gpus > 1 else 0.0


def iteration(work: Work, cluster: Cluster, how: Algorithm) -> Iteration:
    """Return an iteration in which factors and inverses are new."""
    work = _busiest(work, cluster.gpus) if how.placement == "owner" else work
    planned = _Planner(work, cluster, how).run()
    computing = {
        name: sum(
            item.seconds
            for item in work.items
            if item.part == name and (how.kfac or name == PASSES)
        )
        for name in (PASSES, FACTORS)
    }
    steps, left = [sum(computing.values())], set(PARTS[2:])
    for name in (GRADIENT_MESSAGES, FACTOR_MESSAGES, INVERSION, INVERSE_MESSAGES):
        left.discard(name)
        steps.append(
            _Planner(work, cluster, how, frozenset(left)).run().seconds if left else planned.seconds
        )
    exposed = [b - a for a, b in pairwise(steps)]
    named = computing | dict(
        zip((GRADIENT_MESSAGES, FACTOR_MESSAGES, INVERSION, INVERSE_MESSAGES), exposed, strict=True)
    )
    return replace(planned, parts={name: named[name] for name in STACK})


def _busiest(work: Work, gpus: int) -> Work:
    """Return what the learner computes that has most to do where each computes the factors of its
    own layers only.
    """
    owners = assign("owner", work.factors, gpus).inverters
    loads = [0.0] * gpus
    for item in work.items:
        if item.factor is not None:
            loads[owners[item.factor]] += item.seconds
    most = loads.index(max(loads))
    return Work(
        [
            replace(item, seconds=0.0)
            if item.factor is not None and owners[item.factor] != most
            else item
            for item in work.items
        ],
        work.factors,
    )


def seconds(work: Work, cluster: Cluster, name: str) -> float:
    """Return the seconds of an iteration of a named algorithm, without its parts, which take
    several times as long to find.
    """
    arms = [name] if name != "spd" else list(SPD)
    return min(
        _Planner(
            _busiest(work, cluster.gpus) if ALGORITHMS[arm].placement == "owner" else work,
            cluster,
            ALGORITHMS[arm],
        )
        .run()
        .seconds
        for arm in arms
    )


def planned(
    work: Work, cluster: Cluster, name: str, small: int | None = None
) -> tuple[Algorithm, Iteration]:
    """The iteration of a named algorithm, and what it came down to. small: see Algorithm.

    SPD-KFAC plans with these very costs, so it leaves out what they say would not pay: pipelining,
    or balance.
    """
    arms = [replace(ALGORITHMS[arm], small=small) for arm in (SPD if name == "spd" else (name,))]
    arms_ = [(how, iteration(work, cluster, how)) for how in arms]
    return min(arms_, key=lambda pair: pair[1].seconds)


def average(
    work: Work,
    cluster: Cluster,
    name: str,
    factors_every: int = 1,
    inverses_every: int = 1,
    small: int | None = None,
) -> dict[str, float]:
    """Exposed seconds by part of an iteration on average, when factors and inverses are new every
    so many.
    """
    how, both = planned(work, cluster, name, small)
    if not how.kfac:
        return both.parts
    plain = iteration(work, cluster, replace(how, kfac=False)).parts
    share: dict[str, float] = dict.fromkeys((INVERSION, INVERSE_MESSAGES), 1 / inverses_every)
    # Computing factors hides some of the gradients' messages, so that these, too, are not the same
    # in every iteration.
    return {
        name: plain[name] + (value - plain[name]) * share.get(name, 1 / factors_every)
        for name, value in both.parts.items()
    }


class _Planner:
    """Lays out the activities; those of the parts in `free` take no time."""

    def __init__(
        self, work: Work, cluster: Cluster, how: Algorithm, free: frozenset[str] = frozenset()
    ) -> None:
        self.work, self.cluster, self.how, self.free = work, cluster, how, free
        self.activities: list[Activity] = []

    def run(self) -> Iteration:
        """Simulate it. DeAR's seconds are from one iteration to the next."""
        ends = [self._iteration()]
        if self.how.gradients == "dear":
            ends.append(self._iteration(ends[0]))
        spans = simulate(self.activities)
        stop = [max(spans[index].stop for index in end) for end in ends]
        return Iteration(stop[-1] - (stop[0] if len(stop) > 1 else 0.0), {}, self.activities, spans)

    def _add(
        self,
        kind: str,
        seconds: float,
        uses: tuple[str, ...],
        after: Sequence[int],
        device: int = 0,
    ) -> int:
        self.activities.append(
            Activity(kind, 0.0 if kind in self.free else seconds, uses, list(after), device=device)
        )
        return len(self.activities) - 1

    def _message(
        self, kind: str, elements: float, after: Sequence[int], device: int = 0, share: float = 1.0
    ) -> int:
        return self._add(
            kind, share * self.cluster.seconds(kind, elements), ("network",), after, device
        )

    def _iteration(self, before: list[int] | None = None) -> list[int]:
        """Plan one; returns what ends it."""
        how = self.how
        items = [item for item in self.work.items if how.kfac or item.part == PASSES]
        gathers = before[1:] if before and how.gradients == "dear" else []
        last, ready, filled, open_, scattered = (before or [None])[0], {}, 0, [], []
        passes = [index for index, item in enumerate(items) if item.forward]
        for index, item in enumerate(items):
            after = [] if last is None else [last]
            # a layer's weights are there once their group has come
            if index in passes[: len(gathers)]:
                after.append(gathers[passes.index(index)])
            last = self._add(item.part, item.seconds, ("gpu 0",), after)
            if item.factor is not None:
                ready[item.factor] = last
            if item.gradient:
                filled += item.gradient
                open_.append(last)
                if how.gradients != "after" and filled >= how.bucket:
                    scattered.append((filled, self._gradients(filled, open_)))
                    filled, open_ = 0, []
        assert last is not None  # an iteration has passes
        if filled:
            scattered.append((filled, self._gradients(filled, [*open_, last])))
        sent = [index for _, index in scattered]
        if how.gradients == "dear":
            return [last, *self._gathers(scattered, len(passes))]
        if not how.kfac:
            return [last, *sent]
        if how.placement == "owner":
            return self._owners([last, *sent])
        return self._inverses([last, *sent, *self._factors(ready, last)])

    def _gradients(self, elements: int, after: Sequence[int]) -> int:
        return self._message(
            GRADIENT_MESSAGES, elements, after, share=0.5 if self.how.gradients == "dear" else 1.0
        )

    def _gathers(self, scattered: list[tuple[int, int]], layers: int) -> list[int]:
        """The all-gathers, first layers first; for every layer the one that brings its weights."""
        done = [index for _, index in scattered]
        total, numbers, covered = sum(n for n, _ in scattered), [], 0.0
        for elements, _ in reversed(scattered):
            sent_at = self._message(GRADIENT_MESSAGES, elements, done, share=0.5)
            covered += elements / total * layers
            numbers += [sent_at] * (round(covered) - len(numbers))
        return numbers

    def _factors(self, ready: dict[int, int], last: int) -> list[int]:
        """Messages of new factors."""
        order = list(ready)
        computing = [
            index for index, activity in enumerate(self.activities) if activity.uses == ("gpu 0",)
        ]
        clock = dict(
            zip(
                computing,
                accumulate(self.activities[activity].seconds for activity in computing),
                strict=True,
            )
        )
        elements = [self.work.factors[number].elements for number in order]
        alpha, beta = self.cluster.collect or self.cluster.reduce
        groups = fused(
            self.how.fusion,
            elements,
            [clock[ready[number]] for number in order],
            alpha,
            beta,
            self.how.buffer,
        )
        groups = self.how.groups or [[order[number] for number in group] for group in groups]
        after = [last] if self.how.fusion == "after" else []
        ends = []
        for group in groups:
            size, ready_after = (
                sum(self.work.factors[number].elements for number in group),
                [*after, *(ready[number] for number in group)],
            )
            ends += self._handled(FACTOR_MESSAGES, self.cluster.handling, size, ready_after)
            ends.append(self._message(FACTOR_MESSAGES, size, ready_after))
        return ends

    def _handled(
        self, kind: str, line: Line, elements: int, after: Sequence[int], device: int = 0
    ) -> list[int]:
        if not any(line) or kind in self.free:
            return []
        return [self._add(HANDLE, line[0] + line[1] * elements, (f"gpu {device}",), after, device)]

    def placed(self) -> Placed:
        """Return where factors are inverted."""
        if self.how.inverters is not None:
            return replace(
                assign("everywhere", self.work.factors, self.cluster.gpus),
                inverters=self.how.inverters,
            )
        small = self.cluster.small if self.how.small is None else below(self.how.small)
        return assign(
            self.how.placement,
            self.work.factors,
            self.cluster.gpus,
            small=small,
            fraction=self.how.fraction,
        )

    def _inverses(self, started: list[int]) -> list[int]:
        """Every GPU inverts what it sends, the largest first, then what all invert."""
        placed, factors, ends = self.placed(), self.work.factors, []
        order = sorted(range(len(factors)), key=lambda number: (-factors[number].size, number))
        everywhere = sum(
            self.cluster.invert(factors[number].size)
            for number in order
            if placed.inverters[number] == EVERYWHERE
        )
        last: dict[int, int] = {}
        for number in order:
            learner = placed.inverters[number]
            if learner != EVERYWHERE:
                last[learner] = self._add(
                    INVERSION,
                    self.cluster.invert(factors[number].size),
                    (f"gpu {learner}",),
                    [last[learner]] if learner in last else started,
                    learner,
                )
                if placed.receivers(number):
                    ends += self._handled(
                        INVERSE_MESSAGES,
                        self.cluster.handing_out,
                        factors[number].elements,
                        [last[learner]],
                        learner,
                    )
                    ends.append(
                        self._message(
                            INVERSE_MESSAGES, factors[number].elements, [last[learner]], learner
                        )
                    )
        busiest = {*last, 0}
        return ends + [
            self._add(
                INVERSION,
                everywhere,
                (f"gpu {learner}",),
                [last[learner]] if learner in last else started,
                learner,
            )
            for learner in busiest
        ]

    def _owners(self, started: list[int]) -> list[int]:
        """DP-KFAC: every layer's owner inverts both factors and sends the preconditioned
        gradient.
        """
        last, ends = {}, []
        weights, inverters = self.work.weights(), self.placed().inverters[::2]
        for layer, learner in enumerate(inverters):
            seconds = sum(
                self.cluster.invert(factor.size)
                for factor in self.work.factors[2 * layer : 2 * layer + 2]
            )
            last[learner] = self._add(
                INVERSION,
                seconds,
                (f"gpu {learner}",),
                [last[learner]] if learner in last else started,
                learner,
            )
            ends.append(self._message(INVERSE_MESSAGES, weights[layer], [last[learner]], learner))
        return ends


SENDS = (GRADIENT_MESSAGES, FACTOR_MESSAGES, INVERSE_MESSAGES)
