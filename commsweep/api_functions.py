"""The harness from Python: train a Run, or several."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from commsweep.config import Execution, Run, override
from commsweep.config.execution import POINTS
from commsweep.registry import preset
from commsweep.store import Row, Store

if TYPE_CHECKING:
    import pandas as pd


def compress(x: Tensor, codec: str | dict[str, Any], seed: int = 0) -> Tensor:
    """Return what a receiver sees of x: same shape, type and device.

    codec: "topk:0.1", or a dict of settings. seed: of codecs that draw. Raises UserError on a codec
    that does not exist.
    """
    from commsweep.integrations import measure

    return measure.codec(codec).roundtrip(x, seed)


def run(
    preset_or_run: str | Run, store: str | Path = "store", device: str = "auto", **settings: Any
) -> Row:
    """Train a preset or a Run, or return its recorded row: settings, metrics, bytes, seconds.

    settings: dotted names with __ for the dots: run("digits", fwd__compressor__kind="topk").
    Points along the training are recorded (`cs.load_curves`). Raises UserError on a setting that
    does not exist.
    """
    from commsweep.training.run import execute

    chosen = preset(preset_or_run) if isinstance(preset_or_run, str) else preset_or_run
    changes = {key.replace("__", "."): value for key, value in settings.items()}
    return execute(override(chosen, changes), Store(store), Execution(device=device, points=POINTS))


def sweep(
    runs: Iterable[str | Run], store: str | Path = "store", device: str = "auto"
) -> pd.DataFrame:
    """Train all that have no outcome yet, one after the other, and return a row each.

    A diverged or failed run is a row with that status. `commsweep sweep launch` uses several
    workers.
    """
    from commsweep.config import record, run_id
    from commsweep.reporting.results import of_cells

    chosen = [preset(run) if isinstance(run, str) else run for run in runs]
    for run_ in chosen:
        run(run_, store, device)
    return of_cells(store, {run_id(run): record(run) for run in chosen})
