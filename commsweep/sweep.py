"""`commsweep sweep plan | launch | status | prune`."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections import Counter
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from commsweep.experiments.config import Run, run_id
from commsweep.experiments.errors import UserError
from commsweep.experiments.store import CONTINUABLE, FINISHED, UNFINISHED, Store
from commsweep.runs import changes, execution, execution_options
from commsweep.sweeps.launch import EXECUTORS, launch, missing, register, set_aside
from commsweep.sweeps.papers import SWEEPS, sweep


def add_commands(commands: argparse._SubParsersAction, shared: argparse.ArgumentParser) -> None:
    """Register this file's subcommands."""
    parent = commands.add_parser("sweep", help="plan, launch or inspect a named grid of runs",
                                 description="A sweep is a list of runs; only those without an outcome are executed.",
                                 epilog="sweeps: " + ", ".join(SWEEPS))
    kinds = parent.add_subparsers(required=True, metavar="ACTION")
    plan = kinds.add_parser("plan", parents=[shared, execution_options()], help="show the cells and estimate the time")
    plan.add_argument("--probe", action="store_true", help="measure some steps here when no run has been timed yet")
    plan.set_defaults(command=_plan)
    start = kinds.add_parser("launch", parents=[shared, execution_options()], help="execute the missing cells")
    start.add_argument("--retry", metavar="OUTCOMES", default="",
                       help=f"execute these again, too: {', '.join(UNFINISHED)} (comma-separated)")
    start.add_argument("--timeout", type=float, metavar="SECONDS",
                       help="stop a cell after so long and record it (default: never)")
    start.add_argument("--per-gpu", type=int, default=1, metavar="N", help="cells at once on each GPU (default: 1)")
    start.add_argument("--executor", metavar="ENGINE", default="local",
                       help=f"{', '.join(EXECUTORS)} (default: local)")
    start.add_argument("--ray-address", metavar="HOST:PORT",
                       help="a running Ray cluster (default: this machine as one)")
    start.add_argument("--ray-cpus", metavar="N", help="CPU cores of a cell on Ray (default: 1)")
    start.add_argument("--ray-gpus", metavar="N", help="GPUs of a cell on Ray (default: one for --per-gpu cells)")
    start.add_argument("--slurm", metavar="KEY=VALUE", action="append", default=[],
                       help="parameter of submitit, such as partition=gpu, gpus_per_node=1, timeout_min=240; "
                            "cluster=local tries it here; --workers is the size of the job array")
    start.add_argument("--wandb", choices=("disabled", "offline", "online"), default="disabled",
                       help="show finished runs in Weights & Biases, the report at the end")
    start.set_defaults(command=_launch)
    status = kinds.add_parser("status", parents=[shared], help="outcomes so far, rate, time left, failures")
    status.set_defaults(command=_status)
    prune = kinds.add_parser("prune", parents=[shared], help="remove run folders that no sweep names",
                             description="Remove the run folders of a store that none of its sweeps names. Runs being "
                                         "executed are left alone.")
    prune.add_argument("--dry-run", action="store_true", help="only say what would go")
    prune.set_defaults(command=_prune)
    for each in (plan, start, status):
        each.add_argument("name", help=f"one of: {', '.join(SWEEPS)}")
    for each in (plan, start):
        each.add_argument("--workers", type=int, help="processes (default: one a GPU, or one a CPU core)")


