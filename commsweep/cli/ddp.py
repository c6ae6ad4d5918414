"""`commsweep ddp`: a run's learners as real processes, beside their simulation."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from commsweep.cli.options import count, number, whole_number
from commsweep.cli.pipeline import bandwidth, seconds
from commsweep.cli.runs import (
    changes,
    chosen,
    compared_with_simulation,
    execution,
    execution_options,
    points_option,
)
from commsweep.config import run_id
from commsweep.config.execution import LearnerWiring
from commsweep.errors import UserError
from commsweep.store import DIVERGED, FINISHED, Row, RunFolder, Store

if TYPE_CHECKING:
    pass

BUFFER = LearnerWiring().buffer
# Parts of a step in the order of tables, and what people call them.
PARTS = {
    "passes": "forward, backward, update",
    "gradients": "gradient messages",
    "factors": "factor computation",
    "factor messages": "factor messages",
    "inversion": "inversion",
    "inverse messages": "inverse messages",
    "preconditioning": "preconditioning",
}


def add_commands(commands: argparse._SubParsersAction, shared: argparse.ArgumentParser) -> None:
    """Register this file's subcommand."""
    parser = commands.add_parser(
        "ddp",
        parents=[shared, execution_options(), points_option()],
        help="train with one real process a learner",
        description=(
            "Train a preset with one process a learner on this machine, packed payloads over "
            "gloo between them. Prints the scores, the bytes handed to the transport, the "
            "exposed time of each part of a step, and whether the recorded simulation of the "
            "same run (commsweep run) agrees. Recorded in STORE/learners. With --bandwidth or "
            "--latency the learners run in network namespaces, each with a link of that kind to "
            "a common switch (Linux, root)."
        ),
    )
    parser.add_argument("preset", help="a preset (commsweep presets lists them)")
    parser.add_argument(
        "settings",
        nargs="*",
        default=[],
        metavar="KEY=VALUE",
        help="for instance grad.compressor.kind=qsgd",
    )
    parser.add_argument(
        "--learners", type=count, help="processes (default: the preset's grad.learners)"
    )
    parser.add_argument(
        "--collective",
        choices=("exact", "ring", "tree", "alltoall"),
        help="how codes are summed: grad.collective (default: the preset's, exact)",
    )
    parser.add_argument(
        "--steps",
        type=whole_number(0),
        default=0,
        help="measure so many steps and end (default: train to the end and evaluate)",
    )
    parser.add_argument(
        "--bandwidth",
        type=bandwidth,
        default=0.0,
        metavar="RATE",
        help="of every learner's link, each way: 10Mbit, 1Gbit, ... (default: as it is)",
    )
    parser.add_argument(
        "--latency",
        type=seconds,
        default=0.0,
        metavar="TIME",
        help="between two learners, one way: 5ms, 0.1s (default: none)",
    )
    parser.add_argument(
        "--patience",
        type=number(0, 1e6),
        default=300.0,
        metavar="SECONDS",
        help="silence of the others after which a learner gives up (default: 300)",
    )
    group = parser.add_argument_group("K-FAC (none of this changes a result)")
    group.add_argument(
        "--placement",
        choices=("everywhere", "spread", "balanced", "shared"),
        default="balanced",
        help=(
            "who inverts a factor: all (D-KFAC), one each (MPD-KFAC), small ones all and large "
            "ones by load (SPD-KFAC, the default), or --fraction of the learners work for a "
            "layer (KAISA)"
        ),
    )
    group.add_argument(
        "--fraction", type=number(0, 1), default=1.0, help="of --placement shared (default: 1)"
    )
    group.add_argument(
        "--small",
        type=whole_number(0),
        default=0,
        metavar="ROWS",
        help="factors below this are small (default: where inverting is measured to be cheaper)",
    )
    group.add_argument(
        "--fusion",
        choices=("after", "layer", "threshold", "pipelined"),
        default="pipelined",
        help=(
            "factors in one message after the backward, one each, up to --buffer elements, or "
            "by SPD-KFAC's rule from measured times (the default)"
        ),
    )
    group.add_argument(
        "--buffer",
        type=count,
        metavar="ELEMENTS",
        help=f"of --fusion threshold (default: {BUFFER:,})",
    )
    parser.set_defaults(command=_ddp)


