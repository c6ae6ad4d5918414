"""`commsweep ddp`: a run's learners as real processes (DistributedDataParallel over gloo), beside their simulation."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

from commsweep.experiments.config import override, run_id
from commsweep.experiments.errors import UserError
from commsweep.experiments.presets import PRESETS, preset
from commsweep.experiments.store import DIVERGED, FINISHED, Row, Store
from commsweep.options import count
from commsweep.runs import changes, execution, execution_options


def add_commands(commands: argparse._SubParsersAction, shared: argparse.ArgumentParser) -> None:
    """Register this file's subcommand."""
    parser = commands.add_parser(
        "ddp", parents=[shared, execution_options()], help="train with one real process a learner",
        description="Train a preset with one process a learner on this machine: DistributedDataParallel whose "
                    "communication hook sends the packed payloads over gloo. Prints the scores, the bytes handed to "
                    "the transport, and whether the recorded simulation of the same run (commsweep run) agrees. "
                    "Nothing is recorded.")
    parser.add_argument("preset", help=f"one of: {', '.join(PRESETS)}")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="for instance grad.compressor.kind=qsgd")
    parser.add_argument("--learners", type=count, help="processes (default: the preset's grad.learners)")
    parser.set_defaults(command=_ddp)


def _ddp(args: argparse.Namespace) -> int:
    if args.device not in ("auto", "cpu"):
        raise UserError(f"--device {args.device}: the learners are processes on this machine's CPU cores; use cpu")
    given = changes(args.settings) | ({} if args.learners is None else {"grad.learners": args.learners})
    run = override(preset(args.preset), given)
    from commsweep.experiments.processes import ddp

    row, _ = ddp.execute(run, replace(execution(args, progress=not args.json), device="cpu"))
    recorded = Store(args.store).folder(run_id(run)).row() if args.store.is_dir() else None
    compared = compare(row, recorded)
    if args.json:
        print(json.dumps(row | {"simulation": compared}))
    else:
        print(describe(row, compared))
    return {FINISHED: 0, DIVERGED: 3}.get(row["status"], 1)


def describe(row: Row, compared: str) -> str:
    """A row for people."""
    metrics, steps = row["metrics"], max(1, row["steps"])
    if row["error"]:
        return f"{row['run']['grad']['learners']} processes: {row['status']}, {row['error']}"
    score = f"accuracy {100 * metrics['test_on_acc']:.2f} %" if "test_on_acc" in metrics else (
        f"perplexity {metrics['test_on_ppl']:.3f}")
    sent = ", ".join(f"{one['gradients'] / steps:,.0f}" for one in row["transport"])
    return "\n".join([
        f"{row['run']['grad']['learners']} processes, {steps} steps in {row['seconds']['train']:.1f} s: test {score}, "
        f"loss {metrics['test_on_loss']:.6f}",
        f"  bytes a step          {row['gradients']['up']:,.0f} up by rank 0's ledger; handed to gloo a step: {sent}",
        f"  simulation            {compared}"])


def compare(row: Row, recorded: Row | None) -> str:
    """Whether the recorded simulation of the same run has the same scores."""
    if row["status"] != FINISHED:
        return "not compared: it did not finish"
    if recorded is None or recorded["status"] != FINISHED:
        return "not in the store: execute it with commsweep run and the same settings"
    if row["run"]["model"].get("dropout"):
        return "not compared: dropout draws differ between processes"
    # The training loss is left out: a process knows that of its own share only.
    differ = max(abs(row["metrics"][key] - recorded["metrics"][key]) for key in recorded["metrics"]
                 if key.startswith(("val_", "test_")))
    return "the same scores, bit for bit" if differ == 0 else f"scores differ by up to {differ:.2g}"
