"""commsweep: how far can the messages of distributed training be compressed before training breaks?

    import commsweep as cs

    cs.measure(x, ["topk:0.1", "uniform:4"])          # what codecs do to a tensor
    cs.Shadow(model, codecs, at)                      # what they would do to a training
    cs.compress(x, "topk:0.1")                        # what a receiver sees of x
    cs.insert(model, links, sample, batch_size)       # boundaries in a model of your own
    cs.CompressionHook(model, compressor)             # gradients of DistributedDataParallel
    cs.preset(name), cs.run(run), cs.sweep(runs)      # trainings of the harness
    cs.load_rows(path), cs.load_curves(path)          # runs and their curves, as DataFrames
    cs.summary(rows, by, column)                      # means over seeds with 95 % intervals
    cs.convergence(curves, column)                    # scores at 10, 25, 50, 100 % of the steps
    cs.figure(rows, kind)                             # a figure for a paper, of rows or curves
    cs.UserError                                      # every mistake that a user can mend

These names are stable. Each is imported when it is first used, so that `import commsweep` is fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from commsweep.api_functions import compress, run, sweep
    from commsweep.boundary.insert import insert
    from commsweep.data_parallel.hook import CompressionHook
    from commsweep.errors import UserError
    from commsweep.integrations.measure import measure
    from commsweep.integrations.shadow import Shadow
    from commsweep.registry import preset
    from commsweep.reporting.figure import figure
    from commsweep.reporting.tidy import convergence, load_curves, load_rows, summary

__all__ = [
    "CompressionHook",
    "Shadow",
    "UserError",
    "compress",
    "convergence",
    "figure",
    "insert",
    "load_curves",
    "load_rows",
    "measure",
    "preset",
    "run",
    "summary",
    "sweep",
]
_WHERE = {
    "CompressionHook": "commsweep.data_parallel.hook",
    "Shadow": "commsweep.integrations.shadow",
    "UserError": "commsweep.errors",
    "compress": "commsweep.api_functions",
    "convergence": "commsweep.reporting.tidy",
    "figure": "commsweep.reporting.figure",
    "insert": "commsweep.boundary.insert",
    "load_curves": "commsweep.reporting.tidy",
    "load_rows": "commsweep.reporting.tidy",
    "measure": "commsweep.integrations.measure",
    "preset": "commsweep.registry",
    "run": "commsweep.api_functions",
    "summary": "commsweep.reporting.tidy",
    "sweep": "commsweep.api_functions",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'commsweep' has no attribute '{name}'")
    return getattr(import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
