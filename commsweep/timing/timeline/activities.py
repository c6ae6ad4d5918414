"""An event-driven simulation of activities that need resources and wait for each other.

An activity takes all its resources for its duration; who depends on it waits for a further `delay`
(a latency). Computations need their device (and a core of the machine), messages their cable. How
long one takes may depend on how long its first resource was idle before: a processor that waited
computes slower at first, a token bucket has filled up.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

FORWARD, BACKWARD, INPUTS, WEIGHTS, UPDATE = "forward", "backward", "inputs", "weights", "update"
# Of a message: on its cable, there after its latency, its receiver's word, a core at either end.
SEND, ARRIVE, ASK, HANDLE = "send", "arrive", "ask", "handle"


@dataclass
class Activity:
    """An activity of a timeline. `after`: places of earlier ones in the list; of those waiting the
    lowest `rank` is first.

    kind: one of the names above, or another use's own. device: where it happens; of a message,
    where it comes from.
    """

    kind: str
    seconds: float
    uses: tuple[str, ...] = ()
    after: list[int] = field(default_factory=list)
    delay: float = 0.0
    rank: float = 0.0
    step: int = 0
    device: int | None = None
    stage: int | None = None
    microbatch: int | None = None
    target: int | None = None  # device that a message goes to
    # seconds more by how long its first resource was idle
    idle: Callable[[float], float] | None = None
    # seconds of work that its first resource saves up while idle, as a token bucket does
    spare: float = 0.0


@dataclass(frozen=True)
class Span:
    """When an activity began and ended."""

    start: float
    stop: float


def simulate(activities: list[Activity], capacity: dict[str, int] | None = None) -> list[Span]:
    """Spans of all activities; a resource serves `capacity` of them at once (default 1), none is
    interrupted.

    Raises ValueError when some wait for each other for ever.
    """
    free: dict[str, int] = defaultdict(lambda: 1, capacity or {})
    missing = [len(activity.after) for activity in activities]
    followers: list[list[int]] = [[] for _ in activities]
    for index, activity in enumerate(activities):
        for earlier in activity.after:
            followers[earlier].append(index)
    waiting: dict[str, list[tuple[float, int, int]]] = defaultdict(list)
    spans: dict[int, Span] = {}
    order, used = (
        count(),
        dict.fromkeys((name for activity in activities for name in activity.uses[:1]), 0.0),
    )
    saved: dict[str, float] = {}  # of what a resource saves up while idle, what is left
    # (time, turn, activity, whether it ends there; else it becomes ready)
    events = [(0.0, next(order), index, False) for index, left in enumerate(missing) if not left]
    while events:
        time, released, ready = events[0][0], set(), []
        # all that happens at once, before anything begins: ranks decide
        while events and events[0][0] == time:
            _, _, index, ends = heapq.heappop(events)
            if not ends:
                heapq.heappush(ready, (activities[index].rank, next(order), index))
                continue
            for name in activities[index].uses:
                free[name] += 1
                released.add(name)
                used[name] = time
            for follower in followers[index]:
                missing[follower] -= 1
                if not missing[follower]:
                    at = max(
                        spans[earlier].stop + activities[earlier].delay
                        for earlier in activities[follower].after
                    )
                    heapq.heappush(events, (at, next(order), follower, False))
        while True:
            for name in released:
                for _ in range(min(free[name], len(waiting[name]))):
                    heapq.heappush(ready, heapq.heappop(waiting[name]))
            if not ready:
                break
            while ready:
                entry = heapq.heappop(ready)
                index, activity = entry[2], activities[entry[2]]
                busy = next((name for name in activity.uses if free[name] < 1), None)
                if busy is not None:
                    heapq.heappush(waiting[busy], entry)
                    continue
                for name in activity.uses:
                    free[name] -= 1
                seconds, first = activity.seconds, activity.uses[0] if activity.uses else ""
                if activity.idle is not None:
                    seconds += activity.idle(time - used[first])
                if spare := activity.spare:
                    before = saved.setdefault(first, spare)
                    full = min(spare, before + time - used[first])
                    seconds, saved[first] = max(0.0, seconds - full), max(0.0, full - seconds)
                stop = time + seconds
                spans[index] = Span(time, stop)
                heapq.heappush(events, (stop, next(order), index, True))
    if len(spans) < len(activities):
        raise ValueError(f"{len(activities) - len(spans)} activities wait for each other")
    return [spans[index] for index in range(len(activities))]
