"""Measured learners: what the store has of their steps, and a model that predicts a step over other
networks.

A prediction takes the seconds of computing from one measurement of the run over an unlimited
network (of K-FAC: as D-KFAC), and what a message costs from what the processes found at the start
of any measurement over the network in question, before the first step: alpha and beta of a gather
and of broadcasts. What each algorithm makes of these is the timeline's. Predicted numbers are
called so wherever they stand.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from commsweep.config import flatten
from commsweep.config.execution import bucket
from commsweep.config.labels import describe
from commsweep.second_order.placement import factors_of
from commsweep.store import Row, Store
from commsweep.timing.timeline.iterations import (
    FACTOR_MESSAGES,
    GRADIENT_MESSAGES,
    PASSES,
    Algorithm,
    Cluster,
    Item,
    Line,
    Work,
    iteration,
)
from commsweep.timing.timeline.learners import step as exchanging
from commsweep.timing.timeline.pipelines import Network as Wire

ALGORITHM = {
    ("after", "everywhere"): "D-KFAC",
    ("after", "spread"): "MPD-KFAC",
    ("pipelined", "balanced"): "SPD-KFAC",
}
FUSIONS = {
    "after": "after the backward",
    "layer": "layer by layer",
    "threshold": "by threshold",
    "pipelined": "pipelined",
}


TWICE = ("powersgd", "dion", "cltk")  # one message depends on what arrived of another
# a frame back for every two that come, over a link that is full both ways
ACKNOWLEDGED = 1 + 66 / (2 * 1448)


@dataclass(frozen=True)
class LearnerNetwork:
    """The number of learners, and their links."""

    learners: int
    bandwidth: float = 0.0  # bits a second of each one's link; 0: as the machine has it
    latency: float = 0.0

    @property
    def unlimited(self) -> bool:
        """Return whether the links are as the machine has them."""
        return not (self.bandwidth or self.latency)


@dataclass(frozen=True)
class LearnerStep:
    """A measurement: a run over a wiring."""

    row: Row

    @property
    def kfac(self) -> bool:
        """Return whether gradients are preconditioned."""
        return self.row["run"].get("kfac") is not None

    @property
    def network(self) -> LearnerNetwork:
        """The learners and their links."""
        wiring = self.row["wiring"]
        return LearnerNetwork(
            self.row["run"]["grad"]["learners"], wiring["bandwidth"], wiring["latency"]
        )

    @property
    def method(self) -> str:
        """Return its run, in words."""
        return describe(flatten(self.row["run"]))

    @property
    def fusion(self) -> str:
        """Return which factors travel together."""
        return self.row["wiring"]["fusion"]

    @property
    def placement(self) -> str:
        """Return where factors are inverted."""
        return self.row["wiring"]["placement"]

    @property
    def algorithm(self) -> str:
        """Return its name: S-SGD, D-KFAC, ..., or how its factors travel."""
        if not self.kfac:
            return "S-SGD"
        kind = self.fusion, self.placement
        return ALGORITHM.get(
            kind, f"K-FAC, factors {FUSIONS[self.fusion]}, inverted {self.placement}"
        )

    @property
    def timing(self) -> dict[str, Any]:
        """Return what was measured of a step."""
        return self.row["timing"]

    @property
    def seconds(self) -> float:
        """Return the seconds of a step: mean over the learners of the middle half of the steps."""
        return self.timing["step_seconds"]

    @property
    def parts(self) -> dict[str, float]:
        """Exposed seconds by part."""
        return self.timing["parts"]


def measurements(store: Store, names: Iterable[str] | None = None) -> list[LearnerStep]:
    """The store's measurements that have a step time, of these ids, if given."""
    names_wanted = None if names is None else set(names)
    return [
        LearnerStep(row)
        for row in store.learner_rows()
        if row.get("timing") and (names_wanted is None or row["id"] in names_wanted)
    ]


