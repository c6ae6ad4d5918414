"""What the spans of all stages say of a step: its seconds, those of each stage's tasks, and one step to draw."""

from __future__ import annotations

from typing import Any

KEPT = 400  # steps whose times are remembered beyond an epoch
SKIPPED = 2  # first steps of a process, in which memory is allocated and kernels are loaded


def summary(timing: list[dict[str, Any]]) -> dict[str, Any]:
    """Seconds a step (median of the intervals between starts at stage 0), seconds and CPU seconds of each stage's
    tasks, and of one step, for a Gantt chart, the spans and when each message was sent and taken up."""
    began = timing[0]["began"]
    if len(began) <= SKIPPED + 1:
        return {}
    intervals = sorted(b - a for a, b in zip(began[SKIPPED:], began[SKIPPED + 1 :], strict=False))
    middle = intervals[len(intervals) // 2]
    shown = next(i for i in range(SKIPPED, len(began) - 1) if began[i + 1] - began[i] == middle)
    tasks_, gantt, messages = [], [], []
    for stage in timing:
        since, until = stage["began"][SKIPPED], stage["began"][-1]
        own: dict[str, list[tuple[float, float]]] = {}
        for what, _, start, stop, busy in stage["spans"]:
            if since <= start < until:
                own.setdefault(what, []).append((stop - start, busy))
        tasks_.append({what: {"seconds": _median([one for one, _ in many]), "cpu": _median([one for _, one in many])}
                       for what, many in own.items()})
        gantt.append([[what, chunk, start - began[shown], stop - began[shown]] for what, chunk, start, stop, _ in
                      stage["spans"] if began[shown] <= start < began[shown + 1]])
        messages.append([[what, way, chunk, when - began[shown]] for what, way, chunk, when in stage["passages"]
                         if began[shown] <= when < began[shown + 1]])
    return {"step_seconds": middle, "steps": len(intervals), "spread": [intervals[len(intervals) // 4],
                                                                        intervals[3 * len(intervals) // 4]],
            "tasks": tasks_, "gantt": gantt, "messages": messages}


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
