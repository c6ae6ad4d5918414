"""Cells as tasks of a Ray cluster: `--ray-address HOST:PORT`, or a cluster of this machine's cores.

The machines share the store's file system and have commsweep installed. A task executes its cell in
a process of its own (see `local`), so that a cell that crashes or takes too long is recorded as on
one machine; Ray's part is to place tasks, on fractions of GPUs where asked, and to repeat those
whose node was lost: they continue from their checkpoint.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections import deque
from pathlib import Path
from typing import Any

from commsweep.config import Run, record
from commsweep.config.override import parse
from commsweep.errors import UserError
from commsweep.launching.executors import local
from commsweep.launching.executors.job import Interrupts, Job, Launched, StopFile, record_end
from commsweep.store import FAILED, OOM, Busy, Store

RETRIES = 5  # lost nodes a cell survives
PAUSE = 2.0  # seconds before a cell that another launcher has is looked at again


def run(job: Job) -> Launched:
    """Execute the job's cells on the cluster. Raises UserError when Ray is not installed or does
    not answer.
    """
    # what goes wrong is said in one line of ours
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "error")
    logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        import ray
    except ImportError:
        raise UserError("--executor ray needs Ray: pip install 'commsweep[ray]'") from None
    store = str(job.store.root.resolve())
    stop = StopFile(Path(store), f"ray-{os.getpid()}")
    report, started = Launched(), time.monotonic()
    todo = deque(job.runs)
    if not todo:
        return report
    # of one cell
    shares = {key: float(job.cluster[key]) for key in ("cpus", "gpus") if key in job.cluster}
    _connect(ray, job.cluster.get("address"))
    cores, gpus = shares.get("cpus", 1.0), shares.get("gpus", _gpu_share(ray, job))
    task = ray.remote(num_cpus=cores, num_gpus=gpus, max_retries=RETRIES)(_cell)
    running: dict[Any, Run] = {}
    try:
        with Interrupts(stop.set, job.notice) as interrupts:
            while (todo and not interrupts.asked) or running:
                room = job.workers or _room(ray, cores, gpus)
                report.workers = max(report.workers, min(room, len(running) + len(todo)))
                while todo and not interrupts.asked and len(running) < room:
                    cell = todo.popleft()
                    running[
                        task.remote(record(cell), store, job.execution, job.timeout, cores, stop)
                    ] = cell
                for done in ray.wait(list(running), timeout=1.0)[0] if running else ():
                    cell = running.pop(done)
                    answer = _answer(ray, done, cell, job.store)
                    if answer["status"] == "busy":
                        time.sleep(PAUSE)
                        todo.append(cell)
                    elif answer["status"] != "interrupted":
                        report.add(cell, answer)
                        job.progress(cell, answer["status"])
            if interrupts.asked:
                raise KeyboardInterrupt
    finally:
        for left in running:
            ray.cancel(left, force=True)
        report.wall_seconds = time.monotonic() - started
        stop.clear()
        ray.shutdown()
    return report


def _cell(
    settings: dict[str, Any],
    root: str,
    execution: Any,
    timeout: float | None,
    cores: float,
    stop: StopFile,
) -> dict[str, Any]:
    """Execute a cell on the node that Ray chose; runs there."""
    if not Path(root).is_dir():
        raise UserError(
            f"store '{root}' is not on node {socket.gethostname()}: all nodes need the same "
            "file system"
        )
    cell = parse(settings)
    job = Job([cell], Store(root), execution, workers=1, timeout=timeout)
    try:
        report = local.run(job, threads=max(1, int(cores)), stopping=stop, patient=False)
    except KeyboardInterrupt:
        return {"status": "interrupted"}
    status = next(iter(report.outcomes), "busy")
    error = report.errors[0].partition(": ")[2] if report.errors else None
    return {"status": status, "error": error, "busy": report.busy_seconds}


def _answer(ray: Any, done: Any, cell: Run, store: Store) -> dict[str, Any]:
    """Return what a task came to. Ray has repeated it already where that could help."""
    try:
        return ray.get(done)
    except ray.exceptions.RayTaskError as fault:
        return {"status": "refused", "error": str(fault.cause or fault).splitlines()[0]}
    except ray.exceptions.TaskCancelledError:
        return {"status": "interrupted"}
    except ray.exceptions.RayError as fault:
        status = OOM if isinstance(fault, ray.exceptions.OutOfMemoryError) else FAILED
        try:
            return record_end(
                cell,
                store,
                status,
                f"{type(fault).__name__} on the Ray cluster, {RETRIES + 1} times",
            )
        except Busy:  # the task was lost but its process lives on
            return {"status": "busy"}


def _connect(ray: Any, address: str | None) -> None:
    """Join a cluster, or start one of this machine's cores. Raises UserError when the address does
    not answer.
    """
    if address and address != "auto":
        host, _, port = address.removeprefix("ray://").rpartition(":")
        try:
            with socket.create_connection((host, int(port)), timeout=10):
                pass
        except (OSError, ValueError) as error:
            raise UserError(
                f"--ray-address {address}: no Ray cluster answers there ({error}); start one "
                "with: ray start --head --port 6379"
            ) from None
    options = {"address": address} if address else {"include_dashboard": False}
    try:
        ray.init(**options, log_to_driver=False, configure_logging=False, ignore_reinit_error=True)
    except Exception as error:
        raise UserError(
            f"--ray-address {address or 'local'}: {str(error).strip().splitlines()[0]}"
        ) from None


def _gpu_share(ray: Any, job: Job) -> float:
    """The GPUs of a cell when nothing is asked: a share of one wherever the cluster has any, unless
    told otherwise.
    """
    device = job.execution.device
    wants_gpu = device.startswith("cuda") or (
        device == "auto" and ray.cluster_resources().get("GPU")
    )
    return 1.0 / job.per_gpu if wants_gpu else 0.0


def _room(ray: Any, cores: float, gpus: float) -> int:
    """Cells for which the cluster, as it is now, has room; at least one, so that a cell may wait
    for a node.
    """
    have = ray.cluster_resources()
    rooms = [have.get(kind, 0.0) / need for kind, need in (("CPU", cores), ("GPU", gpus)) if need]
    return max(1, int(min(rooms)))
