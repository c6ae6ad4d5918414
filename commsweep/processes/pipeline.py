"""A run as real processes, one a stage (and learner): started, watched, recorded in
<store>/pipelines.

run.json     the Run and its wiring        execution.json   where and how long; a stage reads both
done.json    the row                       stage*.ckpt      to continue from
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from commsweep import input_digests
from commsweep.config import Execution, Run
from commsweep.config.execution import Cable, Wiring
from commsweep.errors import UserError
from commsweep.lean_imports import leaving
from commsweep.processes import launcher, supervisor
from commsweep.store import Busy, Row, RunFolder, Store, read_json, write_json

MODULE = "commsweep.processes.pipeline"


def folder_of(store: Store, run: Run, wiring: Wiring) -> RunFolder:
    """Return where this run over this wiring is recorded: <store>/pipelines/<id>."""
    return store.pipeline(launcher.measurement_id(run, wiring))


def execute(
    run: Run,
    wiring: Wiring,
    execution: Execution,
    folder: RunFolder,
    *,
    patience: float = 120.0,
    show: Callable[[dict[str, Any]], None] = lambda progress: None,
) -> Row:
    """The row of a run over this wiring: as recorded, or by executing it now. `show` hears of its
    progress.

    Raises UserError when a stage fails or is silent for `patience` seconds; the same call continues
    from the last checkpoint that all stages have.
    """
    from commsweep.processes import stages  # torch, which a reader of recorded runs does not need

    stages.check(run, execution)
    stages.check_schedule(run, wiring)
    folder.make()
    try:
        with folder.locked():
            if (row := folder.row()) is not None:
                input_digests.check(folder, run, row, execution)
                return row
            stages.check_model(run, execution)
            execution.torch_device()  # one that is not there is said once
            n, learners = stages.processes(run), run.grad.learners
            who = "stage" if learners == 1 else "process"
            if learners > 1 and wiring.links:
                raise UserError(
                    f"--links: with {learners} learners each process has a link of its own to a "
                    "common switch; use --bandwidth and --latency"
                )
            cables = wiring.cables(stages.count(run))
            execution = replace(execution, points=folder.points(execution.points))
            launcher.begin(folder, run, wiring, {"points": execution.points})
            write_json(folder.path / "execution.json", {**execution.record(), "patience": patience})
            shaped = cables if any(cable != Cable() for cable in cables) else None
            launcher.start(folder, MODULE, folder.path, n, shaped, show, patience, who)
    except Busy:
        raise UserError(
            f"pipeline {folder.path.name} is being executed by another process"
        ) from None
    row = folder.row()
    assert row is not None  # its first stage ended well, after it was written
    return row


def work(
    run: Run, wiring: Wiring, execution: Execution, folder: RunFolder, patience: float
) -> Row | None:
    """This process's stage (RANK says which), recorded by stage 0; the row there.

    A finished run is not trained again.
    """
    import torch.distributed as dist

    from commsweep.collectives import gathered
    from commsweep.processes.pipeline_row import trained
    from commsweep.processes.trainer import Trainer, connect
    from commsweep.training.record import environment

    first = os.environ["RANK"] == "0"
    if (row := folder.row()) is not None:
        return row if first else None
    points = folder.points(execution.points) if first else 0
    if first:
        device = str(execution.torch_device())
        launcher.begin(folder, run, wiring, environment(device) | {"points": points})
    device = connect(run, execution, patience)
    execution = replace(execution, points=gathered(points)[0])
    row = trained(Trainer(run, wiring, execution, folder, device))
    dist.destroy_process_group()  # not after an error: it would wait for peers that are gone
    if first and row is not None:
        folder.finish(row)
        for left in (*folder.path.glob("stage*.ckpt"), *folder.path.glob(".stage*.part")):
            left.unlink()
    return row


def main(path: str) -> int:
    """A stage that `execute` has started: everything it must know lies in the run's folder."""
    folder = RunFolder(Path(path), Path(path).parent.parent)
    run_settings, how = (
        read_json(folder.path / "run.json"),
        read_json(folder.path / "execution.json"),
    )
    patience = how.pop("patience")
    return supervisor.worker(
        folder,
        lambda: work(
            folder.run(),
            Wiring(**run_settings["wiring"]),
            replace(Execution.read(how), progress=False),
            folder,
            patience,
        ),
        "stage" if run_settings["run"]["grad"]["learners"] == 1 else "process",
    )


if __name__ == "__main__":
    sys.exit(leaving(lambda: main(sys.argv[1])))
