"""`commsweep links`: measure a plan over links of real bandwidth and latency, and report."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from textwrap import fill
from typing import cast

from commsweep.cli.ddp import measure
from commsweep.cli.options import folder, number, writable
from commsweep.cli.runs import execution, execution_options
from commsweep.config import run_id
from commsweep.config.execution import LearnerWiring
from commsweep.errors import UserError
from commsweep.registry import Measurement
from commsweep.store import Store


def add_commands(commands: argparse._SubParsersAction, shared: argparse.ArgumentParser) -> None:
    """Register this file's subcommand."""
    parser = commands.add_parser(
        "links",
        parents=[shared, execution_options()],
        help="measure step times over links of real bandwidth",
        formatter_class=argparse.RawDescriptionHelpFormatter,  # the list of plans has lines
        description=fill(
            "Measure every run of a plan as real processes in network namespaces, over links "
            "shaped to each bandwidth and latency (Linux, root), skipping what the store already "
            "holds; train the runs of pipelines to the end in simulation, which gives the "
            "quality reached; then write tables and figures: step time against bandwidth, time "
            "to target quality, what the timeline predicts beside what was measured, and beyond "
            "it. The report of K-FAC takes its trainings from the sweep of the plan's name."
        ),
        epilog=cast(str, _plans),  # called when it is shown: it loads content
    )
    parser.add_argument("plan", help="a plan of measurements, from the list below")
    parser.add_argument("--out", type=folder, help="folder to write to (default: out/PLAN)")
    parser.add_argument(
        "--only", choices=("measure", "train", "report"), help="do one of the three parts"
    )
    parser.add_argument(
        "--patience",
        type=number(0, 1e6),
        default=120.0,
        metavar="SECONDS",
        help="silence of another process after which one gives up (default: 120)",
    )
    parser.set_defaults(command=_links)


def _plans() -> str:
    from commsweep.registry import first_sentence, plans

    lines = ["plans:"]
    for name, plan in plans().items():
        text = f"  {name:17} {first_sentence(plan.__doc__)}"
        lines.append(fill(text, 79, subsequent_indent=" " * 20))
    return "\n".join(lines)


def _links(args: argparse.Namespace) -> int:
    from commsweep.registry import plan, provided

    measurements, store = plan(args.plan), Store(args.store)
    out = args.out or Path("out") / args.plan
    writable(out)
    kind = _kind(measurements)
    if args.only == "train" and kind != "stages":
        raise UserError(
            f"--only train: plan '{args.plan}' measures {kind}, whose trainings are a sweep's "
            "(commsweep sweep list)"
        )
    if args.only in (None, "measure"):
        if kind == "stages":
            _measure(args, measurements, store)
        else:
            measure(args, measurements, store, calm=kind == "learners")
    if args.only in (None, "train") and kind == "stages":
        _train(args, measurements, store)
    if args.only in (None, "report"):
        report = provided(f"report of {kind}")(args.store, args.plan, measurements, out)
        print(json.dumps(report.record()) if args.json else report.text())
    return 0


def _kind(measurements: list[Measurement]) -> str:
    """Return what the processes of a plan are: stages of a pipeline, learners, or kfac."""
    if any(run.kfac for run, _ in measurements):
        return "kfac"
    return "learners" if isinstance(measurements[0][1], LearnerWiring) else "stages"


def _measure(args: argparse.Namespace, measurements: list, store: Store) -> None:
    from tqdm import tqdm

    from commsweep.processes.pipeline_plan import measure, missing

    todo = missing(measurements, store)
    print(f"{len(measurements)} measurements, {len(todo)} missing", file=sys.stderr)
    with tqdm(total=len(todo), unit="measurement", disable=args.json or None, leave=False) as bar:
        measure(todo, store, execution(args), args.patience, lambda n: bar.update(n - bar.n))


def _train(args: argparse.Namespace, measurements: list, store: Store) -> None:
    """Train every run in simulation, which the processes equal bit for bit."""
    from commsweep.launching.launch import launch

    runs = list({run_id(run): run for run, _ in measurements}.values())
    launched = launch(runs, store, execution(args, by="sweep"))
    if launched.errors:
        raise UserError(f"{len(launched.errors)} of the runs failed: {launched.errors[0]}")
