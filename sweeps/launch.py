"""Executes the missing cells of a sweep: on this machine, on a Ray cluster, or as Slurm jobs.

The store decides what is missing, so a launcher may be killed at any moment and started again, and several
may work on one store.
"""

from __future__ import annotations

import signal
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

from commsweep.experiments.config import SCHEMA, Run, parse, record, run_id
from commsweep.experiments.errors import UserError, nearest
from commsweep.experiments.store import Busy, Damaged, Row, Store, write_json
from commsweep.sweeps.grid import setting, union

EXECUTORS = ("local", "ray", "slurm")  # modules of sweeps.executors, each with `run(job) -> Launched`


@dataclass
class Launched:
    """What a launch did."""

    outcomes: Counter = field(default_factory=Counter)
    busy_seconds: float = 0.0  # inside optimisation steps and evaluation
    wall_seconds: float = 0.0
    workers: int = 1
    errors: list[str] = field(default_factory=list)

    def add(self, run: Run, answer: dict[str, Any]) -> None:
        """Count one cell's outcome."""
        self.outcomes[answer["status"]] += 1
        self.busy_seconds += answer.get("busy", 0.0)
        if answer.get("error"):
            self.errors.append(f"{run_id(run)} {answer['status']}: {answer['error']}")

    @property
    def efficiency(self) -> float:
        """Share of workers x wall time spent inside optimisation steps and evaluation."""
        return self.busy_seconds / (self.workers * self.wall_seconds) if self.wall_seconds else 0.0


@dataclass(frozen=True)
class Job:
    """What an executor is given."""

    runs: list[Run]  # the missing ones
    store: Store
    execution: Any  # an Execution
    workers: int | None = None  # cells at once; None: as many as there is room for
    timeout: float | None = None  # seconds a cell may take before it is stopped and recorded as such
    per_gpu: int = 1  # cells at once on a GPU
    cluster: dict[str, str] = field(default_factory=dict)  # what the executor must know of the cluster
    progress: Callable[[Run, str], None] = lambda run, status: None  # called after each cell
    notice: Callable[[str], None] = lambda line: None  # news for people


def register(name: str, runs: list[Run], store: Store) -> None:
    """Note in the store which runs the sweep names, so that analysis can show a missing cell as missing."""
    if "/" in name or name.startswith("."):
        raise UserError(f"sweep name '{name}' cannot be a file name")
    with store.changing_sweeps():  # another launch may have given it seeds since this one looked
        try:
            known = added(name, runs, store)
        except Damaged:
            known = []
        write_json(store.root / "sweeps" / f"{name}.json",
                   {"name": name, "runs": {run_id(run): record(run) for run in union(runs, known)}})


def added(name: str, runs: list[Run], store: Store) -> list[Run]:
    """More seeds of these runs that earlier launches of the sweep gave it."""
    if name not in store.sweeps():
        return []
    known = {setting(run) for run in runs}
    return [run for told in store.cells(name).values() if setting(run := parse(told)) in known]


def missing(runs: list[Run], store: Store) -> list[Run]:
    """The runs without a recorded outcome."""
    return [run for run in runs if store.folder(run_id(run)).row() is None]


def set_aside(runs: list[Run], store: Store, statuses: set[str]) -> int:
    """Make runs with these outcomes missing again (`--retry`); what was recorded is kept beside. Returns how many."""
    done = 0
    recorded = store.stamps()
    for run in runs:
        folder = store.folder(run_id(run))
        if not statuses or folder.path.name not in recorded:
            continue
        with suppress(Busy), folder.locked():  # another launcher may be at it, or have done it a moment ago
            row = folder.row()
            if row is not None and row["status"] in statuses:
                folder.set_aside()
                done += 1
    return done


def launch(runs: list[Run], store: Store, execution: Any, workers: int | None = None, *, executor: str = "local",
           **options: Any) -> Launched:
    """Execute the missing runs; `options` are the other fields of Job.

    Ctrl-C lets the running cells finish their epoch and save a checkpoint, a second one stops them now; both
    end with KeyboardInterrupt. A cell that cannot start (outcome "refused") is reported, not recorded.
    Raises UserError when the executor is unknown, not installed or not reached.
    """
    if executor not in EXECUTORS:
        raise UserError(f"--executor {executor}: not one of {', '.join(EXECUTORS)}{nearest(executor, EXECUTORS)}")
    engine = import_module(f"commsweep.sweeps.executors.{executor}")
    return engine.run(Job(missing(runs, store), store, execution, workers, **options))


def record_end(run: Run, store: Store, status: str, error: str) -> dict[str, Any]:
    """Record the end of a cell whose process could not do so itself, unless the cell had come to one of its own."""
    folder = store.folder(run_id(run))
    with folder.locked():
        if (row := folder.row()) is not None:
            return {"status": row["status"], "error": row["error"]}
        if not (folder.path / "run.json").exists():
            folder.begin(run, {})
        folder.finish({"schema": SCHEMA, "id": run_id(run), "status": status, "error": error,
                       "run": record(run), "metrics": {}, "seconds": {},
                       "when": datetime.now(UTC).isoformat(timespec="seconds")})
    return {"status": status, "error": error}


def adopt(name: str, runs: list[Run], rows: list[Row], store: Store) -> int:
    """Record outcomes of a sweep's runs that were measured elsewhere; what is recorded or executed here stays. The
    sweep names them from then on, further seeds included. Returns how many were new."""
    told = {row["id"]: parse(row["run"]) for row in rows}
    register(name, union(runs, list(told.values())), store)
    taken = 0
    for row in rows:
        folder = store.folder(row["id"])
        with suppress(Busy), folder.locked():
            if folder.row() is None:
                if not (folder.path / "run.json").exists():
                    folder.begin(told[row["id"]], {"by": "sweep", "adopted": row["adopted"]})
                folder.finish(row)
                taken += 1
    return taken


class Interrupts:
    """While entered, the first Ctrl-C asks for an end (`asked`, `on_first`), the second raises KeyboardInterrupt."""

    def __init__(self, on_first: Callable[[], None], notice: Callable[[str], None]) -> None:
        self.asked, self.on_first, self.notice = False, on_first, notice

    def ask(self) -> None:
        """End after the current epochs."""
        if not self.asked:
            self.asked = True
            self.on_first()

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.ask()
        self.notice("stopping after the current epochs, with checkpoints; Ctrl-C again stops now")

    def __enter__(self) -> Interrupts:
        self.here = threading.current_thread() is threading.main_thread()  # signals are the main thread's
        if self.here:
            self.before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if self.here:
            signal.signal(signal.SIGINT, self.before)


class StopFile:
    """Asks cells on other machines to end: a file of the store that they look for after each epoch."""

    def __init__(self, folder: Path, name: str) -> None:
        self.path = folder / f".stop-{name}"

    def __call__(self) -> bool:
        return self.path.exists()

    def set(self) -> None:
        """Ask."""
        self.path.touch()

    def clear(self) -> None:
        """The launch is over."""
        with suppress(OSError):
            self.path.unlink()