def _plan(args: argparse.Namespace) -> int:
    runs, store = sweep(args.name), Store(args.store)
    cells = {run_id(run): run for run in runs}
    rows = store.rows()
    statuses = store.statuses(list(cells), rows)
    left = [run for name, run in cells.items() if statuses[name] not in (FINISHED, *UNFINISHED)]
    seconds = _estimate(left, rows, args)
    workers = args.workers or execution(args).workers()
    plan = {"sweep": args.name, "cells": len(runs), "missing": len(left), "workers": workers,
            "seconds": None if seconds is None else seconds / workers,
            "missing_runs": [run_id(run) for run in left]}
    if args.json:
        print(json.dumps(plan))
        return 0
    from commsweep.analysis.results import describe
    from commsweep.experiments.config import flatten

    for name, run in cells.items():
        print(f"{name}  {statuses[name]:11}  seed {run.seed}  "
              f"{describe(flatten(run.model_dump(mode='json')))}")
    time = "unknown (no timed run of this kind yet: add --probe)" if seconds is None else _clock(plan["seconds"])
    print(f"{len(runs)} cells, {len(left)} missing; about {time} with {workers} workers")
    return 0


def _estimate(left: list[Run], rows: list[dict[str, Any]], args: argparse.Namespace) -> float | None:
    """Worker seconds for these runs: by finished runs of the same size, or by a probe; None if unknown."""
    timed: dict[Any, list[float]] = {}
    for row in rows if left else ():
        if row["status"] == FINISHED:
            run = Run.model_validate(row["run"])
            timed.setdefault(_size(run), []).append(row["seconds"]["wall"] / run.epochs)
    total = 0.0
    for run in left:
        if _size(run) not in timed:
            if not args.probe:
                return None
            from commsweep.experiments.probe import seconds_per_epoch

            timed[_size(run)] = [seconds_per_epoch(run, execution(args))]
        total += run.epochs * statistics.median(timed[_size(run)])
    return total


def _size(run: Run) -> tuple[Any, ...]:
    text = [getattr(run.data, name, None) for name in ("block_size", "train_blocks", "eval_blocks")]
    return run.model, run.data.name, run.data.batch_size, *text, run.precision, run.channels_last


def _launch(args: argparse.Namespace) -> int:
    from tqdm import tqdm

    runs, store = sweep(args.name), Store(args.store)
    how = execution(args)
    if args.workers is not None and args.workers < 1:
        raise UserError(f"--workers {args.workers}: at least 1")
    if args.per_gpu < 1:
        raise UserError(f"--per-gpu {args.per_gpu}: at least 1")
    if args.timeout is not None and not args.timeout > 0:
        raise UserError(f"--timeout {args.timeout:g}: a positive number of seconds")
    retry = {part for part in args.retry.split(",") if part}
    if unknown := retry - set(UNFINISHED):
        raise UserError(f"--retry {','.join(sorted(unknown))}: not an outcome; use some of {', '.join(UNFINISHED)}")
    register(args.name, runs, store)
    for line in store.mend([run_id(run) for run in runs]):
        print(f"commsweep: {line}", file=sys.stderr)
    set_aside(runs, store, retry)
    left = missing(runs, store)
    if how.device != "auto":
        how.torch_device()  # a device that is not there is said once, not once a cell
    view = _view(args, store)
    with tqdm(total=len(runs), initial=len(runs) - len(left), unit="run", desc=args.name, file=sys.stderr,
              disable=args.json, smoothing=0.05) as bar:
        def note(run: Run, _status: str) -> None:
            bar.update()
            if view is not None:
                view.add(run_id(run))

        try:
            report = launch(left, store, how, args.workers, executor=args.executor, place=_place(args),
                            timeout=args.timeout, per_gpu=args.per_gpu, progress=note,
                            notice=lambda line: bar.write(line, file=sys.stderr))
        finally:
            fault = view.end() if view is not None else ""
    if fault:
        print(f"commsweep: {fault}", file=sys.stderr)
    elif view is not None:
        _show(view, args, runs)
    result = {"sweep": args.name, "executed": sum(report.outcomes.values()), "outcomes": dict(report.outcomes),
              "efficiency": round(report.efficiency, 4), "seconds": round(report.wall_seconds, 1),
              "errors": report.errors}
    if args.json:
        print(json.dumps(result))
    else:
        outcomes = ", ".join(f"{n} {status}" for status, n in report.outcomes.items()) or "nothing was missing"
        print(f"{args.name}: {outcomes} in {_clock(report.wall_seconds)}"
              + (f"; {100 * report.efficiency:.0f} % of {report.workers} workers' time in steps and evaluation"
                 if report.outcomes else ""))
        for line in list(dict.fromkeys(report.errors))[:5]:
            print(f"  {line}", file=sys.stderr)
    return 1 if any(report.outcomes[bad] for bad in (*CONTINUABLE, "refused")) else 0


