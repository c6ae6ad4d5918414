"""What messages and inversions cost here: measured at the start by every process, decided by the first one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from commsweep.experiments.collectives import Collectives
from commsweep.experiments.config import KFAC

TURNS = 3
FEW = 1  # elements of the messages that are timed, and
MANY = (2**15, 2**18)  # the more the faster the links are:
BRIEF = 0.03  # seconds below which the larger one is timed, too
SMALL, LARGE = 32, 384  # rows of the matrices


@dataclass(frozen=True)
class Costs:
    """Seconds: of a message of m elements alpha + beta m, of inverting a factor of d rows c0 + c1 d^3."""

    gather: tuple[float, float]
    broadcast: tuple[float, float]
    inversion: tuple[float, float]

    def small(self, size: int) -> bool:
        """Whether inverting a factor of so many rows is cheaper than receiving its inverse."""
        alpha, beta = self.broadcast
        return self.invert(size) < alpha + beta * size * (size + 1) / 2

    def invert(self, size: int) -> float:
        """Seconds of one inversion."""
        return self.inversion[0] + self.inversion[1] * size**3


def measure(collectives: Collectives, spec: KFAC) -> Costs:
    """The costs on these links and this processor, the same for all learners."""
    def line(timed: Callable[[int], float], sizes: tuple[int, ...], at: Callable[[int], float]) -> tuple[float, float]:
        def usual(n: int) -> float:
            return collectives.agree(median(timed(n) for _ in range(TURNS)))

        first = usual(sizes[0])
        for most in sizes[1:]:
            if (second := usual(most)) > BRIEF:
                break
        slope = max(0.0, (second - first) / (at(most) - at(sizes[0])))
        return max(1e-9, first - slope * at(sizes[0])), slope

    def gathered(n: int) -> float:
        return _seconds(lambda: collectives.gather([[torch.zeros(n)]], "probe").wait())

    def broadcast(n: int) -> float:
        """Of one among as many as there are learners, one from each."""
        def all_at_once() -> None:
            for handle in [collectives.broadcast(lambda _: [torch.zeros(n)], leader, "probe")
                           for leader in range(collectives.learners)]:
                handle.wait()

        return _seconds(all_at_once) / collectives.learners

    def inverted(d: int) -> float:
        matrix = torch.eye(d) + torch.ones(d, d) / d
        solve = torch.linalg.eigh if spec.method == "eigen" else lambda one: torch.cholesky_inverse(
            torch.linalg.cholesky(one))
        solve(matrix)
        return _seconds(lambda: solve(matrix))

    gathered(FEW)  # connects
    made = Costs(line(gathered, (FEW, *MANY), float), line(broadcast, (FEW, *MANY), float),
                 line(inverted, (SMALL, LARGE), lambda d: d**3))
    return collectives.agree(made)


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
