"""Measured pipelines: what the store has of them, and a model of each that predicts its step over
other networks.

A prediction takes the CPU seconds of each stage's tasks from the run's own measurement over an
unlimited network, and fits one number to that measurement's step: the seconds of a core that
handling a message takes at either end. Everything else about the run (bytes, order, cores, cables)
is known. What is not about the run but about the machine, how much slower a process is after it has
waited, is fitted once to measurements over slow links (`Machine`). Where the step predicted has
been measured, too, what its tasks needed of a core tells how fast the machine was meanwhile: a
shared one is not always. Predicted numbers are called so wherever they stand.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from operator import itemgetter
from statistics import fmean
from typing import Any

import numpy as np

from commsweep.config import flatten
from commsweep.config.execution import Wiring, bucket
from commsweep.config.labels import describe
from commsweep.config.training import Delay
from commsweep.errors import UserError
from commsweep.store import FINISHED, Row, Store, read_json, write_json
from commsweep.timing.timeline.pipelines import (
    SCHEDULES,
    TORCH,
    WARM,
    Action,
    Cold,
    Engine,
    Network,
    Times,
    continuous,
    step_seconds,
)

TOLERANCE = {
    "acc": 0.99,
    "ppl": 1.02,
}  # of the dense run's final quality: reached is as good as that


def network_of(wiring: Wiring) -> Network:
    """The links of a wiring, as the timeline knows them."""
    return Network(
        wiring.bandwidth,
        wiring.latency,
        links=tuple(Network(link.bandwidth, link.latency) for link in wiring.links),
    )


@dataclass(frozen=True)
class PipelineStep:
    """A run over a wiring, measured once or in several turns, of which it is the mean."""

    row: Row

    @property
    def method(self) -> str:
        """Return its compression in a few words."""
        return describe(flatten(self.row["run"]))

    @property
    def network(self) -> Network:
        """The network it was measured over."""
        return network_of(Wiring(**self.row["wiring"]))

    @property
    def schedule(self) -> str:
        """gpipe or 1f1b."""
        return self.row["wiring"]["schedule"]

    @property
    def orders(self) -> list[list[Action]]:
        """The order of each stage's passes."""
        run, stages = self.row["run"], len(self.row["timing"]["tasks"])
        if not late(run):
            return SCHEDULES[self.schedule](stages, run["microbatches"])
        delay, m = Delay.model_validate(run["delay"]), run["microbatches"]
        return continuous([delay.under_way(stage, stages, m) for stage in range(stages)], m)

    @property
    def engine(self) -> Engine:
        """Return how its messages go."""
        return TORCH["continuous" if late(self.row["run"]) else self.schedule]

    @property
    def seconds(self) -> float:
        """Median seconds of a step, in the mean of its turns."""
        return self.row["timing"]["step_seconds"]

    @property
    def bytes_a_step(self) -> float:
        """Handed to send by all stages, framing included."""
        return (
            sum(sum(stage["sent"].values()) for stage in self.row["transport"]) / self.row["steps"]
        )

    @property
    def series(self) -> tuple[str, str]:
        """Return what it has in common with its measurements over other links."""
        return self.row["run_id"], self.schedule

    @property
    def computed(self) -> float:
        """Seconds of a core that the tasks of a step need, all stages together."""
        often = {"F": self.row["run"]["microbatches"], "B": self.row["run"]["microbatches"], "U": 1}
        return sum(
            n * stage[kind]["cpu"]
            for stage in self.row["timing"]["tasks"]
            for kind, n in often.items()
        )

    def times(
        self, handling: float = 0.0, machine: Machine | None = None, pace: float = 1.0
    ) -> Times:
        """Return what its parts take, `pace` times as long; bytes are of one microbatch's message,
        framing included.
        """
        row, tasks = self.row, self.row["timing"]["tasks"]
        messages = row["steps"] * row["run"]["microbatches"]
        sent = row["transport"]
        return Times(
            *([pace * stage[kind]["cpu"] for stage in tasks] for kind in "FBU"),
            fwd_bytes=[nbytes["sent"]["fwd"] / messages for nbytes in sent[:-1]],
            bwd_bytes=[nbytes["sent"]["bwd"] / messages for nbytes in sent[1:]],
            handling=pace * handling,
            cores=row["cores"],
            tied=sent[0]["tied"] / row["steps"],
            meets=late(row["run"]) and row["run"]["optim"].get("clip", 0) > 0,
            **({} if machine is None else {"cold": machine.cold, "wake": machine.wake}),
        )


