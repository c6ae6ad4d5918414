"""Cells in warm worker processes of this machine.

One cell at a time goes to each worker over a pipe. A worker that dies takes only its own cell with
it: the cell is recorded as failed and another worker is started.
"""

from __future__ import annotations

import gc
import math
import multiprocessing as mp
import os
import signal
import sys
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.sharedctypes import RawValue
from pathlib import Path
from typing import Any

from commsweep import child
from commsweep.config import Run, record, run_id
from commsweep.errors import UserError, reason
from commsweep.launching.executors.job import Interrupts, Job, Launched, record_end
from commsweep.store import FAILED, OOM, TIMEOUT, Busy, Store

LOST = 255  # multiprocessing's exit code of a process whose server has not said one
TRIES = 3  # times that a cell is begun which something ends without an outcome
LISTEN = 1.0  # seconds between looks at a stop that comes from elsewhere


def run(
    job: Job,
    *,
    threads: int | None = None,
    stopping: Callable[[], bool] | None = None,
    patient: bool = True,
) -> Launched:
    """Execute the job's cells. Worker i gets GPU i // per_gpu.

    For jobs on other machines: `threads` of each worker, `stopping` once true ends as the first
    Ctrl-C does, and without `patient` a cell that another launcher has is left to it.
    """
    todo, outcomes = deque(job.runs), Counter[str]()
    workers = job.workers or job.execution.workers(job.per_gpu)
    report = Launched(workers=max(1, min(workers, len(todo))))
    started = time.monotonic()
    # A worker's share of the cores follows from what was asked for, not from how many cells are
    # left: with another number of threads a sum is rounded otherwise, and a resumed run would
    # differ in its last bits.
    setting = _Setting(
        job, threads or max(1, len(os.sched_getaffinity(0)) // workers), RawValue("b", 0)
    )
    pool = [_Worker(setting, number) for number in range(report.workers if todo else 0)]
    with Interrupts(setting.stop_now, job.notice) as interrupts:
        try:
            while (todo and not interrupts.asked) or any(worker.run for worker in pool):
                for worker in pool:
                    if worker.ready and worker.run is None and todo and not interrupts.asked:
                        worker.give(todo.popleft())
                for worker in _heard(pool, stopping is not None):
                    cell, answer = worker.run, worker.answer()
                    if cell is None:
                        continue  # it has finished its imports, or died at them
                    # another launcher has it: look again when little else is left
                    if answer["status"] == "busy":
                        if patient:
                            time.sleep(0.2)
                            todo.append(cell)
                    elif answer["status"] == "interrupted":
                        if interrupts.asked:
                            continue
                        # something ended the cell: a signal, or code of its own
                        outcomes[run_id(cell)] += 1
                        if outcomes[run_id(cell)] < TRIES:
                            todo.append(cell)
                        else:
                            report.add(
                                cell,
                                answer
                                | {
                                    "error": (
                                        f"ended by a signal {TRIES} times; the same launch "
                                        "continues it"
                                    )
                                },
                            )
                            job.progress(cell, answer["status"])
                    else:
                        report.add(cell, answer)
                        job.progress(cell, answer["status"])
                if stopping is not None and stopping():
                    interrupts.ask()
        finally:
            for worker in pool:
                worker.stop()
            report.wall_seconds = time.monotonic() - started
        if interrupts.asked:
            raise KeyboardInterrupt
    return report


# Workers are forked from a server that has imported everything once: another worker, or a dead
# one's successor, costs nothing. The server itself never computes, so no thread and no CUDA context
# is forked.
FORKS = mp.get_context("forkserver")
FORKS.set_forkserver_preload(["commsweep.launching.executors.warm"])


def forked(target: Callable[..., None], args: tuple[Any, ...]) -> Any:
    """Return a started worker process, which ends with this one. Raises UserError where the server
    is killed again and again.
    """
    child.begin_server()
    for _ in range(TRIES):
        process = FORKS.Process(target=target, daemon=True, args=args)
        try:
            process.start()
            return process
        except (EOFError, ConnectionError):  # the server was killed at this moment
            continue
    raise UserError(
        f"the server of the workers was killed {TRIES} times while it started; is there memory "
        "for another process?"
    )


@dataclass
class _Setting:
    """The state that all workers of a launch share."""

    job: Job
    threads: int
    stop: Any  # one shared byte without a lock, which a killed worker could keep

    def stop_now(self) -> None:
        """Ask every worker to end after its epoch."""
        self.stop.value = 1


class _Worker:
    """A warm process and the cell it has; it is replaced when it dies."""

    def __init__(self, setting: _Setting, number: int) -> None:
        self.setting, self.number = setting, number
        self.run: Run | None = None
        self.deadline = math.inf
        self.deaths = 0  # at its imports, in a row
        self._start()

    def give(self, run: Run) -> None:
        """Hand over a cell. Its time runs from here; the clock is one that no one sets."""
        self.run = run
        self.deadline = time.monotonic() + (self.setting.job.timeout or math.inf)
        with suppress(BrokenPipeError):  # it died idle; `answer` will say so
            self.pipe.send(record(run))

    def answer(self) -> dict[str, Any]:
        """Return its report, or the record of its end; it is free afterwards."""
        try:
            answer = self.pipe.recv() if self.pipe.poll() else self._overdue()
            self.ready = True
        except (EOFError, ConnectionResetError):
            self.process.join()
            if self.run is not None and self.process.exitcode == LOST:
                # The server died, which its workers end with: the cell is no cause of that.
                self.setting.job.notice("the server of the workers was killed: starting another")
                answer = {"status": "interrupted"}
            else:
                answer = self._finish_cell(*self._cause()) if self.run else self._unborn()
        if not self.process.is_alive():
            self._start()
        self.run, self.deadline = None, math.inf
        return answer

    def _unborn(self) -> dict[str, Any]:
        """It died before it could take a cell: try again, but not for ever."""
        self.deaths += 1
        if self.deaths == 3:
            raise UserError(
                f"workers cannot start: {self._cause()[1]} three times; run one cell with "
                "`commsweep run` to see why"
            )
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
        job = self.setting.job
        gpu = _gpu(self.number // job.per_gpu) if job.execution.device == "auto" else None
        root = str(job.store.root)
        self.process = forked(
            _serve,
            (theirs, root, job.execution, self.setting.threads, gpu, self.setting.stop),
        )
        theirs.close()

    def _overdue(self) -> dict[str, Any]:
        self.process.kill()
        self.process.join()
        return self._finish_cell(
            TIMEOUT,
            f"stopped after {self.setting.job.timeout:g} s; --retry timeout continues from its "
            "checkpoint",
        )

    def _cause(self) -> tuple[str, str]:
        code = self.process.exitcode or 0
        if code == -signal.SIGKILL and _oom_kills() > self.oom_kills:
            return OOM, "worker killed by the kernel: out of memory"
        return FAILED, f"worker killed by {signal.Signals(-code).name}" if code < 0 else (
            f"worker ended with exit code {code}"
        )

    def _finish_cell(self, status: str, error: str) -> dict[str, Any]:
        try:
            assert self.run is not None
            return record_end(self.run, self.setting.job.store, status, error)
        except Busy:  # another launcher was quicker to take the cell of a dead worker
            return {"status": "busy"}


def _heard(pool: list[_Worker], listening: bool) -> list[_Worker]:
    """Workers that are ready, have answered, died, or run out of time; waits until there is one, or
    for a while.
    """
    working = {worker.pipe: worker for worker in pool if worker.run is not None or not worker.ready}
    first = min((worker.deadline for worker in working.values()), default=math.inf)
    most = max(0.0, first - time.monotonic())
    heard = wait(
        list(working), LISTEN if listening and most > LISTEN else None if math.isinf(most) else most
    )
    current = time.monotonic()
    return [
        worker for pipe, worker in working.items() if pipe in heard or worker.deadline <= current
    ]


def _gpu(number: int) -> str | None:
    """The GPU of the turn-th set of workers, among those this process may see; None where there are
    none.
    """
    driver = Path("/proc/driver/nvidia/gpus")
    gpus = [str(number) for number, _ in enumerate(driver.iterdir())] if driver.is_dir() else []
    visible = [
        name for name in os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(gpus)).split(",") if name
    ]
    return visible[number % len(visible)] if visible else None


def _oom_kills() -> int:
    """Return how many processes of this control group the kernel has killed for memory; 0 where it
    does not say.
    """
    try:
        text = Path("/sys/fs/cgroup/memory.events").read_text(encoding="utf-8")
        return int(text.split("oom_kill ")[1].split()[0])
    except (OSError, IndexError, ValueError):
        return 0


def _serve(
    pipe: Connection, root: str, execution: Any, threads: int, gpu: str | None, stop: Any
) -> None:
    """A worker's life: one cell after another until the launcher hangs up."""
    child.die_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    from commsweep.training.run import execute

    # what was imported stays: looking through it after each run would take a third of a second
    gc.freeze()
    execution = replace(execution, cores=threads)
    store = Store(root)
    try:
        pipe.send({"status": "ready"})
    except BrokenPipeError:  # all cells were done before this worker was ready
        return
    while True:
        try:
            settings = pipe.recv()
        except EOFError:
            gc.unfreeze()
            return
        run = Run.model_validate(settings)
        try:
            with _log_to(store, run_id(run)):
                row = execute(run, store, execution, lambda: bool(stop.value))
            busy = row["seconds"].get("train", 0.0) + row["seconds"].get("eval", 0.0)
            answer = {"status": row["status"], "error": row["error"], "busy": busy}
        except Busy:
            answer = {"status": "busy"}
        except KeyboardInterrupt:
            answer = {"status": "interrupted"}
        except (UserError, OSError) as error:
            answer = {"status": "refused", "error": str(error)}
        # outside of training: of the environment, and no outcome of the cell
        except Exception as fault:
            traceback.print_exc()
            answer = {"status": "refused", "error": reason(fault)}
        try:
            pipe.send(answer)
        except BrokenPipeError:  # the launcher was killed; the store has the outcome
            return


class _log_to:
    """Send everything the process prints, C code included, to the run's log."""

    def __init__(self, store: Store, name: str) -> None:
        self.folder = store.folder(name)

    def __enter__(self) -> None:
        self.folder.make()
        sys.stdout.flush()
        self.kept = os.dup(1), os.dup(2)
        log = os.open(self.folder.path / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)

    def __exit__(self, *_: object) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, copy in zip((1, 2), self.kept, strict=True):
            os.dup2(copy, number)
            os.close(copy)
