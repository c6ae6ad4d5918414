"""The cells that a sweep still has to run here: its missing cells, how long they take, how fast the
store fills.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from datetime import datetime
from typing import Any

from commsweep.config import Run
from commsweep.store import FINISHED, Row

TIMED = 3  # runs of a size that make an estimate; one alone may have been slow


def estimate(
    left: list[Run], rows: list[Row], probe: Callable[[Run], float] | None = None
) -> tuple[float | None, str]:
    """(worker seconds for these runs, what they rest on: runs of the same size, or a probe); None
    if unknown.

    probe: seconds of an epoch of a run, measured.
    """
    timed: dict[Any, list[float]] = {}
    for row in rows if left else ():
        if row["status"] == FINISHED:
            run = Run.model_validate(row["run"])
            timed.setdefault(_size(run), []).append(row["seconds"].get("wall", 0.0) / run.epochs)
    total, probed, fewest = 0.0, 0, math.inf
    for run in left:
        size = _size(run)
        if len(timed.get(size, ())) < TIMED and probe is not None:
            timed[size] = [probe(run)] * TIMED
            probed += 1
        if size not in timed:
            return None, ""
        # The faster half: a run beside a busy process, or a first one that compiled, says nothing
        # of the others.
        fast = sorted(timed[size])[: (len(timed[size]) + 1) // 2]
        fewest = min(fewest, len(timed[size]))
        total += run.epochs * statistics.median(fast)
    if probed:
        return total, "some measured steps"
    return total, (
        f"at least {fewest} timed runs of each size"
        if fewest >= TIMED
        else f"as few as {fewest} timed run{'s' * (fewest > 1)} of a size; --probe measures instead"
    )


def _size(run: Run) -> tuple[Any, ...]:
    size = [
        getattr(run.data, name, None)
        for name in ("block_size", "train_blocks", "eval_blocks", "train_size")
    ]
    return (
        run.model.model_dump_json(),
        run.data.name,
        getattr(run.data, "load", ""),
        run.data.batch_size,
        *size,
        run.precision,
        run.channels_last,
    )


def rate(rows: list[Row]) -> float | None:
    """Runs a second over the last twenty outcomes; None while there are fewer than two moments."""
    moments = sorted(
        datetime.fromisoformat(row["when"]).timestamp() for row in rows if row.get("when")
    )[-20:]
    return (
        (len(moments) - 1) / (moments[-1] - moments[0])
        if len(moments) > 1 and moments[-1] > moments[0]
        else None
    )