def _view(args: argparse.Namespace, store: Store) -> Any:
    """The replay into W&B beside a launch; None where it is not wanted."""
    if args.wandb == "disabled":
        return None
    from commsweep.sweeps.wandb import Follower, View

    view = View(store, args.name, args.wandb)
    view.check()
    return Follower(view)


def _show(view: Any, args: argparse.Namespace, runs: list[Run]) -> None:
    """What was recorded by earlier launches, and the report, where there is anything to report."""
    from commsweep.analysis import report

    view.view.push([run_id(run) for run in runs])
    with tempfile.TemporaryDirectory() as folder, suppress(UserError):  # no run has finished yet
        view.view.push_report(report.write(args.store, args.name, Path(folder), page=False).folder)


def _place(args: argparse.Namespace) -> dict[str, str]:
    """What the executor must know of its cluster. Raises UserError on options of another executor."""
    of = {"ray": {key: value for key in ("address", "cpus", "gpus")
                  if (value := getattr(args, f"ray_{key}")) is not None},
          "slurm": changes(args.slurm)}
    for engine, given in of.items():
        if given and args.executor != engine:
            raise UserError(f"--{engine}... has no effect with --executor {args.executor}; set --executor {engine}")
    return of.get(args.executor, {})


def _status(args: argparse.Namespace) -> int:
    runs, store = sweep(args.name), Store(args.store)
    recorded = store.rows()
    statuses = store.statuses([run_id(run) for run in runs], recorded)
    counts = Counter(statuses.values())
    rows = [row for row in recorded if row["id"] in statuses]
    rate = _rate(rows)
    left = sum(counts[status] for status in ("missing", "interrupted", "running", "damaged"))
    seconds = left / rate if rate and counts["running"] else None
    if args.json:
        print(json.dumps({"sweep": args.name, "cells": len(runs), **counts, "per_hour": rate and 3600 * rate,
                          "seconds_left": seconds,
                          "failures": {row["id"]: f"{row['status']}: {row['error']}" for row in rows if row["error"]}}))
        return 0
    print(f"{args.name}: {len(runs)} cells: " + ", ".join(f"{n} {status}" for status, n in counts.items()))
    if rate:
        print(f"  {3600 * rate:.0f} runs an hour" + (f", about {_clock(seconds)} left" if seconds is not None else
                                                      "" if not left else "; nothing is being executed"))
    for row in rows:
        if row["error"]:
            print(f"  {row['id']} {row['status']}: {row['error']}")
    return 0


def _rate(rows: list[dict[str, Any]]) -> float | None:
    """Runs a second over the last twenty outcomes; None while there are fewer than two moments."""
    moments = sorted(datetime.fromisoformat(row["when"]).timestamp() for row in rows if row.get("when"))[-20:]
    return (len(moments) - 1) / (moments[-1] - moments[0]) if len(moments) > 1 and moments[-1] > moments[0] else None


def _prune(args: argparse.Namespace) -> int:
    store = Store(args.store)
    gone, kept = [], []
    for name in store.unnamed():
        if args.dry_run:
            gone.append(name)
        else:
            (gone if store.remove(name) else kept).append(name)
    if args.json:
        print(json.dumps({"removed": gone, "running": kept, "dry_run": args.dry_run}))
        return 0
    print(f"{len(gone)} run folders {'would be' if args.dry_run else 'were'} removed"
          + (f"; {len(kept)} are being executed and stay" if kept else ""))
    print("".join(f"  {name}\n" for name in gone), end="")
    return 0


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
