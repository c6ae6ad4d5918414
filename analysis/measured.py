"""Measured pipelines: what the store has of them, and a model of each that predicts its step over other networks.

A prediction takes the CPU seconds of each stage's tasks from the run's own measurement over an unlimited network, and
fits one number to that measurement's step: the seconds of a core that handling a message takes at either end.
Everything else (bytes, order, cores, cables) is known. Predicted numbers are called so wherever they stand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from commsweep.analysis.labels import describe
from commsweep.analysis.timeline.pipelines import SCHEDULES, TORCH, Network, Times, step_seconds
from commsweep.experiments.config import flatten
from commsweep.experiments.errors import UserError
from commsweep.experiments.store import FINISHED, Row, Store

CAUTION = ("predictions over links with a latency of some 10 ms were found 18 to 31 % too low on links that were not "
           "measured here; trust measured times there")
TOLERANCE = {"acc": 0.99, "ppl": 1.02}  # of the dense run's final quality: reached is as good as that


@dataclass(frozen=True)
class Measured:
    """One measurement: a run over a wiring."""

    row: Row

    @property
    def method(self) -> str:
        """Its compression in a few words."""
        return describe(flatten(self.row["run"]))

    @property
    def network(self) -> Network:
        """The network it was measured over."""
        return Network(self.row["wiring"]["bandwidth"], self.row["wiring"]["latency"])

    @property
    def schedule(self) -> str:
        """gpipe or 1f1b."""
        return self.row["wiring"]["schedule"]

    @property
    def seconds(self) -> float:
        """Median seconds of a step."""
        return self.row["timing"]["step_seconds"]

    @property
    def bytes_a_step(self) -> float:
        """Handed to send by all stages, framing included."""
        return sum(sum(stage["sent"].values()) for stage in self.row["transport"]) / self.row["steps"]

    @property
    def series(self) -> tuple[str, str]:
        """What it has in common with its measurements over other links."""
        return self.row["run_id"], self.schedule

    def times(self, handling: float = 0.0) -> Times:
        """What its parts take; bytes are of one microbatch's message, framing included."""
        row, own = self.row, self.row["timing"]["tasks"]
        messages = row["steps"] * row["run"]["microbatches"]
        sent = row["transport"]
        return Times(*([stage[what]["cpu"] for stage in own] for what in "FBU"),
                     fwd_bytes=[one["sent"]["fwd"] / messages for one in sent[:-1]],
                     bwd_bytes=[one["sent"]["bwd"] / messages for one in sent[1:]],
                     handling=handling, cores=row["cores"])


def measurements(store: Store, names: list[str] | None = None) -> list[Measured]:
    """The store's measurements that have a step time; of these ids, if given."""
    return [Measured(row) for row in store.pipelines()
            if row["timing"] and (names is None or row["id"] in names)]


class Model:
    """Predictions for one run and schedule, from its measurement over unlimited links."""

    def __init__(self, base: Measured) -> None:
        self.base, low, high = base, 0.0, base.seconds
        self._known: dict[Network, float] = {}  # tables and figures ask for the same ones
        for _ in range(20):  # the step grows with it
            middle = (low + high) / 2
            low, high = (middle, high) if self._step(middle, base.network) < base.seconds else (low, middle)
        self.handling = low

    def step(self, network: Network) -> float:
        """Predicted seconds of a step over these links."""
        if network not in self._known:
            self._known[network] = self._step(self.handling, network)
        return self._known[network]

    def _step(self, handling: float, network: Network) -> float:
        orders = SCHEDULES[self.base.schedule](len(self.base.times().forward), self.base.row["run"]["microbatches"])
        return step_seconds(orders, self.base.times(handling), network, TORCH)


def models(found: list[Measured]) -> dict[tuple[str, str], Model]:
    """A model for every series that has a measurement over an unlimited network without latency."""
    return {one.series: Model(one) for one in found if one.network == Network()}


# Quality, from the simulated runs.


def target(dense: list[dict[str, Any]]) -> tuple[str, float]:
    """(metric, value) that counts as reached, given the dense run's evaluations."""
    metric = "test_on_acc" if "test_on_acc" in dense[-1] else "test_on_ppl"
    return metric, dense[-1][metric] * TOLERANCE[metric[-3:]]


def steps_to(evaluations: list[dict[str, Any]], metric: str, value: float) -> int | None:
    """Steps until an evaluation first reaches the target; None if none does."""
    good = (lambda x: x >= value) if metric.endswith("acc") else (lambda x: x <= value)
    return next((one["step"] for one in evaluations if good(one[metric])), None)


def _evaluations(store: Store, run_id: str) -> list[dict[str, Any]]:
    row = store.folder(run_id).row()
    return store.folder(run_id).metrics() if row is not None and row["status"] == FINISHED else []


def is_dense(row: Row) -> bool:
    """Whether nothing is compressed at its boundaries."""
    return all(row["run"][side]["compressor"]["kind"] == "none" for side in ("fwd", "bwd")) and not row["run"]["at"]


def quality(store: Store, found: list[Measured]) -> tuple[str, float, dict[str, int | None]]:
    """(metric, target, steps to it by run id). Raises UserError without a finished simulation of the dense run."""
    dense = next((made for one in found if is_dense(one.row)
                  and (made := _evaluations(store, one.row["run_id"]))), None)
    if dense is None:
        raise UserError("the dense run has no finished simulation in this store, so there is no target quality; train "
                        "it with commsweep run, or commsweep links PLAN --only train")
    metric, value = target(dense)
    return metric, value, {one.row["run_id"]: steps_to(_evaluations(store, one.row["run_id"]), metric, value)
                           for one in found}
