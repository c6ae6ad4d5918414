"""Measures what messages and inversions cost here: measured at the start by every process, decided
by the first one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from commsweep.collectives import Collectives
from commsweep.config.second_order import KFAC
from commsweep.second_order.placement import cheaper

TURNS = 3
FEW = 1  # elements of the messages that are timed, and
MANY = (2**15, 2**18)  # the more the faster the links are:
BRIEF = 0.03  # seconds below which the larger one is timed, too
SMALL, LARGE = 32, 384  # rows of the matrices
Line = tuple[float, float]


@dataclass(frozen=True)
class Costs:
    """Seconds: of a message of m elements alpha + beta m, of inverting a factor of d rows c0 + c1
    d^3.

    broadcast: of one among as many as there are learners. handling, handing_out: of the processor,
    that a gather and such a broadcast take of each learner.
    """

    gather: Line
    broadcast: Line
    inversion: Line
    handling: Line
    handing_out: Line

    def small(self, size: int) -> bool:
        """Return whether inverting a factor of so many rows is cheaper than receiving its
        inverse.
        """
        alpha, beta = self.broadcast
        return cheaper(self.invert, lambda elements: alpha + beta * elements)(size)

    def invert(self, size: int) -> float:
        """Seconds of one inversion."""
        return self.inversion[0] + self.inversion[1] * size**3


def measure(collectives: Collectives, spec: KFAC) -> Costs:
    """The costs on these links and this processor, the same for all learners."""

    def usual(work: Callable[[int], object], n: int) -> Line:
        """(seconds, of them the processor's)"""
        times = []
        for _ in range(TURNS):
            began, busy = time.perf_counter(), time.process_time()
            work(n)
            times.append((time.perf_counter() - began, time.process_time() - busy))
        return collectives.agree(tuple(median(column) for column in zip(*times, strict=True)))

    def lines(
        work: Callable[[int], object],
        sizes: tuple[int, ...],
        at: Callable[[int], float] = float,
        pieces: int = 1,
    ) -> list[Line]:
        work(sizes[0])  # connects
        startup = usual(work, sizes[0])
        most, many = sizes[0], startup
        for most in sizes[1:]:
            many = usual(work, most)
            if many[0] > BRIEF:
                break
        lines = []
        for first, second in zip(startup, many, strict=True):
            slope = max(0.0, (second - first) / (at(most) - at(sizes[0])))
            lines.append((max(1e-9, first - slope * at(sizes[0])) / pieces, slope / pieces))
        return lines

    def gather(n: int) -> None:
        collectives.gather([[torch.zeros(n)]], "probe").wait()

    def broadcasts(n: int) -> None:
        for handle in [
            collectives.broadcast(lambda _: [torch.zeros(n)], leader, "probe")
            for leader in range(collectives.learners)
        ]:
            handle.wait()

    def inverted(d: int) -> None:
        matrix = torch.eye(d) + torch.ones(d, d) / d
        if spec.method == "eigen":
            torch.linalg.eigh(matrix)
        else:
            torch.cholesky_inverse(torch.linalg.cholesky(matrix))

    gathering, handling = lines(gather, (FEW, *MANY))
    broadcast, handing_out = lines(broadcasts, (FEW, *MANY), pieces=collectives.learners)
    return Costs(
        gathering,
        broadcast,
        lines(inverted, (SMALL, LARGE), lambda d: d**3)[0],
        handling,
        handing_out,
    )
