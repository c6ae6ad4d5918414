"""Cells as a Slurm job array, through submitit: `--slurm partition=gpu --slurm gpus_per_node=1`.

Every job of the array is a launcher of its own on the same store (see `local`): it takes cells that
nobody has until none is left, so the array's size is how many machines help, not how many cells
there are. A job that reaches its time limit is queued again by submitit and continues from the
runs' checkpoints. The jobs go on when this process ends; another launch joins them.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from commsweep.config import Run, record, run_id
from commsweep.config.override import parse
from commsweep.errors import UserError, nearest
from commsweep.launching.executors import local
from commsweep.launching.executors.job import (
    Interrupts,
    Job,
    Launched,
    StopFile,
    missing,
    record_end,
)
from commsweep.store import FAILED, OOM, TIMEOUT, Busy, Store

LOOK = 1.0  # seconds between looks at the store
MINUTES, REQUEUES = 1440, 20  # a job's time limit unless given; how often it is queued again
BLAME = {"OUT_OF_MEMORY": OOM, "TIMEOUT": TIMEOUT}  # what a job's end says of the cells it had


def run(job: Job) -> Launched:
    """Submit arrays and follow the store until every cell has an outcome or no job can get further.

    Raises UserError when submitit is missing, there is no Slurm, or a parameter is unknown to it.
    """
    try:
        import submitit
    except ImportError:
        raise UserError("--executor slurm needs submitit: pip install 'commsweep[slurm]'") from None
    root = job.store.root.resolve()
    name = f"slurm-{os.getpid()}-{time.time_ns()}"
    stop = StopFile(root, name)
    follow, started, array = _Follow(job), time.monotonic(), []
    try:
        with Interrupts(stop.set, job.notice) as interrupts:
            while follow.left and follow.moved:
                folder = root / ".slurm" / name / str(len(follow.report.outcomes))
                executor, size = (
                    _executor(submitit, folder, job.cluster),
                    min(job.workers or 1, len(follow.left)),
                )
                array = _submit(
                    executor,
                    [
                        _Launcher(list(follow.left.values()), root, job, stop, index / size)
                        for index in range(size)
                    ],
                )
                follow.begin(folder, size)
                names = ", ".join(submitted.job_id for submitted in array[:8])
                job.notice(f"{size} jobs: {names}{', ...' if size > 8 else ''}")
                while follow.look() and not all(submitted.done() for submitted in array):
                    time.sleep(LOOK)
                if interrupts.asked:
                    raise KeyboardInterrupt
                follow.blame(
                    [
                        submitted.state
                        for submitted in array
                        if submitted.state not in ("FINISHED", "COMPLETED")
                    ]
                )
            follow.give_up(array)
    except KeyboardInterrupt:
        _cancel(array)  # after the first Ctrl-C they have ended by themselves
        raise
    finally:
        stop.clear()
        follow.report.wall_seconds = time.monotonic() - started
    return follow.report


class _Launcher:
    """The program of a job of the array: launch what is missing on the machine it got. Pickled by
    submitit.
    """

    def __init__(
        self, runs: list[Run], root: Path, job: Job, stop: StopFile, seconds: float
    ) -> None:
        # each job begins elsewhere in the list, so that they seldom want the same cell
        first = int(seconds * len(runs))
        self.cells = [record(run) for run in runs[first:] + runs[:first]]
        self.root, self.execution, self.timeout = str(root), job.execution, job.timeout
        self.per_gpu, self.stop = job.per_gpu, stop

    def __call__(self) -> str:
        store = Store(self.root)
        left = missing([parse(cell) for cell in self.cells], store)
        try:
            report = local.run(
                Job(left, store, self.execution, timeout=self.timeout, per_gpu=self.per_gpu),
                stopping=self.stop,
                patient=False,
            )
        except KeyboardInterrupt:
            return "stopped"
        return "; ".join(report.errors) or "done"

    def checkpoint(self) -> Any:
        """At the job's time limit: the same again. The store knows what is left, the runs have
        their checkpoints.
        """
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


class _Follow:
    """The state of the cells, as far as the store says."""

    def __init__(self, job: Job) -> None:
        self.job, self.report = job, Launched()
        self.left: dict[str, Run] = {run_id(run): run for run in job.runs}
        self.moved = True  # whether the last array got anywhere
        self.since = 0

    def begin(self, folder: Path, size: int) -> None:
        """An array was submitted; `folder` is as old as it is by the clock of the store's file
        system.
        """
        self.moved, self.since = False, folder.stat().st_mtime_ns
        self.report.workers = max(self.report.workers, size)

    def look(self) -> bool:
        """Note new outcomes; whether any cell is still without one."""
        recorded = self.job.store.stamps()  # one look at the store, however many cells are left
        for name in [name for name in self.left if name in recorded]:
            row = self.job.store.folder(name).row()
            if row is None:  # removed since that look
                continue
            self._note(
                name,
                {
                    "status": row["status"],
                    "error": row["error"],
                    "busy": sum(row["seconds"].get(kind, 0.0) for kind in ("train", "eval")),
                },
            )
        return bool(self.left)

    def blame(self, ends: list[str]) -> None:
        """Jobs ended so, and not of themselves: record it for the cells they had begun and left."""
        self.look()
        status = next((BLAME[end] for end in ends if end in BLAME), FAILED)
        for name, cell in list(self.left.items()) if ends else ():
            run_file = self.job.store.folder(name).path / "run.json"
            if run_file.exists() and run_file.stat().st_mtime_ns >= self.since:
                try:
                    answer = record_end(
                        cell, self.job.store, status, f"its Slurm job ended: {', '.join(set(ends))}"
                    )
                except Busy:  # another launcher has it
                    continue
                self._note(name, answer)

    def give_up(self, array: list[Any]) -> None:
        """Report the cells that no job could begin, with what the last jobs said."""
        results = {
            str(submitted.result())
            for submitted in array
            if submitted.done() and not submitted.exception()
        }
        for name in list(self.left):
            why = next(
                (
                    line.partition(": ")[2]
                    for words in results
                    for line in words.split("; ")
                    if name in line
                ),
                "no job began it; see the logs in the store's .slurm folder",
            )
            self._note(name, {"status": "refused", "error": why})

    def _note(self, name: str, answer: dict[str, Any]) -> None:
        cell = self.left.pop(name)
        self.moved = True
        self.report.add(cell, answer)
        self.job.progress(cell, answer["status"])


def _executor(submitit: Any, folder: Path, cluster: dict[str, str]) -> Any:
    """submitit's executor with the parameters of --slurm. Raises UserError when it refuses them."""
    common, valid = (
        submitit.AutoExecutor._typed_parameters(),
        submitit.SlurmExecutor._valid_parameters(),
    )
    options = {
        key.removeprefix("slurm_"): _literal(value)
        for key, value in cluster.items()
        if key != "cluster"
    }
    if unknown := sorted(options.keys() - common.keys() - valid):
        raise UserError(
            f"--slurm {unknown[0]}={cluster[unknown[0]]}: submitit has no such parameter"
            f"{nearest(unknown[0], {*common, *valid})}"
        )
    try:
        executor = submitit.AutoExecutor(
            folder, cluster=cluster.get("cluster", "slurm"), slurm_max_num_timeout=REQUEUES
        )
        folder.mkdir(parents=True, exist_ok=True)
        executor.update_parameters(
            name="commsweep",
            **{"timeout_min": MINUTES}
            | {key if key in common else f"slurm_{key}": value for key, value in options.items()},
        )
    except Exception as error:
        raise UserError(f"--executor slurm: {str(error).strip().splitlines()[0]}") from None
    return executor


def _submit(executor: Any, calls: list[_Launcher]) -> list[Any]:
    try:
        with executor.batch():
            return [executor.submit(call) for call in calls]
    except Exception as error:
        raise UserError(
            f"--executor slurm: the jobs were not taken: {str(error).strip().splitlines()[0]}"
        ) from None


def _cancel(array: list[Any]) -> None:
    for submitted in array:
        if not submitted.done():
            submitted.cancel(check=False)


def _literal(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