def late(run: dict[str, Any]) -> bool:
    """Return whether the gradients of a recorded Run are of old weights."""
    return bool(run.get("delay") and run["delay"]["steps"])


def measurements(store: Store, names: list[str] | None = None) -> list[PipelineStep]:
    """The store's measurements of one pipeline that have a step time; of these ids, if given. Turns
    of one thing are one, under the id of the first.
    """
    turns: dict[tuple[str, str], list[tuple[int, Row]]] = {}
    for row in store.pipelines():
        if (
            row["timing"]
            and row["run"]["grad"]["learners"] == 1
            and (names is None or row["id"] in names)
        ):
            wiring = Wiring(**row["wiring"])
            key = row["run_id"], wiring.model_copy(update={"turn": 0}).model_dump_json()
            turns.setdefault(key, []).append((wiring.turn, row))
    return [
        PipelineStep(_mean([row for _, row in sorted(rows, key=itemgetter(0))]))
        for rows in turns.values()
    ]


def _mean(turns: list[Row]) -> Row:
    """Return the mean row of several; what a chart shows is of the first."""
    if len(turns) == 1:
        return turns[0]
    timings = [row["timing"] for row in turns]
    tasks = [
        {
            kind: {
                clock: fmean(task[kind][clock] for task in stage) for clock in ("seconds", "cpu")
            }
            for kind in stage[0]
        }
        for stage in zip(*(timing["tasks"] for timing in timings), strict=True)
    ]
    waits = [
        [task_ for task in stage for task_ in task]
        for stage in zip(*(timing.get("waits", []) for timing in timings), strict=True)
    ]
    return turns[0] | {  # pyright: ignore[reportReturnType]
        "timing": timings[0]
        | {
            "step_seconds": fmean(timing["step_seconds"] for timing in timings),
            "turns": [timing["step_seconds"] for timing in timings],
            "steps": sum(timing["steps"] for timing in timings),
            "tasks": tasks,
            "waits": waits,
            "spread": [fmean(timing["spread"][side] for timing in timings) for side in range(2)],
        }
    }


@dataclass(frozen=True)
class Machine:
    """The constants of a machine, fitted to measurements over slow links: how much longer tasks
    take after a wait, and the handling of messages (in multiples of what it takes else), and what
    crossing a link with a latency takes beyond that.
    """

    cold: dict[str, Cold] = field(default_factory=dict)
    wake: Cold = WARM
    crossing: float = 0.0

    def network(self, network: Network) -> Network:
        """The links asked for, as this machine shapes them."""
        return replace(
            network,
            burst=bucket(network.bandwidth) if network.bandwidth else 0.0,
            crossing=self.crossing,
            links=tuple(self.network(link) for link in network.links),
        )


def machine_of(store: Store, names: list[str]) -> Machine:
    """The machine that the store's measurements of these ids were taken on. What was fitted is kept
    beside them, for the fit takes a minute.
    """
    steps = measurements(store, names)
    path, ids = (
        store.root / "pipelines" / "machine.json",
        sorted(measurement.row["id"] for measurement in steps),
    )
    with suppress(OSError, UserError, TypeError, KeyError):
        cached = read_json(path)
        if cached["of"] == ids:
            constants = cached["machine"]
            return Machine(
                {kind: Cold(**line) for kind, line in constants["cold"].items()},
                Cold(**constants["wake"]),
                constants["crossing"],
            )
    machine = calibrated(steps)
    if ids:
        with suppress(OSError):  # a store may be read-only
            write_json(path, {"of": ids, "machine": asdict(machine)})
    return machine


