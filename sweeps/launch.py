"""Executes the missing cells of a sweep in warm local worker processes.

The launcher hands one cell at a time to each worker over a pipe. A worker that dies takes only its own
cell with it: the launcher records that cell as failed and starts another worker. The store decides what
is missing, so a launcher may be killed at any moment and started again.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import sys
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from experiments.config import SCHEMA, Run, run_id
from experiments.errors import UserError
from experiments.store import FAILED, Store, write_json


@dataclass
class Report:
    """What a launch did."""

    outcomes: Counter = field(default_factory=Counter)
    busy_seconds: float = 0.0  # inside optimisation steps and evaluation
    wall_seconds: float = 0.0
    workers: int = 1
    errors: list[str] = field(default_factory=list)

    @property
    def efficiency(self) -> float:
        """Share of workers x wall time spent inside optimisation steps and evaluation."""
        return self.busy_seconds / (self.workers * self.wall_seconds) if self.wall_seconds else 0.0


def register(name: str, runs: list[Run], store: Store) -> None:
    """Note in the store which runs the sweep names, so that analysis can show a missing cell as missing."""
    if "/" in name or name.startswith("."):
        raise UserError(f"sweep name '{name}' cannot be a file name")
    write_json(store.root / "sweeps" / f"{name}.json",
               {"name": name, "runs": {run_id(run): run.model_dump(mode="json") for run in runs}})


def missing(runs: list[Run], store: Store) -> list[Run]:
    """The runs without a recorded outcome."""
    return [run for run in runs if store.folder(run_id(run)).row() is None]


def set_aside(runs: list[Run], store: Store, statuses: set[str]) -> int:
    """Make runs with these outcomes missing again (`--retry`); what was recorded is kept beside. Returns how many."""
    chosen = [folder for run in runs
              if (folder := store.folder(run_id(run))).row() is not None and folder.row()["status"] in statuses]
    for folder in chosen:
        folder.set_aside()
    return len(chosen)


def launch(runs: list[Run], store: Store, how: Any, workers: int,
           progress: Callable[[str, str], None] = lambda name, status: None) -> Report:
    """Execute the missing runs; `progress(run id, outcome)` is called after each.

    Ctrl-C stops the workers at once (interrupted runs continue from their checkpoints next time) and
    re-raises KeyboardInterrupt. A cell that cannot start (outcome "refused") is reported, not recorded.
    """
    todo = deque(missing(runs, store))
    report = Report(workers=max(1, min(workers, len(todo))))
    started = time.perf_counter()
    # A worker's share of the cores follows from what was asked for, not from how many cells are left: with
    # another number of threads a sum is rounded otherwise, and a resumed run would differ in its last bits.
    pool = [_Worker(store, how, workers) for _ in range(report.workers if todo else 0)]
    idle = list(pool)
    try:
        while todo or len(idle) < len(pool):
            while idle and todo:
                idle.pop().give(todo.popleft())
            for worker in _ready(pool):
                answer = worker.answer()
                if answer["status"] == "busy":  # another launcher has it: look again when little else is left
                    time.sleep(0.2)
                    todo.append(worker.run)
                else:
                    report.outcomes[answer["status"]] += 1
                    report.busy_seconds += answer.get("busy", 0.0)
                    if answer.get("error"):
                        report.errors.append(f"{run_id(worker.run)} {answer['status']}: {answer['error']}")
                    progress(run_id(worker.run), answer["status"])
                if answer.get("died"):
                    pool.remove(worker)
                    worker = _Worker(store, how, workers)
                    pool.append(worker)
                worker.run = None
                idle.append(worker)
    finally:
        for worker in pool:
            worker.stop()
        report.wall_seconds = time.perf_counter() - started
    return report


class _Worker:
    """One warm process and the cell it has."""

    def __init__(self, store: Store, how: Any, workers: int) -> None:
        self.store = store
        self.run: Run | None = None
        self.pipe, theirs = mp.Pipe()
        context = mp.get_context("spawn")
        self.process = context.Process(target=_serve, args=(theirs, str(store.root), how, workers), daemon=True)
        self.process.start()
        theirs.close()

    def give(self, run: Run) -> None:
        self.run = run
        with suppress(BrokenPipeError):  # it died idle; `answer` will say so
            self.pipe.send(run.model_dump(mode="json"))

    def answer(self) -> dict[str, Any]:
        """Its report, or the record of its death."""
        try:
            return self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            return self._died()

    def stop(self) -> None:
        self.pipe.close()
        if self.run is None:  # an idle one ends by itself, and tidies up what its libraries hold
            self.process.join(timeout=5)
        self.process.kill()  # any moment is safe: the store holds only whole records
        self.process.join()

    def _died(self) -> dict[str, Any]:
        code = self.process.exitcode or 0
        error = f"worker killed by {signal.Signals(-code).name}" if code < 0 else f"worker ended with exit code {code}"
        folder = self.store.folder(run_id(self.run))
        with folder.locked():
            if folder.row() is None:
                if not (folder.path / "run.json").exists():
                    folder.begin(self.run, {})
                folder.finish({"schema": SCHEMA, "id": run_id(self.run), "status": FAILED, "error": error,
                               "run": self.run.model_dump(mode="json"), "metrics": {}, "seconds": {}})
        return {"status": FAILED, "error": error, "died": True}


def _ready(pool: list[_Worker]) -> list[_Worker]:
    working = {worker.pipe: worker for worker in pool if worker.run is not None}
    return [working[pipe] for pipe in wait(list(working))]  # type: ignore[index]


def _serve(pipe: Connection, root: str, how: Any, workers: int) -> None:
    """A worker's life: imports once, then one cell after another until the launcher hangs up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides
    import torch

    from experiments.run import execute
    from experiments.store import Busy

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))
    store = Store(root)
    while True:
        try:
            settings = pipe.recv()
        except EOFError:
            return
        run = Run.model_validate(settings)
        try:
            with _log_to(store, run_id(run)):
                row = execute(run, store, how)
            busy = row["seconds"].get("train", 0.0) + row["seconds"].get("eval", 0.0)
            pipe.send({"status": row["status"], "error": row["error"], "busy": busy})
        except Busy:
            pipe.send({"status": "busy"})
        except (UserError, OSError) as error:
            pipe.send({"status": "refused", "error": str(error)})


class _log_to:
    """Send everything the process prints, C code included, to the run's log."""

    def __init__(self, store: Store, name: str) -> None:
        self.path = store.folder(name).path / "log.txt"

    def __enter__(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        sys.stdout.flush()
        self.kept = os.dup(1), os.dup(2)
        log = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)

    def __exit__(self, *_: object) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, copy in zip((1, 2), self.kept, strict=True):
            os.dup2(copy, number)
            os.close(copy)
