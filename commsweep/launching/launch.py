"""Executes the missing cells of a sweep: on this machine, on a Ray cluster, or as Slurm jobs.

The store decides what is missing, so a launcher may be killed at any moment and started again, and
several may work on one store.
"""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from typing import Any

from commsweep.config import Run, record, run_id
from commsweep.config.override import parse
from commsweep.errors import UserError, nearest, notice
from commsweep.launching.executors.job import Job, Launched, missing
from commsweep.launching.grid import setting, union
from commsweep.store import Busy, Damaged, Row, Store, write_json

# Modules of commsweep.launching.executors, each with `run(job) -> Launched`.
EXECUTORS = ("local", "ray", "slurm")


def register(name: str, runs: list[Run], store: Store) -> None:
    """Note in the store which runs the sweep names, so that analysis can show a missing cell as
    missing.
    """
    if "/" in name or name.startswith(".") or not name.isprintable():
        raise UserError(f"sweep name {name!r} cannot be a file name")
    with store.changing_sweeps():  # another launch may have given it seeds since this one looked
        try:
            cells = added(name, runs, store)
        except Damaged:
            cells = []
        write_json(
            store.root / "sweeps" / f"{name}.json",
            {"name": name, "runs": {run_id(run): record(run) for run in union(runs, cells)}},
        )


def added(name: str, runs: list[Run], store: Store) -> list[Run]:
    """More seeds of these runs that earlier launches of the sweep gave it."""
    if name not in store.sweeps():
        return []
    settings = {setting(run) for run in runs}
    return [run for cell in store.cells(name).values() if setting(run := parse(cell)) in settings]


def set_aside(runs: list[Run], store: Store, statuses: set[str]) -> int:
    """Make runs with these outcomes missing again (`--retry`); what was recorded is kept beside.
    Returns how many.
    """
    done = 0
    recorded = store.stamps()
    for run in runs:
        folder = store.folder(run_id(run))
        if not statuses or folder.path.name not in recorded:
            continue
        with (
            suppress(Busy),
            folder.locked(),
        ):  # another launcher may be at it, or have done it a moment ago
            row = folder.row()
            if row is not None and row["status"] in statuses:
                folder.set_aside()
                done += 1
    return done


def launch(
    runs: list[Run],
    store: Store,
    execution: Any,
    workers: int | None = None,
    *,
    executor: str = "local",
    **options: Any,
) -> Launched:
    """Execute the missing runs; `options` are the other fields of Job.

    Ctrl-C lets the running cells finish their epoch and save a checkpoint, a second one stops them
    now; both end with KeyboardInterrupt. A cell that cannot start (outcome "refused") is reported,
    not recorded. Raises UserError when the executor is unknown, not installed or not reached.
    """
    if executor not in EXECUTORS:
        raise UserError(
            f"--executor {executor}: not one of "
            f"{', '.join(EXECUTORS)}{nearest(executor, EXECUTORS)}"
        )
    engine = import_module(f"commsweep.launching.executors.{executor}")
    return engine.run(Job(missing(runs, store), store, execution, workers, **options))


def adopt(name: str, runs: list[Run], rows: list[Row], store: Store) -> int:
    """Record outcomes of a sweep's runs that were measured elsewhere; what is recorded or executed
    here stays. The sweep names them from then on, further seeds included. Returns how many were
    new.
    """
    runs_by_id = {row["id"]: parse(row["run"]) for row in rows}
    register(name, union(runs, list(runs_by_id.values())), store)
    taken = 0
    for row in rows:
        folder = store.folder(row["id"])
        with suppress(Busy), folder.locked():
            try:
                recorded = folder.row()
            except Damaged as damage:
                notice(f"{damage}; the others are adopted")
                continue
            if recorded is None:
                if not (folder.path / "run.json").exists():
                    folder.begin(runs_by_id[row["id"]], {"by": "sweep", "adopted": row["adopted"]})
                folder.finish(row)
                taken += 1
    return taken