def calibrated(steps_: list[PipelineStep]) -> Machine:
    """The machine that these measurements were taken on; they must include some over unlimited
    links, and over slow links of the same runs. Without them nothing is known of it.
    """
    warm = {
        measurement.series: measurement
        for measurement in steps_
        if measurement.network == Network()
    }
    slow = [
        measurement
        for measurement in steps_
        if measurement.series in warm
        and measurement.network != Network()
        and measurement.row["timing"].get("waits")
    ]
    if not slow:
        return Machine()
    waits_by_kind: dict[str, list[tuple[float, float]]] = {}
    for step_ in slow:
        tasks = warm[step_.series].row["timing"]["tasks"]
        for stage, waits in enumerate(step_.row["timing"]["waits"]):
            for kind, idle, busy in waits:
                waits_by_kind.setdefault(kind, []).append((idle, busy - tasks[stage][kind]["cpu"]))
    machine = Machine({kind: _cold(pairs) for kind, pairs in waits_by_kind.items()})
    best, width = _error(machine, warm, slow), {"slope": 50.0, "most": 2.0, "crossing": 0.001}
    for _ in range(24):  # a pattern search over three numbers; few evaluations, no derivatives
        for name, step in width.items():
            for sign in (1, -1):
                tried = _moved(machine, name, sign * step)
                if (error := _error(tried, warm, slow)) < best:
                    machine, best = tried, error
                    break
            else:
                width[name] = step / 2
    return machine


def _moved(machine: Machine, name: str, by: float) -> Machine:
    if name == "crossing":
        return replace(machine, crossing=max(0.0, machine.crossing + by))
    wake = machine.wake if machine.wake.most else Cold(0.0, 0.0, 1.0)
    return replace(machine, wake=replace(wake, **{name: max(0.0, getattr(wake, name) + by)}))


def _error(
    machine: Machine, warm: dict[tuple[str, str], PipelineStep], slow: list[PipelineStep]
) -> float:
    """Sum of the squared logarithms of predicted over measured."""
    fits = {series: PipelineModel(base, machine) for series, base in warm.items()}
    return sum(math.log(fits[step.series].step(step.network) / step.seconds) ** 2 for step in slow)


def _cold(pairs: list[tuple[float, float]]) -> Cold:
    """The curve that is closest to (seconds waited, seconds longer), in absolute terms."""
    idle, longer = (np.array(column) for column in zip(*pairs, strict=True))
    best, chosen = np.abs(longer).sum(), WARM
    for most in np.quantile(longer, (0.5, 0.6, 0.7, 0.8, 0.9)):
        for after in (0.0, 0.002, 0.004, 0.008, 0.012, 0.016, 0.024):
            for slope in (0.02, 0.04, 0.07, 0.1, 0.15, 0.2, 0.3):
                error = np.abs(longer - np.clip(slope * (idle - after), 0, max(0.0, most))).sum()
                if error < best:
                    best, chosen = error, Cold(after, slope, float(max(0.0, most)))
    return chosen


