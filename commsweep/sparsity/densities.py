"""Divides the live weights of a model among its layers. No torch: plans use it, too."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from commsweep.config.sparsity import Sparsity
from commsweep.errors import UserError

Shape = tuple[int, ...]  # of a weight: [out, in, kernel ...], or [in, out]


def scores(shapes: Sequence[Shape], distribution: str) -> list[float]:
    """Densities up to a common factor: 1 ("uniform"), (in + out) / (in out) ("er"), or with the
    kernel's sides in sum and product ("erk", RigL's form).
    """
    if distribution == "uniform":
        return [1.0] * len(shapes)
    return [
        sum(shape) / prod(shape)
        if distribution == "erk"
        else (shape[0] + shape[1]) / (shape[0] * shape[1])
        for shape in shapes
    ]


def densities(shapes: Sequence[Shape], spec: Sparsity, sparsity: float) -> list[float]:
    """The share of every layer's weights that live, none above `max_density`. Raises UserError when
    the caps are in the way.
    """
    sizes, raw = [prod(shape) for shape in shapes], scores(shapes, spec.distribution)
    budget = (1 - sparsity) * sum(sizes)
    if budget > spec.max_density * sum(sizes) * (1 + 1e-9):
        raise UserError(
            f"sparsity.max_density={spec.max_density:g}: a density of {1 - sparsity:g} cannot "
            "be reached when no layer may be denser; raise max_density, or sparsity"
        )
    capped: set[int] = set()
    # a layer at its cap leaves the rest to the others, which may bring further ones there
    while True:
        free = [index for index in range(len(sizes)) if index not in capped]
        remaining = budget - spec.max_density * sum(sizes[index] for index in capped)
        scale = remaining / sum(raw[index] * sizes[index] for index in free) if free else 0.0
        over = {index for index in free if scale * raw[index] > spec.max_density * (1 + 1e-9)}
        if not over:
            return [
                spec.max_density if index in capped else scale * raw[index]
                for index in range(len(sizes))
            ]
        capped |= over


def live(shapes: Sequence[Shape], spec: Sparsity, sparsity: float) -> list[int]:
    """Live weights of every layer: within one of its density, and together the nearest whole number
    to the target's. No layer is left without any: where its density would leave none, the largest
    one gives one.
    """
    sizes = [prod(shape) for shape in shapes]
    exact = [
        min(size, size * density)
        for size, density in zip(sizes, densities(shapes, spec, sparsity), strict=True)
    ]
    counts = [int(share + 1e-9) for share in exact]
    left = round((1 - sparsity) * sum(sizes)) - sum(counts)
    order = sorted(range(len(sizes)), key=lambda index: (counts[index] - exact[index], index))
    for index in [number for number in order if counts[number] < sizes[number]][:left]:
        counts[index] += 1
    for index in (number for number, count in enumerate(counts) if not count):
        if max(counts) > 1:
            counts[counts.index(max(counts))] -= 1
        counts[index] = 1
    return counts
