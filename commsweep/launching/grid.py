"""Lists of Runs: products, unions, seeds. A sweep is a plain function that returns such a list."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import product as cartesian
from typing import Any

from commsweep.config import Run, flatten, override, record, run_id
from commsweep.config.base import by_kind
from commsweep.config.compressors import CompressorSpec, GradientCompressor
from commsweep.config.compressors.spelling import listed
from commsweep.errors import UserError, notice

# Seeds from this one on are for tuning rates, never for evidence.
TUNING_SEED = 100
UNIONS = {"fwd": CompressorSpec, "bwd": CompressorSpec, "grad": GradientCompressor}


def product(base: Run, axes: dict[str, Iterable[Any]]) -> list[Run]:
    """Every combination of the axes' values over `base`.

    An axis is a dotted setting, or several joined with "+" that take the same value:
    {"fwd.compressor.ratio+bwd.compressor.ratio": (0.1, 0.3)}. Raises UserError on unknown settings.
    """
    runs = []
    for values in cartesian(*axes.values()):
        changes = {
            name: value
            for axis, value in zip(axes, values, strict=True)
            for name in axis.split("+")
        }
        runs.append(override(base, changes))
    return runs


def union(*runs: list[Run]) -> list[Run]:
    """All runs of the parts in order, each once."""
    return list({run_id(run): run for run_ in runs for run in run_}.values())


def seeds(runs: list[Run], n: int, first: int = 0) -> list[Run]:
    """Each run with n seeds; all cells of one seed come before the next seed, so partial results
    are whole grids.
    """
    return [run.model_copy(update={"seed": first + seed}) for seed in range(n) for run in runs]


def setting(run: Run) -> str:
    """Stands for all of a Run but its seed."""
    return run_id(run.model_copy(update={"seed": 0}))


def axes(settings: Iterable[str]) -> dict[str, list[Any]]:
    """Axes as text, "KEY=V1,V2" or "KEY+KEY=V1,V2", for `product`. Values are JSON where they are
    JSON.

    Raises UserError on one without a value, and on one given twice.
    """
    axis_values: dict[str, list[Any]] = {}
    for text in settings:
        key, equals, values = text.partition("=")
        if not equals or not key or not values:
            raise UserError(
                f"--axis {text}: write KEY=VALUE,VALUE, for instance fwd.compressor.ratio=0.1,0.05"
            )
        if key in axis_values:
            raise UserError(f"--axis {key} is given more than once")
        try:
            axis_values[key] = json.loads(f"[{values}]")
        except ValueError:
            try:
                axis_values[key] = listed(values)
            except ValueError as error:
                raise UserError(f"--axis {key}: {error}") from None
    return axis_values


def opened(base: Run, varied: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Axes that must come first: where a parameter of a compressor is varied and `base` has none
    there, the first kind that has the parameter. That is said on stderr.
    """
    axes: dict[str, list[Any]] = {}
    names = [name for axis in varied for name in axis.split("+")]
    for name in names:
        side, _, parameter = name.rpartition(".compressor.")
        kind = f"{side}.compressor.kind"
        if side in UNIONS and kind not in names and flatten(record(base))[kind] == "none":
            having = [
                tag for tag, kind in by_kind(UNIONS[side]).items() if parameter in kind.model_fields
            ]
            if having:
                notice(
                    f"note: {kind}={having[0]} is taken, which has {parameter}; the base has none"
                )
                axes[kind] = having[:1]
    return axes


def in_bfloat16(runs: list[Run]) -> list[Run]:
    """The same runs under bfloat16's autocast."""
    return [run.model_copy(update={"precision": "bfloat16"}) for run in runs]
