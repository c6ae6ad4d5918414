"""A wire that bills the receiver: one inbound link a stage for both directions, as the contest
ProtocolNanoGPT of Pluralis Research meters its pipelines (200 Mbit/s, 50 ms).

A message begins when it was sent and the message before it has arrived; it arrives 8 n / rate +
latency later. So latency never overlaps, and fewer, larger messages win.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush


@dataclass(frozen=True)
class Meter:
    """rate: bits a second; latency: seconds of every message."""

    rate: float = 200e6
    latency: float = 0.05


def schedule(stage: int, stages: int, microbatches: int) -> list[tuple[str, int]]:
    """1F1B: ("F" or "B", microbatch) in the order of a stage."""
    first = min(microbatches, stages - stage)
    order = [("F", i) for i in range(first)]
    for i in range(microbatches):
        order.append(("B", i))
        if first + i < microbatches:
            order.append(("F", first + i))
    return order


def seconds(
    stages: int,
    microbatches: int,
    forward_bytes: float,
    backward_bytes: float | None = None,
    forward: float = 0.0,
    backward: float = 0.0,
    meter: Meter | None = None,
) -> float:
    """Seconds of an iteration of 1F1B. bytes: of a message; backward: as forward unless given.
    forward, backward: seconds of computing on a stage.
    """
    meter = meter or Meter()
    sizes = {
        "F": forward_bytes,
        "B": forward_bytes if backward_bytes is None else backward_bytes,
    }
    takes = {"F": forward, "B": backward}
    orders = [schedule(stage, stages, microbatches) for stage in range(stages)]
    next_place, free, wire = [0] * stages, [0.0] * stages, [0.0] * stages
    # An input is there: forward of the first stage, and backward of the last after its forward.
    arrivals = [
        {("F", i): 0.0 for i in range(microbatches)} if not s else {} for s in range(stages)
    ]
    done: list[tuple[float, int, str, int]] = []  # time, stage, kind, microbatch
    running = [False] * stages

    def begin(stage: int) -> None:
        if running[stage] or next_place[stage] == len(orders[stage]):
            return
        work = orders[stage][next_place[stage]]
        if work in arrivals[stage]:
            running[stage] = True
            start = max(free[stage], arrivals[stage][work])
            heappush(done, (start + takes[work[0]], stage, *work))

    begin(0)
    end = 0.0
    while done:
        time, stage, kind, number = heappop(done)
        end = max(end, time)
        free[stage], running[stage] = time, False
        next_place[stage] += 1
        last = stage == stages - 1
        if kind == "F" and last:
            arrivals[stage]["B", number] = time
        neighbour = stage + 1 if kind == "F" else stage - 1
        if 0 <= neighbour < stages:
            begins = max(wire[neighbour], time)
            wire[neighbour] = begins + 8 * sizes[kind] / meter.rate + meter.latency
            arrivals[neighbour][kind, number] = wire[neighbour]
            begin(neighbour)
        begin(stage)
    return end
