"""Lists of Runs: products, unions, seeds. A sweep is a plain function that returns such a list."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product as cartesian
from typing import Any

from commsweep.experiments.config import Run, override, run_id


def product(base: Run, axes: dict[str, Iterable[Any]]) -> list[Run]:
    """Every combination of the axes' values over `base`.

    An axis is a dotted setting, or several joined with "+" that take the same value:
    {"fwd.compressor.ratio+bwd.compressor.ratio": (0.1, 0.3)}. Raises UserError on unknown settings.
    """
    runs = []
    for values in cartesian(*axes.values()):
        changes = {name: value for axis, value in zip(axes, values, strict=True) for name in axis.split("+")}
        runs.append(override(base, changes))
    return runs


def union(*parts: list[Run]) -> list[Run]:
    """All runs of the parts in order, each once."""
    return list({run_id(run): run for part in parts for run in part}.values())


def seeds(runs: list[Run], n: int, first: int = 0) -> list[Run]:
    """Each run with n seeds; all cells of one seed come before the next seed, so partial results are whole grids."""
    return [run.model_copy(update={"seed": first + seed}) for seed in range(n) for run in runs]