class PipelineModel:
    """Predictions for one run and schedule, from its measurement over unlimited links.

    pace: how much longer its tasks are to take than they did in that measurement.
    """

    def __init__(
        self, base: PipelineStep, machine: Machine | None = None, pace: float = 1.0
    ) -> None:
        self.base, self.machine, self.pace, low, high = (
            base,
            machine or Machine(),
            pace,
            0.0,
            base.seconds,
        )
        # tables and figures ask for the same ones
        self._known: dict[Network | tuple[Network, float], float] = {}
        for _ in range(20):  # the step grows with it
            middle = (low + high) / 2
            predicted = self._seconds(base.times(middle, self.machine), base.network)
            low, high = (middle, high) if predicted < base.seconds else (low, middle)
        self.handling = low

    def step(self, network: Network) -> float:
        """Predicted seconds of a step over these links."""
        if network not in self._known:
            self._known[network] = self._seconds(self.times(), network)
        return self._known[network]

    def measured(self, measurement: PipelineStep) -> float:
        """The same of a step that was measured, at the speed that the machine had then: what its
        tasks needed of a core says that, and includes what waits did to them.
        """
        pace = measurement.computed / self.base.computed
        if (key := (measurement.network, pace)) not in self._known:
            machine = self.machine if measurement is self.base else replace(self.machine, cold={})
            self._known[key] = self._seconds(
                self.base.times(self.handling, machine, pace), measurement.network
            )
        return self._known[key]

    def _seconds(self, times: Times, network: Network) -> float:
        network = self.machine.network(network)
        return step_seconds(self.base.orders, times, network, self.base.engine)

    def times(self) -> Times:
        """Return what the parts of a step take on this machine."""
        return self.base.times(self.handling, self.machine, self.pace)


def models(
    steps_: list[PipelineStep], machine: Machine | None = None
) -> dict[tuple[str, str], PipelineModel]:
    """A model for every series that has a measurement over an unlimited network without latency.

    The schedules of a run order the same computations: where their measurements needed more or less
    of a core for them, the machine's speed differed, and all are predicted at the mean.
    """
    bases = {
        measurement.series: measurement
        for measurement in steps_
        if measurement.network == Network()
    }
    computed: dict[str, list[float]] = {}
    for (run, _), base in bases.items():
        computed.setdefault(run, []).append(base.computed)
    return {
        series: PipelineModel(base, machine, fmean(computed[series[0]]) / base.computed)
        for series, base in bases.items()
    }


# Quality, from the simulated runs.


def target(dense: list[dict[str, Any]]) -> tuple[str, float]:
    """(metric, value) that counts as reached, given the dense run's evaluations."""
    metric = "test_on_acc" if "test_on_acc" in dense[-1] else "test_on_ppl"
    return metric, dense[-1][metric] * TOLERANCE[metric[-3:]]


def steps_to(evaluations: list[dict[str, Any]], metric: str, value: float) -> int | None:
    """Steps until an evaluation first reaches the target; None if none does."""
    good = (lambda x: x >= value) if metric.endswith("acc") else (lambda x: x <= value)
    return next(
        (evaluation["step"] for evaluation in evaluations if good(evaluation[metric])), None
    )


def _evaluations(store: Store, run_id: str) -> list[dict[str, Any]]:
    row = store.folder(run_id).row()
    return store.folder(run_id).metrics() if row is not None and row["status"] == FINISHED else []


def is_dense(row: Row) -> bool:
    """Return whether nothing is compressed at its boundaries."""
    return (
        all(row["run"][side]["compressor"]["kind"] == "none" for side in ("fwd", "bwd"))
        and not row["run"]["at"]
    )


def quality(store: Store, steps_: list[PipelineStep]) -> tuple[str, float, dict[str, int | None]]:
    """(metric, target, steps to it by run id). Raises UserError without a finished simulation of
    the dense run.
    """
    dense = next(
        (
            evaluations
            for measurement in steps_
            if is_dense(measurement.row)
            and (evaluations := _evaluations(store, measurement.row["run_id"]))
        ),
        None,
    )
    if dense is None:
        raise UserError(
            "the dense run has no finished simulation in this store, so there is no target "
            "quality; train it with commsweep run, or commsweep links PLAN --only train"
        )
    metric, value = target(dense)
    return (
        metric,
        value,
        {
            measurement.row["run_id"]: steps_to(
                _evaluations(store, measurement.row["run_id"]), metric, value
            )
            for measurement in steps_
        },
    )
