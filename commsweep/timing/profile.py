"""Reads the files that people have: a profile of torch.profiler, and a link as iperf3 or nccl-tests
measured it.

A profile says how long a step is, how long its collectives take, how much of that the step waits
for, and how many bytes they carry. With it a step is predicted over another link, or with its
messages in codes:

    step' = step - waited + max(0, messages' - hidden) + coding

hidden is what the computing covers of the messages now.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from commsweep.errors import UserError

GZIP = b"\x1f\x8b"
COLLECTIVE = re.compile(r"^(gloo|nccl|mpi|ucc):|^nccl.*(kernel|dev)", re.IGNORECASE)
# Bytes of an element, by the lower-case name of its type without "c10::", as profiles spell it.
SIZES = {
    **dict.fromkeys(("double", "long", "long int", "long long", "complexfloat"), 8),
    **dict.fromkeys(("float", "int", "unsigned int"), 4),
    **dict.fromkeys(("half", "bfloat16", "short", "short int"), 2),
    **dict.fromkeys(("signed char", "unsigned char", "char", "byte", "bool"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"), 1),
}
# What a collective moves: how often its bytes cross a worker's link, and in how many rounds, for n
# workers. Sums, gathers and scatters go round a ring.
MOVES: dict[str, Callable[[int], tuple[float, int]]] = {
    "allreduce": lambda n: (2 * (n - 1) / n, 2 * (n - 1)),
    "reducescatter": lambda n: ((n - 1) / n, n - 1),
    "allgather": lambda n: (n - 1, n - 1),
    "alltoall": lambda n: ((n - 1) / n, 1),
    "broadcast": lambda n: (1.0, 1),
    "reduce": lambda n: (1.0, 1),
    "gather": lambda n: (1.0, 1),
    "scatter": lambda n: (1.0, 1),
    "send": lambda n: (1.0, 1),
    "recv": lambda n: (0.0, 0),
}
# The same of a sum, by how it goes.
SUMS: dict[str, Callable[[int], tuple[float, int]]] = {
    "ring": MOVES["allreduce"],
    "alltoall": lambda n: (2 * (n - 1) / n, 2),
    "gather": lambda n: (n - 1, 1),
}


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
    itemsize: float = 4.0  # bytes of an element of the collectives, on average
    # by what a collective does (a name of MOVES): how many there are, and the bytes that go in
    kinds: tuple[tuple[str, float, float], ...] = ()

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
    trace = _json(path, "a trace of torch.profiler (export_chrome_trace)")
    events = trace.get("traceEvents") if isinstance(trace, dict) else None
    if not isinstance(events, list):
        raise UserError(
            f"'{path}' has no traceEvents: not a trace of torch.profiler (export_chrome_trace)"
        )
    timed = [event for event in events if event.get("ph") == "X" and "dur" in event]
    # what a GPU's timeline repeats of the CPU's annotations is no second event
    timed = [kernel for kernel in timed if kernel.get("cat") != "gpu_user_annotation"]
    marks = [
        _span(kernel) for kernel in timed if str(kernel.get("name", "")).startswith("ProfilerStep#")
    ]
    if not marks:
        raise UserError(
            f"'{path}' marks no steps: call prof.step() after each step of the training, with "
            "schedule=torch.profiler.schedule(wait=1, warmup=1, active=5)"
        )
    sent = [kernel for kernel in timed if COLLECTIVE.match(str(kernel.get("name", "")))]
    if not sent:
        raise UserError(
            f"'{path}' has no collective: profile one process of a distributed training (NCCL, "
            "gloo), not a training of one process"
        )
    kernels = [kernel for kernel in timed if kernel.get("cat") == "kernel"]
    work = kernels or [kernel for kernel in timed if kernel.get("cat") == "cpu_op"]
    busy = _union(
        [
            _span(kernel)
            for kernel in work
            if not COLLECTIVE.match(str(kernel["name"]))
            and not str(kernel["name"]).startswith("c10d::")
        ]
    )
    # A collective is named on the CPU and has a kernel on a GPU, which is the one that takes time.
    names = [kernel for kernel in sent if kernel.get("cat") != "kernel"]
    on_gpu = [kernel for kernel in sent if kernel.get("cat") == "kernel"]
    moving = _union([_span(name) for name in on_gpu or names])
    sized = names if any(_elements(name)[0] for name in names) else on_gpu
    world = (trace.get("distributedInfo") or {}).get("world_size", 0)
    kinds_of_step, kinds, elements = [], [], 0.0
    for begin, end in sorted(set(marks)):
        messages = _clipped(moving, begin, end)
        waited = sum(
            (stop - start) - sum(b - a for a, b in _clipped(busy, start, stop))
            for start, stop in messages
        )
        inside = [event for event in sized if begin <= float(event["ts"]) < end]
        kinds.append(_kinds(inside))
        nbytes = sum(carried for _, carried in kinds[-1].values())
        span = sum(stop - start for start, stop in messages)
        kinds_of_step.append((end - begin, span, waited, nbytes, len(inside)))
        elements += sum(_elements(event)[0] for event in inside)
    step, span, waited, nbytes, count = (
        median(column) for column in zip(*kinds_of_step, strict=True)
    )
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
        len(kinds_of_step),
        gpu=bool(kernels),
        itemsize=sum(step_kinds[3] for step_kinds in kinds_of_step) / elements,
        kinds=_typical(kinds),
    )


def _kinds(events: list[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    """Collectives and their bytes, by what they do."""
    out: dict[str, tuple[float, float]] = {}
    for event in events:
        kind = _kind(event)
        count, nbytes = out.get(kind, (0.0, 0.0))
        out[kind] = count + 1, nbytes + _elements(event)[1]
    return out


def _typical(steps: list[dict[str, tuple[float, float]]]) -> tuple[tuple[str, float, float], ...]:
    """Medians over steps of the collectives and bytes of each kind."""
    out = []
    for kind in sorted({kind for step in steps for kind in step}):
        pairs = [step.get(kind, (0.0, 0.0)) for step in steps]
        out.append((kind, median(n for n, _ in pairs), median(nbytes for _, nbytes in pairs)))
    return tuple(out)


def _kind(event: dict[str, Any]) -> str:
    """Return what a collective does, a name of MOVES; one that is not known sums up."""
    text = str(event.get("args", {}).get("Collective name", "")) + str(event.get("name", ""))
    letters = re.sub("[^a-z]", "", text.lower())
    return next((kind for kind in MOVES if kind in letters), "allreduce")


def read_link(path: str | Path) -> MeasuredLink:
    """The output of `iperf3 -J`, or of nccl-tests (text). Raises UserError on anything else."""
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"'{path}' cannot be read ({error.strerror})") from None
    if "busbw" in text and not text.lstrip().startswith("{"):
        return _nccl_tests(path, text)
    output = _json(path, "the output of iperf3 -J, or of nccl-tests")
    if not isinstance(output, dict):
        raise UserError(f"'{path}' is no output of iperf3 -J")
    if output.get("error"):
        raise UserError(f"'{path}': iperf3 ended with: {output['error']}")
    end = output.get("end", {})
    rates = [_received(end, suffix) for suffix in ("", "_bidir_reverse")]
    rates_known = [rate for rate in rates if rate]
    if not rates_known:
        raise UserError(f"'{path}' has no end.sum_received.bits_per_second: not from iperf3 -J")
    rtts = [stream.get("sender", {}).get("mean_rtt", 0) for stream in end.get("streams", [])]
    # microseconds both ways, of a link that is full: the queue is in it
    latency = min(rtts) / 2e6 if rtts and all(rtts) else 0.0
    return MeasuredLink(
        min(rates_known), latency
    )  # an exchange goes at the pace of the slower direction


def _received(end: dict[str, Any], suffix: str) -> float:
    """Bits a second that arrived in one direction of iperf3's summary; 0 where it says none."""
    rates = []
    for name in (f"sum_received{suffix}", f"sum{suffix}"):
        summary = end.get(name) or {}
        if summary.get("bits_per_second"):
            lost = float(summary.get("lost_percent") or 0.0)  # of UDP, whose sender counts all
            # what a receiver says of itself has no losses in it
            counts = summary.get("sender") is not False
            rates.append(float(summary["bits_per_second"]) * (1 - lost / 100 if counts else 1))
    return min(rates, default=0.0)


