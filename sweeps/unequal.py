"""Links that differ: one ratio everywhere, and a ratio for each boundary, hardest on the slowest
link (claim U1).

The ratios are what `commsweep advise sotu_nano microbatches=4 fwd.compressor.kind=topk
bwd.compressor.kind=forward_mask --links FILE --ratios` gave: its predicted step takes no longer
than that of TopK 10 % everywhere.
"""

from __future__ import annotations

from commsweep.config import Run, override
from commsweep.config.execution import Cable
from commsweep.launching.grid import seeds
from commsweep.registry import preset

M = 1e6
# By boundary: bits a second, and the ratio.
UNEQUAL: dict[str, tuple[tuple[float, float], ...]] = {
    "slow first": ((5 * M, 0.0717), (100 * M, 1.0), (100 * M, 1.0)),
    "slow in the middle": ((100 * M, 1.0), (5 * M, 0.0717), (100 * M, 1.0)),
    "slow last": ((100 * M, 1.0), (100 * M, 1.0), (5 * M, 0.0753)),
    "graded": ((100 * M, 1.0), (20 * M, 0.3769), (4 * M, 0.059)),
}


def one_ratio() -> Run:
    """TopK 10 % everywhere, gradients where the activation was kept."""
    return override(
        preset("sotu_nano"),
        {
            "microbatches": 4,
            "fwd.compressor.kind": "topk",
            "fwd.compressor.ratio": 0.1,
            "bwd.compressor.kind": "forward_mask",
        },
    )


def by_link(name: str) -> Run:
    """The same with the ratios for these links."""
    *inner, last = (ratio for _, ratio in UNEQUAL[name])
    return override(
        one_ratio(),
        {"fwd.compressor.ratio": last}
        | {f"at.block{index}.fwd.compressor.ratio": ratio for index, ratio in enumerate(inner)},
    )


def cables(name: str) -> tuple[Cable, ...]:
    """The links of these stages."""
    return tuple(Cable(bandwidth=rate) for rate, _ in UNEQUAL[name])


def unequal_ratios() -> list[Run]:
    """Ratios by link against one ratio at the same predicted step, and dense: a nano GPT-2, seven
    seeds; five minutes on two cores.
    """
    dense = override(preset("sotu_nano"), {"microbatches": 4})
    return seeds([dense, one_ratio(), *(by_link(name) for name in UNEQUAL)], 7)


SWEEPS = {
    "unequal_ratios": unequal_ratios,
}
