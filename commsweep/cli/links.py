"""`commsweep links`: a plan of measurements over links of real bandwidth and latency, and what they
say.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from commsweep.cli.ddp import measure, measured
from commsweep.cli.options import folder, number, writable
from commsweep.cli.runs import execution, execution_options
from commsweep.config import run_id
from commsweep.config.execution import LearnerWiring
from commsweep.errors import UserError
from commsweep.store import Store


def add_commands(commands: argparse._SubParsersAction, shared: argparse.ArgumentParser) -> None:
    """Register this file's subcommand."""
    parser = commands.add_parser(
        "links",
        parents=[shared, execution_options()],
        help="measure step times over links of real bandwidth",
        description=(
            "Measure every run of a plan as real processes in network namespaces, over links "
            "shaped to each bandwidth and latency (Linux, root), skipping what STORE/pipelines "
            "already holds; train the same runs to the end in simulation, which gives the "
            "quality reached; then write tables and figures: step time against bandwidth, time "
            "to target quality, what the timeline predicts beside what was measured, and beyond "
            "it."
        ),
    )
    parser.add_argument(
        "plan",
        help=(
            "calibrate-links (what slow links do to this machine), heldout-links (predictions "
            "put to the test), heldout-learners, heldout-advice, local-links (learners that "
            "meet rarely), unequal-links, late-links (gradients a step late), demo-links, "
            "links-text or smoke-links"
        ),
    )
    parser.add_argument("--out", type=folder, help="folder to write to (default: out/PLAN)")
    parser.add_argument(
        "--only", choices=("measure", "train", "report"), help="do one of the three parts"
    )
    parser.add_argument(
        "--patience",
        type=number(0, 1e6),
        default=120.0,
        metavar="SECONDS",
        help="silence of a neighbour after which a stage gives up (default: 120)",
    )
    parser.set_defaults(command=_links, program="commsweep links")


def _links(args: argparse.Namespace) -> int:
    from commsweep.registry import plan

    measurements, store = plan(args.plan), Store(args.store)
    if any(run.kfac for run, _ in measurements):
        raise UserError(
            f"plan '{args.plan}' measures K-FAC; use commsweep kfac {args.plan} instead"
        )
    writable(args.out or Path("out") / args.plan)
    if isinstance(measurements[0][1], LearnerWiring):
        return _learners(args, measurements, store)
    if args.only in (None, "measure"):
        _measure(args, measurements, store)
    if args.only in (None, "train"):
        _train(args, measurements, store)
    if args.only in (None, "report"):
        return _report(args, measurements, store)
    return 0


def _learners(args: argparse.Namespace, measurements: list, store: Store) -> int:
    """A plan of learners instead of stages; it asks for times only."""
    from commsweep.launching.grid import TUNING_SEED
    from commsweep.timing import network_report

    if args.only in (None, "measure"):
        measure(args, measurements, store, calm=True)
    if args.only in (None, "report"):
        found = measured(args, measurements, store)
        made = network_report.write_learners(
            found, args.out or Path("out") / args.plan, store, range(TUNING_SEED)
        )
        print(json.dumps(made.record()) if args.json else made.text())
    return 0


def _measure(args: argparse.Namespace, measurements: list, store: Store) -> None:
    from tqdm import tqdm

    from commsweep.processes.measure import measure, missing

    todo = missing(measurements, store)
    print(f"{len(measurements)} measurements, {len(todo)} missing", file=sys.stderr)
    with tqdm(total=len(todo), unit="measurement", disable=args.json or None, leave=False) as bar:
        measure(todo, store, execution(args), args.patience, lambda n: bar.update(n - bar.n))


def _train(args: argparse.Namespace, measurements: list, store: Store) -> None:
    """The quality that each run reaches, from the simulation (which the processes equal bit for
    bit).
    """
    from commsweep.launching.launch import launch

    runs = list({run_id(one): one for one, _ in measurements}.values())
    made = launch(runs, store, execution(args, by="sweep"))
    if made.errors:
        raise UserError(f"{len(made.errors)} of the runs failed: {made.errors[0]}")


def _report(args: argparse.Namespace, measurements: list, store: Store) -> int:
    from commsweep.processes import pipeline
    from commsweep.registry import plan
    from commsweep.timing import network_report

    named, calibration = (
        [pipeline.folder_of(store, *one).path.name for one in every]
        for every in (measurements, plan(network_report.CALIBRATION))
    )
    made = network_report.write(args.store, named, args.out or Path("out") / args.plan, calibration)
    print(json.dumps(made.record()) if args.json else made.text())
    return 0
