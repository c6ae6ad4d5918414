"""When tasks happen that need resources and wait for each other: an event-driven simulation, and pipelines in it.

A task takes all its resources for its duration; who depends on it waits for a further `delay` (a latency). Pipelines
are one use: computations need their device (and a core of the machine), messages their link. Collectives and
factor inversions are others.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import count


@dataclass
class Task:
    """One thing that happens. `after`: places of earlier tasks in the list; of waiting tasks the one with the lowest
    `rank` goes first."""

    name: str
    seconds: float
    uses: tuple[str, ...] = ()
    after: list[int] = field(default_factory=list)
    delay: float = 0.0
    rank: float = 0.0


@dataclass(frozen=True)
class Span:
    """When a task began and ended."""

    start: float
    stop: float


def simulate(tasks: list[Task], capacity: dict[str, int] | None = None) -> list[Span]:
    """Spans of all tasks; a resource serves `capacity` of them at once (default 1), none is interrupted.

    Raises ValueError when some wait for each other for ever.
    """
    free: dict[str, int] = defaultdict(lambda: 1, capacity or {})
    missing = [len(task.after) for task in tasks]
    followers: list[list[int]] = [[] for _ in tasks]
    for place, task in enumerate(tasks):
        for other in task.after:
            followers[other].append(place)
    waiting: dict[str, list[tuple[float, int, int]]] = defaultdict(list)
    spans: list[Span | None] = [None] * len(tasks)
    order = count()
    # (time, turn, task, whether it ends there; else it becomes ready)
    events = [(0.0, next(order), place, False) for place, left in enumerate(missing) if not left]
    while events:
        now, released, ready = events[0][0], set(), []
        while events and events[0][0] == now:  # all that happens at once, before anything begins: ranks decide
            _, _, place, ends = heapq.heappop(events)
            if not ends:
                heapq.heappush(ready, (tasks[place].rank, next(order), place))
                continue
            for name in tasks[place].uses:
                free[name] += 1
                released.add(name)
            for other in followers[place]:
                missing[other] -= 1
                if not missing[other]:
                    at = max(spans[one].stop + tasks[one].delay for one in tasks[other].after)
                    heapq.heappush(events, (at, next(order), other, False))
        while True:
            for name in released:
                for _ in range(min(free[name], len(waiting[name]))):
                    heapq.heappush(ready, heapq.heappop(waiting[name]))
            if not ready:
                break
            while ready:
                entry = heapq.heappop(ready)
                place, task = entry[2], tasks[entry[2]]
                busy = next((name for name in task.uses if free[name] < 1), None)
                if busy is not None:
                    heapq.heappush(waiting[busy], entry)
                    continue
                for name in task.uses:
                    free[name] -= 1
                spans[place] = Span(now, now + task.seconds)
                heapq.heappush(events, (now + task.seconds, next(order), place, True))
    if any(span is None for span in spans):
        raise ValueError(f"{sum(span is None for span in spans)} tasks wait for each other")
    return spans