class LearnerModel:
    """Predictions of steps, from the measurements that calibrate them."""

    def __init__(self, steps_: list[LearnerStep]) -> None:
        self.bases = {
            measurement.row["run_id"]: measurement
            for measurement in steps_
            if measurement.network.unlimited
            and (not measurement.kfac or measurement.algorithm == "D-KFAC")
        }
        probed: dict[LearnerNetwork, list[dict[str, Line]]] = {}
        for measurement in steps_:
            if measurement.timing.get("costs"):
                probed.setdefault(measurement.network, []).append(measurement.timing["costs"])
        self.lines = {
            network: {
                kind: (
                    median(cost[kind][0] for cost in costs),
                    median(cost[kind][1] for cost in costs),
                )
                for kind in costs[0]
            }
            for network, costs in probed.items()
        }

    def base(self, measurement: LearnerStep) -> LearnerStep | None:
        """The measurement that its computing is taken from."""
        return self.bases.get(measurement.row["run_id"])

    def fitted(self, measurement: LearnerStep) -> bool:
        """Return whether its own step went into the model."""
        return self.base(measurement) is measurement

    def step(self, measurement: LearnerStep) -> float | None:
        """Predicted seconds of its step; None where a calibration is missing."""
        base = self.base(measurement)
        if base is None or measurement.network not in self.lines or base.network not in self.lines:
            return None
        return self._kfac(measurement, base) if measurement.kfac else self._plain(measurement, base)

    def _line(
        self, network: LearnerNetwork, base: LearnerStep, phase: str, elements: float
    ) -> Line:
        """Return the line of a gather: as probed, and what is beyond that."""
        alpha, beta = self.lines[network]["gather"]
        return alpha, max(0.0, beta + self._beyond(base, phase, elements))

    def _beyond(self, base: LearnerStep, phase: str, elements: float) -> float:
        """Seconds an element that `base` needed beyond the probe on its own network: for copies and
        sums.
        """
        alpha, beta = self.lines[base.network]["gather"]
        return (base.parts[phase] - alpha) / elements - beta

    def _plain(self, measurement: LearnerStep, base: LearnerStep) -> float:
        elements = base.row["gradients"]["dense"] // 4
        alpha, beta = self._line(measurement.network, base, GRADIENT_MESSAGES, elements)
        return base.parts[PASSES] + alpha + beta * elements

    def _kfac(self, measurement: LearnerStep, base: LearnerStep) -> float:
        timing = base.timing
        factors = factors_of(timing["sizes"])
        elements = sum(factor.elements for factor in factors)
        gradient = base.row["gradients"]["dense"] // 4
        lines = self.lines[measurement.network]
        c0, c1 = self.lines[base.network]["inversion"]
        scale = base.parts["inversion"] / sum(c0 + c1 * size**3 for size in timing["sizes"])
        alpha, beta = _shared(lines["handling"], measurement)
        cluster = Cluster(
            measurement.network.learners,
            self._line(measurement.network, base, GRADIENT_MESSAGES, gradient),
            lines["broadcast"],
            lambda size: scale * (c0 + c1 * size**3),
            collect=self._line(measurement.network, base, FACTOR_MESSAGES, elements),
            handling=(alpha, beta + max(0.0, self._beyond(base, FACTOR_MESSAGES, elements))),
            handing_out=_shared(lines["handing_out"], measurement),
        )
        ready = [0.0, *timing["ready"]]
        items = [
            Item(after - before, PASSES, factor=number)
            for number, before, after in zip(timing["order"], ready, ready[1:], strict=False)
        ]
        # What is computed after the messages: averages, preconditioning, the update.
        remaining = (
            sum(base.parts[phase] for phase in (PASSES, "factors", "preconditioning")) - ready[-1]
        )
        items[-1] = replace(items[-1], gradient=gradient)
        how = Algorithm(
            fusion=measurement.fusion,
            placement=measurement.placement,
            gradients="after",
            groups=measurement.timing["groups"],
            inverters=measurement.timing["inverters"],
        )
        return iteration(Work(items, factors), cluster, how).seconds + remaining


def errors(steps_: list[LearnerStep]) -> list[float]:
    """Return the errors of the predictions, as shares of what was measured; measurements that went
    into the model are left out.
    """
    model = LearnerModel(steps_)
    return [
        guess / measurement.seconds - 1
        for measurement in steps_
        if not model.fitted(measurement) and (guess := model.step(measurement)) is not None
    ]


def misordered(steps_: list[LearnerStep], share: float) -> list[tuple[str, str]]:
    """Pairs over one network whose steps differ by more than this share, and which the prediction
    orders otherwise.
    """
    model = LearnerModel(steps_)
    guesses = [
        (measurement, guess)
        for measurement in steps_
        if (guess := model.step(measurement)) is not None
    ]
    return [
        (faster.algorithm, slower.algorithm)
        for faster, first in guesses
        for slower, second in guesses
        if faster.network == slower.network
        and faster.seconds * (1 + share) < slower.seconds
        and first >= second
    ]