def _nccl_tests(path: str | Path, text: str) -> MeasuredLink:
    """Bus bandwidth of the largest message, and the time of a round of the smallest."""
    lines = [re.sub(r"^\[[^\]]*\](<std\w+>)?:?\s?", "", line) for line in text.splitlines()]
    header: list[str] = []
    rows, ranks = [], 0
    for line in lines:
        words = line.replace("#", " ", 1).split() if line.lstrip().startswith("#") else []
        if "busbw" in words and "size" in words:
            header = words
        elif words[:1] == ["Rank"]:
            ranks += 1
        values = line.split()
        if header and values and values[0].isdigit() and len(values) == len(header):
            fields = dict(zip(reversed(header), reversed(values), strict=True))
            try:
                rows.append([float(fields[name]) for name in ("size", "time", "algbw", "busbw")])
            except (KeyError, ValueError):  # N/A where it did not measure
                continue
    rows = [row for row in rows if row[1] > 0 and row[3] > 0]
    if not rows:
        raise UserError(f"'{path}' has no line of sizes and times: not the output of nccl-tests")
    largest, smallest = max(rows), min(rows)
    factor = largest[3] / largest[2]  # 2 (n - 1) / n of a sum, (n - 1) / n of a gather
    if not ranks:
        ranks = round(2 / (2 - factor)) if 1 <= factor < 2 else 2
    sums = ranks == 2 or factor > 1
    return MeasuredLink(8e9 * largest[3], smallest[1] * 1e-6 / ((ranks - 1) * (2 if sums else 1)))


