"""Cells as a Slurm job array, through submitit: `--slurm partition=gpu --slurm gpus_per_node=1`.

Every job of the array is a launcher of its own on the same store (see `local`): it takes cells that nobody has
until none is left, so the array's size is how many machines help, not how many cells there are. A job that
reaches its time limit is queued again by submitit and continues from the runs' checkpoints. The jobs go on when
this process ends; another launch joins them.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from experiments.config import Run, parse, run_id
from experiments.errors import UserError
from experiments.store import FAILED, OOM, Busy, Store
from sweeps.executors import local
from sweeps.launch import Interrupts, Job, Report, StopFile, missing, record_end

LOOK = 1.0  # seconds between looks at the store
OWN = {"cluster": "slurm", "time": "1440", "requeues": "3"}  # ours of --slurm KEY=VALUE: minutes; times a job may end


def run(job: Job) -> Report:
    """Submit the array and follow the store until every cell has an outcome.

    Raises UserError when submitit is missing, there is no Slurm, or a parameter is unknown to it.
    """
    try:
        import submitit
    except ImportError:
        raise UserError("--executor slurm needs submitit: pip install 'commsweep[slurm]'") from None
    root = job.store.root.resolve()
    name = f"slurm-{os.getpid()}-{time.time_ns()}"
    stop = StopFile(root, name)
    follow = _Follow(job)
    if not job.runs:
        return follow.report
    size = min(job.workers or 1, len(job.runs))
    executor = _executor(submitit, root / ".slurm" / name, job, size)
    calls = [Launcher([run.model_dump(mode="json") for run in job.runs], str(root), job.how, job.timeout, job.per_gpu,
                      stop, turn, size) for turn in range(size)]
    with executor.batch():
        array = [executor.submit(call) for call in calls]
    follow.report.workers = size
    job.notice(f"submitted {size} jobs: {', '.join(one.job_id for one in array[:8])}{' ...' if size > 8 else ''}")
    try:
        with Interrupts(stop.set, job.notice) as interrupts:
            lost = 0
            while follow.look() and not all(one.done() for one in array):
                time.sleep(LOOK)
            if interrupts.asked:
                raise KeyboardInterrupt
            for one in array:
                lost += _lost(one)
        follow.look()
        if follow.left:
            follow.finish(_why(array))
    except KeyboardInterrupt:
        if not all(one.done() for one in array):  # the second Ctrl-C
            for one in array:
                one.cancel(check=False)
        raise
    finally:
        stop.clear()
    return follow.report