class ExchangeModel:
    """Predicted steps of plain S-SGD over links that nobody probed: computing, packing and what the
    exchanges take on this machine from the run's own measurement over unlimited links; the
    latencies and bytes of the others are known. A shared machine is not always as fast: both
    measurements tell what the training thread needed of a core.

    Everyone sends its message to everyone else over its own link, once that one has said that it
    waits: two latencies and n - 1 times the message's bytes, less what a shaped link's bucket lets
    through at once. What a learner waited without any latency, because another was later, is no
    part of computing; the timeline knows what late links make of that, of what is computed once the
    last message is under way, and of cores that learners share. What relays took of a core they
    passed frames on for so long: that is a link of its own. Messages whose length depends on the
    data need another exchange, of their lengths; factors of low rank go in two. The first learner's
    running statistics, and vectors, which are not compressed, travel while the rest is. Learners
    that train apart do so once in `interval` steps for every fragment, with one other learner where
    they meet in pairs; what they use late may travel meanwhile, but for the statistics.
    """

    def __init__(self, steps_: list[LearnerStep]) -> None:
        self.bases = {
            measurement.row["run_id"]: measurement
            for measurement in steps_
            if measurement.network.unlimited and not measurement.kfac
        }

    def step(self, measurement: LearnerStep) -> float | None:
        """Predicted seconds of its step; None without a measurement to begin from, or where
        learners own shards.
        """
        base = self.bases.get(measurement.row["run_id"])
        if base is None or base.row["run"]["grad"].get("sharded"):
            return None
        grad = base.row["run"]["grad"]
        outer, kind = grad.get("outer") or {}, grad["compressor"]["kind"]
        transports = base.row["transport"]
        lengths, statistics = (
            any(sent.get(kind) for sent in transports) for kind in ("lengths", "statistics")
        )
        exchanges = 1 + (kind in TWICE) + lengths
        interval, fragments = outer.get("interval", 1), outer.get("fragments", 1)
        messages = fragments + (fragments > 1)  # what is in no block is a fragment of its own
        rounds = messages * (base.row["steps"] // interval)
        if not rounds:
            return None
        # What is not compressed is on its way while the rest is.
        early = kind != "none" and not outer
        left_out = ("evaluation", "statistics") if early else ("evaluation",)
        sent = (
            max(sum(n for kind, n in sent.items() if kind not in left_out) for sent in transports)
            / rounds
        )
        if early and not grad.get("compress_vectors"):
            sent -= base.row["gradients"].get("vector.up", 0.0)
        rate = measurement.network.bandwidth
        link = Wire(rate, burst=bucket(rate) if rate else 0.0)
        share, learners = messages / interval, measurement.network.learners
        meeting = 2 if outer.get("peers") == "pairs" else learners
        wire = max(
            0.0,
            link.seconds((meeting - 1) * sent) * ACKNOWLEDGED - link.spare,
            measurement.timing.get("relayed", 0.0) / share,
        )
        waited, meanwhile = (base.timing.get(kind, 0.0) / share for kind in ("waited", "meanwhile"))
        if outer.get("overlap"):  # that is told apart: all computing of so many steps
            meanwhile = 0.0
        # How fast the machine was when this was measured. Earlier versions told none of these.
        computed_now, computed_then = (of.timing.get("computed") for of in (measurement, base))
        pace = computed_now / computed_then if computed_now and computed_then else 1.0
        computing, cores = (
            pace * (base.seconds / share - waited),
            base.row["cores"] * meeting / learners,
        )
        core = min(1.0, cores / meeting)

        def waits(exchanges: int, wire: float) -> float:
            late = exchanging(
                meeting,
                cores,
                core * computing,
                measurement.network.latency,
                wire,
                exchanges,
                waited,
                core * pace * meanwhile,
            )
            return max(waited, late - computing)

        exposed = waits(exchanges, wire) - outer.get("overlap", 0) * share * (computing + waited)
        return share * (computing + max(exposed, waits(1, 0.0) if statistics else waited))


def _shared(line: Line, measurement: LearnerStep) -> Line:
    """Seconds of the processor where there are fewer cores than learners."""
    share = max(1.0, measurement.network.learners / measurement.row["cores"])
    return share * line[0], share * line[1]