def exchange(
    link: MeasuredLink,
    profile: Profile,
    workers: int,
    share: float = 1.0,
    collective: str = "ring",
) -> float:
    """Seconds of a step's collectives. share: of the bytes, where they travel in codes.
    collective: how sums go, "ring", "alltoall" or "gather" (everyone's message to all).
    """
    seconds = 0.0
    for kind, count, nbytes in profile.kinds:
        crossings, rounds = _moves(kind, workers, collective)
        seconds += 8 * crossings * share * nbytes / link.rate + count * rounds * link.latency
    return seconds


def _moves(kind: str, workers: int, collective: str) -> tuple[float, int]:
    """Return how often the bytes of a collective cross a link, and in how many rounds."""
    moves = SUMS[collective] if kind == "allreduce" else MOVES[kind]
    return moves(max(2, workers))


def predicted(
    profile: Profile,
    link: MeasuredLink | None,
    workers: int = 0,
    share: float = 1.0,
    coding: float = 0.0,
    collective: str = "ring",
) -> float:
    """Seconds of a step. link: None is the link of the profile. share: bytes of the dense ones;
    coding: seconds of encoding and decoding. collective: of sums, as for `exchange`.
    """
    n = workers or profile.workers or 2
    coded = share < 1
    if link is not None:
        messages = exchange(link, profile, n, share, collective)
    else:
        dense, codes = (
            sum(_moves(kind, n, by)[0] * nbytes for kind, _, nbytes in profile.kinds)
            for by in ("ring", collective)
        )
        messages = profile.messages * share * (codes / dense if dense else 1.0)
    # On a CPU coding takes the time that computing would have covered.
    hidden = profile.hidden if profile.gpu or not coded else 0.0
    waits = max(0.0, messages - hidden)
    return profile.step - profile.waited + waits + coding


def _json(path: str | Path, expected: str) -> Any:
    try:
        content = Path(path).read_bytes()
        return json.loads(gzip.decompress(content) if content[:2] == GZIP else content)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"'{path}' is not whole gzip ({error}): expected {expected}") from None
    except OSError as error:
        raise UserError(f"'{path}' cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise UserError(f"'{path}' is not whole JSON ({error}): expected {expected}") from None


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


def _elements(event: dict[str, Any]) -> tuple[float, float]:
    """Elements and bytes that go into a collective, by its recorded shapes."""
    args = event.get("args", {})
    if "In msg nelems" in args:
        elements = float(args["In msg nelems"])
        return elements, elements * _size(args.get("dtype"))
    elements = total = 0.0
    for dims, kind in zip(args.get("Input Dims", []), args.get("Input type", []), strict=False):
        if dims and all(isinstance(dim, (int, float)) for dim in dims):
            elements += math.prod(dims)
            total += math.prod(dims) * _size(kind)
    return elements, total


def _size(kind: Any) -> int:
    """Bytes of an element, by the name of its type."""
    name = str(kind).lower().removeprefix("c10::")
    if name not in SIZES:
        raise UserError(
            f"a collective of the trace has the element type '{kind}', whose size is not known "
            f"(known: {', '.join(SIZES)})"
        )
    return SIZES[name]