def _ddp(args: argparse.Namespace) -> int:
    if args.device not in ("auto", "cpu"):
        raise UserError(
            f"--device {args.device}: the learners are processes on this machine's CPU cores; "
            "use cpu"
        )
    settings = changes(args.settings)
    for name in ("learners", "collective"):
        if (value := getattr(args, name)) is not None:
            settings[f"grad.{name}"] = value
    run = chosen(args.preset, settings)
    for option, is_given, needs, value in (
        ("fraction", args.fraction != 1, "placement", "shared"),
        ("small", args.small, "placement", "balanced"),
        ("buffer", args.buffer is not None, "fusion", "threshold"),
    ):
        if is_given and getattr(args, needs) != value:
            raise UserError(f"--{option} goes with --{needs} {value} only")
    from commsweep.processes import ddp

    wiring = LearnerWiring(
        placement=args.placement,
        fraction=args.fraction,
        small=args.small,
        fusion=args.fusion,
        buffer=args.buffer or BUFFER,
        bandwidth=args.bandwidth,
        latency=args.latency,
        steps=args.steps,
        threads=args.threads or 1,
    )
    store = Store(args.store)
    recorded = ddp.folder_of(store, run, wiring).row() is not None
    (row,) = ddp.execute(
        [(run, wiring)], store, execution(args, progress=not args.json), args.patience
    )
    compared = compared_with_simulation(row, store.folder(run_id(run)).row())
    print(
        json.dumps(row | {"simulation": compared})
        if args.json
        else ("recorded earlier (remove its folder to measure anew)\n" if recorded else "")
        + describe(row, compared, ddp.folder_of(store, run, wiring))
    )
    return {FINISHED: 0, DIVERGED: 3}.get(row["status"], 0)


def measure(args: argparse.Namespace, plan: list, store: Store, calm: bool = False) -> None:
    """Take a plan's missing measurements of learners; calm: again while something else has the
    machine.
    """
    from tqdm import tqdm

    from commsweep.processes import ddp

    missing = sum(ddp.folder_of(store, *measurement).row() is None for measurement in plan)
    print(f"{len(plan)} measurements, {missing} missing", file=sys.stderr)
    with tqdm(total=missing, unit="measurement", disable=args.json or None, leave=False) as bar:
        ddp.execute(
            plan, store, execution(args), args.patience, lambda n: bar.update(n - bar.n), calm=calm
        )


def describe(row: Row, compared: str, folder: RunFolder) -> str:
    """A row for people."""
    metrics, steps, learners = row["metrics"], max(1, row["steps"]), row["run"]["grad"]["learners"]
    if row["error"]:
        return f"{learners} processes: {row['status']}, {row['error']}"
    score = (
        f"test accuracy {100 * metrics['test_on_acc']:.2f} %, "
        if "test_on_acc" in metrics
        else (f"test perplexity {metrics['test_on_ppl']:.3f}, " if metrics else "")
    )
    loss = f"loss {metrics['test_on_loss']:.6f}" if metrics else "not evaluated"
    lines = [
        f"{learners} processes, {steps} steps in {row['seconds']['train']:.1f} s: {score}{loss}",
        f"  bytes a step          {row['gradients']['up']:,.0f} of gradients up by rank 0's "
        "ledger; handed to gloo by each:",
    ]
    for kind in sorted(
        {name for sent in row["transport"] for name in sent} - {"probe", "statistics", "evaluation"}
    ):
        lines.append(
            f"    {kind:19} "
            + ", ".join(f"{counts.get(kind, 0) / steps:,.0f}" for counts in row["transport"])
        )
    timing = row["timing"]
    if timing:
        lines.append(
            f"  step                  {1e3 * timing['step_seconds']:.1f} ms (middle half of "
            f"{timing['steps']}); exposed:"
        )
        lines += [
            f"    {name:25} {1e3 * timing['parts'][label]:8.1f} ms"
            for label, name in PARTS.items()
            if timing["parts"].get(label)
        ]
        if "waited" in timing:  # earlier versions did not tell
            lines.append(f"    {'waiting, within these':25} {1e3 * timing['waited']:8.1f} ms")
        if timing.get("relayed"):  # this machine's own, which real links would not take
            share = timing["relayed"] / timing["step_seconds"]
            lines.append(
                f"    {'a relay, of a core':25} {1e3 * timing['relayed']:8.1f} ms "
                f"({100 * share:.0f} %)"
            )
    return "\n".join([*lines, f"  simulation            {compared}", f"  folder {folder.path}"])
