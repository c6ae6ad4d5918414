"""Assigns the Kronecker factors of K-FAC to the learners that invert them. Pure functions without
torch: real runs and predictions use them.

A layer has two factors, A of its inputs and G of its outputs' gradients, symmetric, of which d (d +
1) / 2 elements travel. A placement says for every factor which learner inverts it, or EVERYWHERE:
then nobody has to send the inverse.

Sources: the first author's code (github.com/shyhuai/kfac_pytorch, commits 1233119 and bb6324d) for
`spread` and `balanced`, lzhangbv/kfac_pytorch for `owner`, KAISA (arXiv 2107.01739) for `shared`.
The weight of a load is the factor's dimension, as in all versions of that code; the paper's own
text was not to be had.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

EVERYWHERE = -1


@dataclass(frozen=True)
class Factor:
    """A Kronecker factor."""

    layer: int
    side: str  # "A" or "G"
    size: int  # d: rows of the square matrix

    @property
    def elements(self) -> int:
        """Return the number of elements of the packed upper triangle."""
        return self.size * (self.size + 1) // 2


def factors_of(sizes: Sequence[int]) -> list[Factor]:
    """The factors whose rows these are: A and G of the first layer, of the second, ..."""
    return [Factor(index // 2, "AG"[index % 2], size) for index, size in enumerate(sizes)]


def everywhere(factors: Sequence[Factor], learners: int) -> list[int]:
    """D-KFAC: every learner inverts every factor."""
    return [EVERYWHERE for _ in factors]


def spread(factors: Sequence[Factor], learners: int) -> list[int]:
    """MPD-KFAC: each factor on exactly one learner, in turn."""
    return [index % learners for index in range(len(factors))]


def balanced(factors: Sequence[Factor], learners: int, small: Callable[[int], bool]) -> list[int]:
    """SPD-KFAC: factors whose dimension is `small` everywhere (inverting is cheaper than
    receiving); of the others the largest first to the learner with the least to do.
    """
    placed, loads = [EVERYWHERE] * len(factors), [0] * learners
    large = [index for index, factor in enumerate(factors) if not small(factor.size)]
    for place in sorted(large, key=lambda place: (-factors[place].size, place)):
        learner = loads.index(min(loads))
        placed[place] = learner
        loads[learner] += factors[place].size
    return placed


def below(threshold: int) -> Callable[[int], bool]:
    """`small` by a fixed dimension: the shipped code's 1400 and 1024."""
    return lambda size: size < threshold


def cheaper(
    invert: Callable[[int], float], receive: Callable[[int], float]
) -> Callable[[int], bool]:
    """`small` by cost, SPD-KFAC's own rule: whether inverting a factor of so many rows takes less
    than receiving its inverse; receive: seconds of a message of so many elements.
    """
    return lambda size: invert(size) < receive(size * (size + 1) // 2)


def owner(factors: Sequence[Factor], learners: int) -> list[int]:
    """DP-KFAC: both factors of a layer on one learner, which preconditions its gradient; layers in
    turn.
    """
    return [factor.layer % learners for factor in factors]


def shared(layers: int, learners: int, fraction: float) -> list[list[int]]:
    """KAISA: the learners that have each layer's inverses and precondition its gradient, `fraction`
    of all (1: all, 1 / learners: one); the others get the gradient from them. Raises ValueError
    unless learners x fraction is whole.
    """
    group = learners * fraction
    if not (0 < fraction <= 1) or abs(group - round(group)) > 1e-9 or learners % round(group):
        fits = ", ".join(f"{n / learners:g}" for n in range(1, learners + 1) if learners % n == 0)
        raise ValueError(
            f"a worker fraction of {fraction:g} does not divide {learners} learners (these do: "
            f"{fits})"
        )
    size = round(group)
    return [
        list(range(layer % (learners // size) * size, layer % (learners // size) * size + size))
        for layer in range(layers)
    ]


@dataclass(frozen=True)
class Placed:
    """The assignment of factors to learners that invert them, and of layers to those that
    precondition their gradients.
    """

    inverters: list[int]  # of each factor, a learner or EVERYWHERE
    workers: list[tuple[int, ...]]  # of each layer
    learners: int

    def receivers(self, number: int) -> tuple[int, ...]:
        """The learners between which a factor's inverse travels; empty where it does not."""
        if self.inverters[number] == EVERYWHERE:
            return ()
        workers = self.workers[number // 2]
        return workers if len(workers) > 1 else ()

    def column(self, layer: int, learner: int) -> tuple[int, ...]:
        """The learners that have a layer's preconditioned gradient from the same one of them, which
        comes first; empty where all precondition.
        """
        workers = self.workers[layer]
        if len(workers) == self.learners:
            return ()
        first = workers[learner % len(workers)]
        return (
            first,
            *(
                learner_
                for learner_ in range(self.learners)
                if learner_ % len(workers) == learner % len(workers) and learner_ != first
            ),
        )


def placed_factors(
    kind: str,
    factors: Sequence[Factor],
    learners: int,
    *,
    small: Callable[[int], bool] = lambda size: False,
    fraction: float = 1.0,
) -> Placed:
    """The placement of that name: everywhere, spread, balanced, shared or owner. `factors`: A and G
    of every layer.
    """
    everybody = tuple(range(learners))
    all_work = [everybody for _ in factors[::2]]
    if kind == "everywhere":
        return Placed(everywhere(factors, learners), all_work, learners)
    if kind == "spread":
        return Placed(spread(factors, learners), all_work, learners)
    if kind == "balanced":
        return Placed(balanced(factors, learners, small), all_work, learners)
    if kind == "owner":
        placed = owner(factors, learners)
        return Placed(placed, [(factor,) for factor in placed[::2]], learners)
    if kind == "shared":
        groups = [tuple(group) for group in shared(len(factors) // 2, learners, fraction)]
        rounds = learners // len(groups[0]) if groups else 1
        return Placed(
            [
                group[layer // rounds % len(group)]
                for layer, group in enumerate(groups)
                for _ in "AG"
            ],
            groups,
            learners,
        )
    raise ValueError(f"unknown placement '{kind}'")


def inverse_elements(factors: Sequence[Factor], placed: Placed, eigen: bool = False) -> int:
    """Elements of all inverses that have to be sent once (eigen: whole matrices of vectors, and the
    values).
    """
    return sum(
        factor.size * (factor.size + 1) if eigen else factor.elements
        for index, factor in enumerate(factors)
        if placed.receivers(index)
    )
