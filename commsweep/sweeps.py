"""`commsweep sweep plan | launch | status`."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import Counter
from typing import Any

from commsweep.runs import execution, execution_options
from experiments.config import Run, run_id
from experiments.errors import UserError
from experiments.store import Store
from sweeps.launch import launch, missing, register, set_aside
from sweeps.papers import SWEEPS, sweep


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
                       help="execute these again, too: failed, diverged (comma-separated)")
    start.set_defaults(command=_launch)
    status = kinds.add_parser("status", parents=[shared], help="count the outcomes so far")
    status.set_defaults(command=_status)
    for each in (plan, start, status):
        each.add_argument("name", help=f"one of: {', '.join(SWEEPS)}")
    for each in (plan, start):
        each.add_argument("--workers", type=int, help="processes (default: one a GPU, or one a CPU core)")


def _plan(args: argparse.Namespace) -> int:
    runs, store = sweep(args.name), Store(args.store)
    left = missing(runs, store)
    seconds = _estimate(left, store, args)
    workers = args.workers or execution(args).workers()
    plan = {"sweep": args.name, "cells": len(runs), "missing": len(left), "workers": workers,
            "seconds": None if seconds is None else seconds / workers,
            "missing_runs": [run_id(run) for run in left]}
    if args.json:
        print(json.dumps(plan))
        return 0
    statuses = {run_id(run): store.status(run_id(run)) for run in runs}
    from analysis.results import describe
    from experiments.config import flatten

    for run in runs:
        print(f"{run_id(run)}  {statuses[run_id(run)]:11}  seed {run.seed}  "
              f"{describe(flatten(run.model_dump(mode='json')))}")
    time = "unknown (no timed run of this kind yet: add --probe)" if seconds is None else _clock(plan["seconds"])
    print(f"{len(runs)} cells, {len(left)} missing; about {time} with {workers} workers")
    return 0


def _estimate(left: list[Run], store: Store, args: argparse.Namespace) -> float | None:
    """Worker seconds for these runs: by finished runs of the same size, or by a probe; None if unknown."""
    timed: dict[Any, list[float]] = {}
    for row in store.rows():
        if row["status"] == "finished":
            run = Run.model_validate(row["run"])
            timed.setdefault(_size(run), []).append(row["seconds"]["wall"] / run.epochs)
    total = 0.0
    for run in left:
        if _size(run) not in timed:
            if not args.probe:
                return None
            from experiments.probe import seconds_per_epoch

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
    workers = args.workers if args.workers is not None else how.workers()
    if workers < 1:
        raise UserError(f"--workers {workers}: at least 1")
    retry = {part for part in args.retry.split(",") if part}
    if unknown := retry - {"failed", "diverged"}:
        raise UserError(f"--retry {','.join(sorted(unknown))}: not an outcome; use failed, diverged or both")
    register(args.name, runs, store)
    set_aside(runs, store, retry)
    left = missing(runs, store)
    if how.device != "auto":
        how.torch_device()  # a device that is not there is said once, not once a cell
    with tqdm(total=len(runs), initial=len(runs) - len(left), unit="run", desc=args.name, file=sys.stderr,
              disable=args.json, smoothing=0.05) as bar:
        report = launch(left, store, how, workers, lambda name, status: bar.update())
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
    return 1 if report.outcomes["failed"] or report.outcomes["refused"] else 0


def _status(args: argparse.Namespace) -> int:
    runs, store = sweep(args.name), Store(args.store)
    counts = Counter(store.status(run_id(run)) for run in runs)
    if args.json:
        print(json.dumps({"sweep": args.name, "cells": len(runs), **counts}))
        return 0
    print(f"{args.name}: {len(runs)} cells: " + ", ".join(f"{n} {status}" for status, n in counts.items()))
    for run in runs:
        row = store.folder(run_id(run)).row()
        if row and row["error"]:
            print(f"  {row['id']} {row['status']}: {row['error']}")
    return 0


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
