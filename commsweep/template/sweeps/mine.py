"""Grids of your own: functions that return lists of Runs."""

from __future__ import annotations

from commsweep.config import Run
from commsweep.launching.grid import product, seeds
from commsweep.registry import preset

RATIOS = "fwd.compressor.ratio+bwd.compressor.ratio"


def ratios() -> list[Run]:
    """Dense, and TopK both ways at three ratios; six seeds, a minute of a CPU core."""
    return seeds([preset("mine"), *product(preset("mine_topk"), {RATIOS: (0.5, 0.1, 0.02)})], 6)


SWEEPS = {"mine_ratios": ratios}
