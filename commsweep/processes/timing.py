"""The times that processes report of their steps: the spans of a pipeline's stages, the parts of
learners' steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count, pairwise
from typing import Any

import torch.distributed as dist

from commsweep.collectives import Collectives, told_by_first
from commsweep.store import Row

KEPT = 400  # steps whose times are remembered beyond an epoch
SETTLED = 8  # first steps of a learner, in which what is fused is decided
WAITS = 200  # tasks whose waits are told
WIDE = 0.2  # quartiles further apart than this share of the median: measured again
TRIES = 6  # times at most, once the processes are older than
SETTLE = 75.0  # seconds: machines that reclaim idle memory stall young processes
NOTED = ("waited", "meanwhile", "computed")  # seconds that count up through all steps
SKIPPED = 2  # first steps of a process, in which memory is allocated and kernels are loaded


def summary(timing: list[dict[str, Any]]) -> dict[str, Any]:
    """Seconds a step (median of the intervals between starts at stage 0), seconds and CPU seconds
    of each stage's tasks, and of one step, for a Gantt chart, the spans and when each message was
    sent and taken up. waits: of the last tasks of each stage, what they are, how long the stage had
    waited before, and their CPU seconds.
    """
    began = timing[0]["began"]
    if len(began) <= SKIPPED + 1:
        return {}
    intervals = sorted(b - a for a, b in zip(began[SKIPPED:], began[SKIPPED + 1 :], strict=False))
    middle = intervals[len(intervals) // 2]
    shown = next(i for i in range(SKIPPED, len(began) - 1) if began[i + 1] - began[i] == middle)
    tasks, gantt, messages, waits = [], [], [], []
    for stage in timing:
        since, until = stage["began"][SKIPPED], stage["began"][-1]
        spans_by_kind: dict[str, list[tuple[float, float]]] = {}
        for kind, _, start, stop, busy in stage["spans"]:
            if since <= start < until:
                spans_by_kind.setdefault(kind, []).append((stop - start, busy))
        tasks.append(
            {
                kind: {
                    "seconds": _median([start for start, _ in many]),
                    "cpu": _median([stop for _, stop in many]),
                }
                for kind, many in spans_by_kind.items()
            }
        )
        spans = sorted(
            (start, stop, kind, busy)
            for kind, _, start, stop, busy in stage["spans"]
            if since <= start < until
        )
        waits.append(
            [
                [kind, round(start - before, 6), round(busy, 6)]
                for (_, before, _, _), (start, _, kind, busy) in pairwise(spans[-WAITS:])
            ]
        )
        gantt.append(
            [
                [kind, chunk, start - began[shown], stop - began[shown]]
                for kind, chunk, start, stop, _ in stage["spans"]
                if began[shown] <= start < began[shown + 1]
            ]
        )
        messages.append(
            [
                [kind, direction, chunk, when - began[shown]]
                for kind, direction, chunk, when in stage["passages"]
                if began[shown] <= when < began[shown + 1]
            ]
        )
    return {
        "step_seconds": middle,
        "steps": len(intervals),
        "spread": [intervals[len(intervals) // 4], intervals[3 * len(intervals) // 4]],
        "tasks": tasks,
        "gantt": gantt,
        "messages": messages,
        "waits": waits,
    }


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


class Calm:
    """Measurements by all processes together, again while something else has the machine; it begins
    with them.
    """

    def __init__(self) -> None:
        self.began = time.monotonic()

    def measure(self, take: Callable[[], Row | None]) -> Row | None:
        """Return what this process makes of it, with `tries`, how often it was taken; the first
        one's rows decide, of which the calmest counts.
        """
        calmest: Row | None = None
        for tries in count(1):
            row, first = take(), dist.get_rank() == 0
            spread = width(row) if first and row is not None else 0.0
            if calmest is None or not first or spread <= width(calmest):
                calmest = row
            again = (
                first
                and spread > WIDE
                and (tries <= TRIES or time.monotonic() - self.began < SETTLE)
            )
            if not told_by_first(again):
                return calmest and calmest | {"tries": tries}  # pyright: ignore[reportReturnType]


def width(row: Row) -> float:
    """Return how far apart the quartiles of a measurement's steps are, as a share of it: what
    something else had of the machine.
    """
    timing = row["timing"]
    return (timing["spread"][1] - timing["spread"][0]) / timing["step_seconds"] if timing else 0.0


class Steps:
    """Seconds of a learner's steps, by part, and what they say together."""

    def __init__(self, collectives: Collectives) -> None:
        self.steps: list[dict[str, Any]] = []
        self.collectives = collectives
        self._began, self._noted, self._before = 0.0, {}, {}

    def begin(self, task: Any) -> None:
        """A step begins."""
        self._before, self._noted, self._began = (
            self._seconds_by_part(task),
            self._counted(),
            time.perf_counter(),
        )

    def end(self, task: Any) -> None:
        """It is over."""
        seconds, counted, current = (
            time.perf_counter() - self._began,
            self._counted(),
            self._seconds_by_part(task),
        )
        kfac = dict(task.components).get("kfac")
        # a step with an exchange is another kind of step
        met = getattr(task.components["learners"], "met", False)
        kind = [kfac.collected, kfac.inverted] if kfac is not None else [False, met]
        self.steps.append(
            {
                "kind": kind,
                "seconds": seconds,
                **{name: counted[name] - self._noted[name] for name in NOTED},
                "parts": {
                    name: value - self._before.get(name, 0.0) for name, value in current.items()
                },
            }
        )

    def _counted(self) -> dict[str, float]:
        return dict(
            zip(
                NOTED,
                (self.collectives.waited, self.collectives.meanwhile, time.thread_time()),
                strict=True,
            )
        )

    @staticmethod
    def _seconds_by_part(task: Any) -> dict[str, float]:
        kfac = dict(task.components).get("kfac")
        return dict(kfac.seconds if kfac is not None else {}) | {
            "gradients": task.spent.get("learners", 0.0)
        }

    @staticmethod
    def summary(learner_steps: list[list[dict[str, Any]]], task: Any) -> dict[str, Any]:
        """Seconds a step and its parts, means over the learners and over the middle half of the
        steps of each kind.

        parts: the exposed time of each; "passes" is what is left: forward, backward and the
        optimizer. waited: within them, for what was under way or others had not sent yet.
        meanwhile: computed while the last message sent was under way. computed: of a core, by the
        thread that trains. ready: when each factor was there, of the first learner, with its place
        in the order of messages. spread: quartiles of a step beside others of its kind.
        """
        skipped = min(SETTLED, max(0, len(learner_steps[0]) - 4))
        learners = [steps[skipped:] for steps in learner_steps]
        if not learners[0]:
            return {}
        seconds_sum, sums, parts_sum, kinds, relative = 0.0, dict.fromkeys(NOTED, 0.0), {}, {}, []
        for index, learner in enumerate(learners[0]):
            kinds.setdefault(tuple(learner["kind"]), []).append(index)
        for turns in kinds.values():
            ranked = sorted(turns, key=lambda step_index: learners[0][step_index]["seconds"])
            middle = ranked[len(ranked) // 4 : len(ranked) - len(ranked) // 4]
            usual = learners[0][ranked[len(ranked) // 2]]["seconds"]
            relative += [learners[0][step_index]["seconds"] / usual for step_index in turns]
            weight = len(turns) / len(learners[0]) / len(middle) / len(learners)
            for learner_ in learners:
                for index in middle:
                    seconds_sum += weight * learner_[index]["seconds"]
                    for name in sums:
                        sums[name] += weight * learner_[index][name]
                    for name, value in learner_[index]["parts"].items():
                        parts_sum[name] = parts_sum.get(name, 0.0) + weight * value
        parts_sum["passes"] = seconds_sum - sum(parts_sum.values())
        relative.sort()
        kfac = dict(task.components).get("kfac")
        return {
            "step_seconds": seconds_sum,
            "steps": len(relative),
            "parts": parts_sum,
            **sums,
            "spread": [
                seconds_sum * relative[len(relative) // 4],
                seconds_sum * relative[3 * len(relative) // 4],
            ],
            **({} if kfac is None else kfac.profile()),
        }
