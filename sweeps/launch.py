"""Executes the missing cells of a sweep in warm local worker processes.

The launcher hands one cell at a time to each worker over a pipe. A worker that dies takes only its own
cell with it: the launcher records that cell as failed and starts another worker. The store decides what
is missing, so a launcher may be killed at any moment and started again.
"""

from __future__ import annotations

import math
import multiprocessing as mp
import os
import signal
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from multiprocessing.connection import Connection, wait
from multiprocessing.sharedctypes import RawValue
from pathlib import Path
from typing import Any

from experiments.config import SCHEMA, Run, run_id
from experiments.errors import UserError
from experiments.store import FAILED, OOM, TIMEOUT, Store, write_json


@dataclass
class Report:
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
           progress: Callable[[str, str], None] = lambda name, status: None, *, timeout: float | None = None,
           per_gpu: int = 1, notice: Callable[[str], None] = lambda line: None) -> Report:
    """Execute the missing runs; `progress(run id, outcome)` is called after each, `notice(line)` for news.

    `timeout`: seconds a cell may take before it is stopped and recorded as such. Worker i gets GPU i // per_gpu.
    Ctrl-C lets the running cells finish their epoch and save a checkpoint, a second one kills them; both
    end with KeyboardInterrupt. A cell that cannot start (outcome "refused") is reported, not recorded.
    """
    todo = deque(missing(runs, store))
    report = Report(workers=max(1, min(workers, len(todo))))
    started = time.monotonic()
    # A worker's share of the cores follows from what was asked for, not from how many cells are left: with
    # another number of threads a sum is rounded otherwise, and a resumed run would differ in its last bits.
    setting = _Setting(store, how, workers, per_gpu, RawValue("b", 0))
    pool = [_Worker(setting, place) for place in range(report.workers if todo else 0)]
    with _interrupts(setting, notice):
        try:
            while (todo and not setting.stop.value) or any(worker.run for worker in pool):
                for worker in pool:
                    if worker.ready and worker.run is None and todo and not setting.stop.value:
                        worker.give(todo.popleft(), timeout)
                for worker in _heard(pool):
                    run, answer = worker.run, worker.answer()
                    if run is None:
                        continue  # it has finished its imports, or died at them
                    if answer["status"] == "busy":  # another launcher has it: look again when little else is left
                        time.sleep(0.2)
                        todo.append(run)
                    elif answer["status"] != "interrupted":
                        report.add(run, answer)
                        progress(run_id(run), answer["status"])
        finally:
            for worker in pool:
                worker.stop()
            report.wall_seconds = time.monotonic() - started
        if setting.stop.value:
            raise KeyboardInterrupt
    return report


# Workers are forked from a server that has imported everything once: another worker, or a dead one's successor,
# costs nothing. The server itself never computes, so no thread and no CUDA context is forked.
FORKS = mp.get_context("forkserver")
FORKS.set_forkserver_preload(["experiments.run"])


@dataclass
class _Setting:
    """What all workers of a launch share."""

    store: Store
    how: Any
    workers: int
    per_gpu: int
    stop: Any  # one shared byte without a lock, which a killed worker could keep


