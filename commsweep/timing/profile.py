"""What people have: a profile of torch.profiler, and a link as iperf3 or nccl-tests measured it.

A profile says how long a step is, how long its collectives take, how much of that the step waits
for, and how many bytes they carry. With it a step is predicted over another link, or with its
messages in codes:

    step' = step - waited + max(0, messages' - hidden) + coding

hidden is what the computing covers of the messages now.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from commsweep.errors import UserError

COLLECTIVE = re.compile(r"^(gloo|nccl|mpi|ucc):|^nccl.*(kernel|dev)", re.IGNORECASE)
SIZES = {"float": 4, "double": 8, "c10::half": 2, "c10::bfloat16": 2, "long int": 8, "int": 4}
SHORT = {"Float": 4, "Double": 8, "Half": 2, "BFloat16": 2, "Long": 8, "Int": 4, "Byte": 1}


@dataclass(frozen=True)
class Profile:
    """Medians over the profiled steps; seconds and bytes of one process."""

    step: float
    messages: float  # seconds in which a collective is under way
    waited: float  # of these, seconds in which nothing else is
    nbytes: float  # that go into collectives
    collectives: float
    workers: int
    steps: int
    gpu: bool = False  # whether it computes on one, beside which coding takes no time

    @property
    def hidden(self) -> float:
        """Seconds of messages beside computing."""
        return self.messages - self.waited


@dataclass(frozen=True)
class MeasuredLink:
    """rate: bits a second; latency: seconds one way."""

    rate: float
    latency: float = 0.0


Interval = tuple[float, float]


def read_trace(path: str | Path) -> Profile:
    """A Chrome trace of torch.profiler, with ProfilerStep marks. Raises UserError on a file that is
    none, is cut off, or has no steps or no collectives.
    """
    told = _json(path, "a trace of torch.profiler (export_chrome_trace)")
    events = told.get("traceEvents") if isinstance(told, dict) else None
    if not isinstance(events, list):
        raise UserError(
            f"'{path}' has no traceEvents: not a trace of torch.profiler (export_chrome_trace)"
        )
    timed = [one for one in events if one.get("ph") == "X" and "dur" in one]
    marks = [_span(one) for one in timed if str(one.get("name", "")).startswith("ProfilerStep#")]
    if not marks:
        raise UserError(
            f"'{path}' marks no steps: call prof.step() after each step of the training, with "
            "schedule=torch.profiler.schedule(wait=1, warmup=1, active=5)"
        )
    sent = [one for one in timed if COLLECTIVE.match(str(one.get("name", "")))]
    if not sent:
        raise UserError(
            f"'{path}' has no collective: profile one process of a distributed training (NCCL, "
            "gloo), not a training of one process"
        )
    kernels = [one for one in timed if one.get("cat") == "kernel"]
    work = kernels or [one for one in timed if one.get("cat") == "cpu_op"]
    busy = _union(
        [
            _span(one)
            for one in work
            if not COLLECTIVE.match(str(one["name"])) and not str(one["name"]).startswith("c10d::")
        ]
    )
    # A collective is named on the CPU and has a kernel on a GPU, which is the one that takes time.
    names = [one for one in sent if one.get("cat") != "kernel"]
    on_gpu = [one for one in sent if one.get("cat") == "kernel"]
    moving = _union([_span(one) for one in on_gpu or names])
    world = (told.get("distributedInfo") or {}).get("world_size", 0)
    parts = []
    for begin, end in sorted(set(marks)):
        messages = _clipped(moving, begin, end)
        waited = sum(
            (stop - start) - sum(b - a for a, b in _clipped(busy, start, stop))
            for start, stop in messages
        )
        inside = [one for one in names or on_gpu if begin <= float(one["ts"]) < end]
        nbytes = sum(_bytes(one) for one in inside)
        span = sum(stop - start for start, stop in messages)
        parts.append((end - begin, span, waited, nbytes, len(inside)))
    step, span, waited, nbytes, count = (median(column) for column in zip(*parts, strict=True))
    if not nbytes:
        raise UserError(
            f"'{path}': its collectives do not say their sizes; profile with record_shapes=True"
        )
    micro = 1e-6
    return Profile(
        step * micro,
        span * micro,
        waited * micro,
        nbytes,
        count,
        int(world),
        len(parts),
        gpu=bool(kernels),
    )


def read_link(path: str | Path) -> MeasuredLink:
    """The output of `iperf3 -J`, or of nccl-tests (text). Raises UserError on anything else."""
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"'{path}' cannot be read ({error.strerror})") from None
    if "busbw" in text and not text.lstrip().startswith("{"):
        return _nccl_tests(path, text)
    told = _json(path, "the output of iperf3 -J, or of nccl-tests")
    if not isinstance(told, dict):
        raise UserError(f"'{path}' is no output of iperf3 -J")
    if told.get("error"):
        raise UserError(f"'{path}': iperf3 ended with: {told['error']}")
    end = told.get("end", {})
    found = end.get("sum_received") or end.get("sum")
    if not found or not found.get("bits_per_second"):
        raise UserError(f"'{path}' has no end.sum_received.bits_per_second: not from iperf3 -J")
    rtts = [one.get("sender", {}).get("mean_rtt", 0) for one in end.get("streams", [])]
    # microseconds both ways, of a link that is full: the queue is in it
    latency = min(rtts) / 2e6 if rtts and all(rtts) else 0.0
    return MeasuredLink(float(found["bits_per_second"]), latency)


def _nccl_tests(path: str | Path, text: str) -> MeasuredLink:
    """Bus bandwidth of the largest message, and half the time of the smallest."""
    lines = [line.split() for line in text.splitlines() if re.match(r"\s*\d+\s+\d+\s+\w+", line)]
    rows = [(float(line[0]), float(line[5]), float(line[7])) for line in lines if len(line) > 7]
    if not rows:
        raise UserError(f"'{path}' has no line of sizes and times: not the output of nccl-tests")
    largest, smallest = max(rows), min(rows)
    return MeasuredLink(8e9 * largest[2], smallest[1] * 1e-6 / 2)


def exchange(link: MeasuredLink, nbytes: float, workers: int, count: float, coded: bool) -> float:
    """Seconds of a step's collectives: a ring's sums, or codes from everyone to everyone."""
    n = max(2, workers)
    moved = (n - 1) * nbytes if coded else 2 * (n - 1) / n * nbytes
    rounds = 1 if coded else 2 * (n - 1)
    return 8 * moved / link.rate + count * rounds * link.latency


def predicted(
    profile: Profile,
    link: MeasuredLink | None,
    workers: int = 0,
    share: float = 1.0,
    coding: float = 0.0,
) -> float:
    """Seconds of a step. link: None is the link of the profile. share: bytes of the dense ones;
    coding: seconds of encoding and decoding.
    """
    n = workers or profile.workers or 2
    coded = share < 1
    if link is not None:
        messages = exchange(link, share * profile.nbytes, n, profile.collectives, coded)
    else:
        ways = (n / 2) if coded else 1.0  # codes go to everyone, sums round a ring
        messages = profile.messages * share * ways
    # On a CPU coding takes the time that computing would have covered.
    hidden = profile.hidden if profile.gpu or not coded else 0.0
    waits = max(0.0, messages - hidden)
    return profile.step - profile.waited + waits + coding


def _json(path: str | Path, what: str) -> Any:
    try:
        return json.loads(Path(path).read_bytes())
    except OSError as error:
        raise UserError(f"'{path}' cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise UserError(f"'{path}' is not whole JSON ({error}): expected {what}") from None


def _span(event: dict[str, Any]) -> Interval:
    begin = float(event["ts"])
    return begin, begin + float(event["dur"])


def _union(spans: list[Interval]) -> list[Interval]:
    """Without overlaps, in order."""
    out: list[Interval] = []
    for begin, end in sorted(spans):
        if out and begin <= out[-1][1]:
            out[-1] = (out[-1][0], max(end, out[-1][1]))
        else:
            out.append((begin, end))
    return out


def _clipped(spans: list[Interval], begin: float, end: float) -> list[Interval]:
    return [(max(a, begin), min(b, end)) for a, b in spans if a < end and b > begin]


def _bytes(event: dict[str, Any]) -> float:
    """What goes into a collective, by its recorded shapes."""
    args = event.get("args", {})
    if "In msg nelems" in args:
        return float(args["In msg nelems"]) * SHORT.get(str(args.get("dtype")), 4)
    total = 0.0
    for dims, kind in zip(args.get("Input Dims", []), args.get("Input type", []), strict=False):
        if dims and all(isinstance(one, (int, float)) for one in dims):
            total += math.prod(dims) * SIZES.get(str(kind), 4)
    return total
