"""Finds the compression that reaches the target quality soonest over a given network: measured, or
predicted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from commsweep.config import Run, flatten, record
from commsweep.errors import UserError
from commsweep.store import Store
from commsweep.timing.measured_pipelines import (
    Machine,
    PipelineModel,
    PipelineStep,
    machine_of,
    measurements,
    models,
    quality,
)
from commsweep.timing.timeline.pipelines import Network

# What may differ between the run asked about and a candidate: the rest must be the same training.
FREE = ("fwd.", "bwd.", "at.", "seed", "microbatches")
APART = 0.05  # of a time: what differs by less is not chosen between for its speed


@dataclass(frozen=True)
class Choice:
    """A way to train, over the network asked about."""

    method: str
    schedule: str
    step_seconds: float
    steps: int
    measured: bool  # or predicted
    basis: tuple[str, ...]  # the measurement's and the run's ids

    @property
    def seconds(self) -> float:
        """Until the target."""
        return self.steps * self.step_seconds

    def text(self) -> str:
        """Return a line."""
        how = "measured" if self.measured else "predicted"
        return (
            f"{self.method}, {self.schedule}: {self.seconds:.1f} s ({self.steps} steps of "
            f"{1e3 * self.step_seconds:.0f} ms, {how}; from pipelines/{self.basis[0]} and run "
            f"{self.basis[1]})"
        )


@dataclass(frozen=True)
class Advice:
    """All choices that reach the target, fastest first, and the methods that do not."""

    metric: str
    target: float
    choices: list[Choice]
    missed: list[str]
    calibrated: bool = False  # predictions know what slow links do to this machine

    @property
    def close(self) -> list[Choice]:
        """Return those that predictions do not tell from the best: less than `APART` behind it,
        unless both are measured.
        """
        best = self.choices[0]
        return [
            choice
            for choice in self.choices[1:]
            if choice.seconds < (1 + APART) * best.seconds
            and not (choice.measured and best.measured)
        ]

    def record(self) -> dict[str, Any]:
        """For programs."""
        close = self.close
        return {
            "metric": self.metric,
            "target": self.target,
            "missed": self.missed,
            "calibrated": self.calibrated,
            "choices": [
                vars(choice) | {"seconds": choice.seconds, "close": choice in close}
                for choice in self.choices
            ],
        }


def advise(
    store: Store, run: Run, network: Network, calibration: list[str] | None = None
) -> Advice:
    """The choices for this training. Raises UserError when the store holds nothing to rest on.

    calibration: ids of measurements that say what slow links do to the machine; those that the
    store has.
    """
    measured = [measurement for measurement in measurements(store) if _same(measurement, run)]
    if not measured:
        raise UserError(
            "the store has no step times of this training: take some with commsweep links "
            "PLAN, or commsweep pipeline PRESET ... --steps 30 for each setting in "
            "question"
        )
    machine = machine_of(store, calibration or [])
    fits = models(measured, machine)
    metric, value, steps = quality(store, measured)
    choices, missed = [], []
    for series in dict.fromkeys(measurement.series for measurement in measured):
        series_steps = [measurement for measurement in measured if measurement.series == series]
        n = steps[series[0]]
        if n is None:
            missed.append(series_steps[0].method)
            continue
        exact = next((step for step in series_steps if step.network == network), None)
        if exact is None and series not in fits:
            continue
        choices.append(_choice(exact, fits.get(series), network, n))
    if not choices:
        raise UserError(
            "no setting in the store reaches the target over a network like this: "
            + (", ".join(missed) or "none has a measurement over unlimited links to predict from")
        )
    return Advice(
        metric,
        value,
        sorted(choices, key=lambda choice: choice.seconds),
        sorted(set(missed)),
        machine != Machine(),
    )


def _choice(
    exact: PipelineStep | None, model: PipelineModel | None, network: Network, steps: int
) -> Choice:
    if exact is not None:
        step, seconds = exact, exact.seconds
    else:
        assert model is not None  # a choice is measured or predicted
        step, seconds = model.base, model.step(network)
    return Choice(
        step.method,
        step.schedule,
        seconds,
        steps,
        exact is not None,
        (step.row["id"], step.row["run_id"]),
    )


def regrets(
    steps_: list[PipelineStep],
    fits: dict[tuple[str, str], PipelineModel],
    steps: dict[str, int | None],
) -> list[tuple[PipelineStep, PipelineStep, float]]:
    """(advised, best, time lost) for the settings of each training measured over the same links:
    what the shortest predicted time to the target costs over the shortest measured one, as a share
    of it.
    """
    groups: dict[Any, list[PipelineStep]] = {}
    for step in steps_:
        if steps[step.row["run_id"]] is not None and step.series in fits:
            groups.setdefault((_training(step.row["run"]), step.network), []).append(step)
    regrets = []
    for group in groups.values():

        def needed(measurement: PipelineStep, step: float) -> float:
            count = steps[measurement.row["run_id"]]
            assert count is not None  # those that never arrive are in no group
            return count * step

        advised = min(group, key=lambda step: needed(step, fits[step.series].step(step.network)))
        best = min(group, key=lambda step: needed(step, step.seconds))
        if len(group) > 1:
            regrets.append(
                (advised, best, needed(advised, advised.seconds) / needed(best, best.seconds) - 1)
            )
    return regrets


def _same(measurement: PipelineStep, run: Run) -> bool:
    return _training(measurement.row["run"]) == _training(record(run))


def _training(run: dict[str, Any]) -> frozenset[tuple[str, str]]:
    """The settings that all candidates must share."""
    return frozenset(
        (key, repr(value))
        for key, value in flatten(run).items()
        if not key.startswith(FREE) and value is not None
    )