@contextmanager
def _interrupts(setting: _Setting, notice: Callable[[str], None]) -> Iterator[None]:
    """The first Ctrl-C sets the stop byte, the second raises KeyboardInterrupt."""
    def on_interrupt(_number: int, _frame: Any) -> None:
        if setting.stop.value:
            raise KeyboardInterrupt
        setting.stop.value = 1
        notice("stopping after the current epochs, with checkpoints; Ctrl-C again stops now")

    if threading.current_thread() is not threading.main_thread():  # signals are the main thread's
        yield
        return
    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class _Worker:
    """One warm process and the cell it has; it is replaced when it dies."""

    def __init__(self, setting: _Setting, place: int) -> None:
        self.setting, self.place = setting, place
        self.run: Run | None = None
        self.timeout: float | None = None
        self.deadline = math.inf
        self.deaths = 0  # at its imports, in a row
        self._start()

    def give(self, run: Run, timeout: float | None) -> None:
        """Hand over a cell. Its time runs from here; the clock is one that no one sets."""
        self.run, self.timeout = run, timeout
        self.deadline = math.inf if timeout is None else time.monotonic() + timeout
        with suppress(BrokenPipeError):  # it died idle; `answer` will say so
            self.pipe.send(run.model_dump(mode="json"))

    def answer(self) -> dict[str, Any]:
        """Its report, or the record of its end; it is free afterwards."""
        try:
            answer = self.pipe.recv() if self.pipe.poll() else self._overdue()
            self.ready = True
        except (EOFError, ConnectionResetError):
            self.process.join()
            answer = self._ended(*self._cause()) if self.run else self._unborn()
        if not self.process.is_alive():
            self._start()
        self.run, self.deadline = None, math.inf
        return answer

    def _unborn(self) -> dict[str, Any]:
        """It died before it could take a cell: try again, but not for ever."""
        self.deaths += 1
        if self.deaths == 3:
            raise UserError(f"workers cannot start: {self._cause()[1]} three times; run one cell with `commsweep run` "
                            "to see why")
        return {}

    def stop(self) -> None:
        """End the process: an idle one by itself, so that it tidies up what its libraries hold."""
        self.pipe.close()
        if self.run is None:
            self.process.join(timeout=5)
        self.process.kill()  # any moment is safe: the store holds only whole records
        self.process.join()

    def _start(self) -> None:
        self.ready, self.oom_kills = False, _oom_kills()
        self.pipe, theirs = mp.Pipe()
        gpu = _gpu(self.place // self.setting.per_gpu) if self.setting.how.device == "auto" else None
        self.process = FORKS.Process(
            target=_serve, daemon=True,
            args=(theirs, str(self.setting.store.root), self.setting.how, self.setting.workers, gpu, self.setting.stop))
        self.process.start()
        theirs.close()

    def _overdue(self) -> dict[str, Any]:
        self.process.kill()
        self.process.join()
        return self._ended(TIMEOUT, f"stopped after {self.timeout:g} s; --retry timeout continues from its checkpoint")

    def _cause(self) -> tuple[str, str]:
        code = self.process.exitcode or 0
        if code == -signal.SIGKILL and _oom_kills() > self.oom_kills:
            return OOM, "worker killed by the kernel: out of memory"
        return FAILED, f"worker killed by {signal.Signals(-code).name}" if code < 0 else (
            f"worker ended with exit code {code}")

    def _ended(self, status: str, error: str) -> dict[str, Any]:
        """Record this end of its run, unless the run had come to one of its own."""
        folder = self.setting.store.folder(run_id(self.run))
        with folder.locked():
            if (row := folder.row()) is not None:
                return {"status": row["status"], "error": row["error"]}
            if not (folder.path / "run.json").exists():
                folder.begin(self.run, {})
            folder.finish({"schema": SCHEMA, "id": run_id(self.run), "status": status, "error": error,
                           "run": self.run.model_dump(mode="json"), "metrics": {}, "seconds": {},
                           "when": datetime.now(UTC).isoformat(timespec="seconds")})
        return {"status": status, "error": error}


def _heard(pool: list[_Worker]) -> list[_Worker]:
    """Workers that are ready, have answered, died, or run out of time; waits until there is one."""
    working = {worker.pipe: worker for worker in pool if worker.run is not None or not worker.ready}
    first = min((worker.deadline for worker in working.values()), default=math.inf)
    heard = wait(list(working), None if math.isinf(first) else max(0.0, first - time.monotonic()))
    now = time.monotonic()
    return [worker for pipe, worker in working.items() if pipe in heard or worker.deadline <= now]


def _gpu(turn: int) -> str | None:
    """The GPU of the turn-th set of workers, among those this process may see; None where there are none."""
    driver = Path("/proc/driver/nvidia/gpus")
    there = [str(number) for number, _ in enumerate(driver.iterdir())] if driver.is_dir() else []
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(there)).split(",") if name]
    return visible[turn % len(visible)] if visible else None


def _oom_kills() -> int:
    """How many processes of this control group the kernel has killed for memory; 0 where it does not say."""
    try:
        text = Path("/sys/fs/cgroup/memory.events").read_text()
        return int(text.split("oom_kill ")[1].split()[0])
    except (OSError, IndexError, ValueError):
        return 0


def _serve(pipe: Connection, root: str, how: Any, workers: int, gpu: str | None, stop: Any) -> None:
    """A worker's life: one cell after another until the launcher hangs up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    import torch

    from experiments.run import execute
    from experiments.store import Busy

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))
    store = Store(root)
    pipe.send({"status": "ready"})
    while True:
        try:
            settings = pipe.recv()
        except EOFError:
            return
        run = Run.model_validate(settings)
        try:
            with _log_to(store, run_id(run)):
                row = execute(run, store, how, lambda: bool(stop.value))
            busy = row["seconds"].get("train", 0.0) + row["seconds"].get("eval", 0.0)
            pipe.send({"status": row["status"], "error": row["error"], "busy": busy})
        except Busy:
            pipe.send({"status": "busy"})
        except KeyboardInterrupt:
            pipe.send({"status": "interrupted"})
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
