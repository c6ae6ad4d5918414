"""Step times of many runs over links of many kinds, with one set of processes for all of the same
latencies.

Links are reshaped in between. Turns follow each other: what is measured in several is measured at
different times. What is to be measured, and how, lies in <store>/pipelines/.links; every
measurement is recorded as a pipeline's run of its own.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from commsweep.config import Execution, Run
from commsweep.config.execution import Cable, Wiring
from commsweep.config.override import parse
from commsweep.lean_imports import leaving
from commsweep.processes import launcher, namespaces, pipeline, stages, supervisor
from commsweep.store import Row, RunFolder, Store, read_json, write_json

MODULE = "commsweep.processes.pipeline_plan"

Measurement = tuple[Run, Wiring]


def missing(measurements: list[Measurement], store: Store) -> dict[str, Measurement]:
    """Return those without a recorded outcome, by id."""
    named = {
        pipeline.folder_of(store, *measurement).path.name: measurement
        for measurement in measurements
    }
    return {
        name: measurement
        for name, measurement in named.items()
        if store.pipeline(name).row() is None
    }


def measure(
    todo: dict[str, Measurement],
    store: Store,
    execution: Execution,
    patience: float,
    done: Callable[[int], object] = lambda n: None,
) -> None:
    """Take these measurements; `done` hears how many of them there are so far. Needs Linux, root
    and iproute2.
    """

    def kind(item: tuple[str, Measurement]) -> tuple[int, list[float]]:
        run, wiring = item[1]
        return wiring.turn, [cable.latency for cable in wiring.cables(stages.count(run))]

    before = 0
    for (_, latencies), group in groupby(sorted(todo.items(), key=kind), key=kind):
        group_ = dict(group)
        folder = RunFolder(store.root / "pipelines" / ".links", store.root)
        folder.make()
        with folder.locked():
            launcher.queue(folder, group_, execution, patience=patience)
            launcher.start(
                folder,
                MODULE,
                store.root,
                len(latencies) + 1,
                [Cable(latency=latency) for latency in latencies],
                lambda progress, before=before: done(before + progress["done"]),
                patience,
                "stage",
            )
        before += len(group_)
        done(before)


def work(store: Store, folder: RunFolder) -> None:
    """A stage's part in all measurements of the same latencies."""
    import torch.distributed as dist

    from commsweep.processes.timing import Calm
    from commsweep.processes.trainer import connect
    from commsweep.training.record import environment

    options, device = read_json(folder.path / "execution.json"), None
    patience = options.pop("patience")
    execution = replace(Execution.read(options), checkpoint_every=math.inf)
    first, calm = os.environ["RANK"] == "0", Calm()
    for done, (name, settings, wires) in enumerate(launcher.queued(folder)):
        run, wiring, recorded = parse(settings), Wiring(**wires), store.pipeline(name)
        device = device or connect(run, execution, patience)
        if first:
            recorded.make()
            launcher.begin(recorded, run, wiring, environment(str(device)))
            namespaces.shape(*(cable.bandwidth for cable in wiring.cables(stages.count(run))))
        dist.barrier()
        row = calm.measure(partial(_train, run, wiring, execution, recorded, device))
        if first and row is not None:
            recorded.finish(row)
            write_json(folder.path / "progress.json", {"done": done + 1})
    dist.destroy_process_group()


def _train(*arguments: Any) -> Row | None:
    """By a trainer of its own: what is taken again begins anew."""
    from commsweep.processes.pipeline_row import trained
    from commsweep.processes.trainer import Trainer

    return trained(Trainer(*arguments))


def main(root: str) -> int:
    """A stage that `measure` has started."""
    store = Store(Path(root))
    folder = RunFolder(store.root / "pipelines" / ".links", store.root)
    return supervisor.worker(folder, lambda: work(store, folder))


if __name__ == "__main__":
    sys.exit(leaving(lambda: main(sys.argv[1])))
