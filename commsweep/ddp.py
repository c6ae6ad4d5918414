"""`commsweep ddp`: a run's learners as real processes (DistributedDataParallel over gloo), beside their simulation."""

from __future__ import annotations

import argparse
import json

from commsweep.experiments.config import override, run_id
from commsweep.experiments.errors import UserError
from commsweep.experiments.presets import PRESETS, preset
from commsweep.experiments.store import FINISHED, Store
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
    if run.grad.learners < 2:
        raise UserError("one learner has nobody to exchange gradients with: give --learners 2 or more")
    from dataclasses import replace

    from commsweep.experiments.data_parallel import real

    made = real.execute(run, replace(execution(args, progress=not args.json), device="cpu"))
    row = Store(args.store).folder(run_id(run)).row() if args.store.is_dir() else None
    last = made["evaluations"][-1]
    compared = _compare(last, row)
    if args.json:
        print(json.dumps({key: value for key, value in made.items() if key != "weights"} | {
            "run": run_id(run), "simulation": compared}))
        return 0
    score = f"accuracy {100 * last['test_on_acc']:.2f} %" if "test_on_acc" in last else (
        f"perplexity {last['test_on_ppl']:.3f}")
    print(f"{run.grad.learners} processes, {made['steps']} steps in {made['seconds']:.1f} s: test {score}, "
          f"loss {last['test_on_loss']:.6f}")
    print(f"  bytes a step          {made['gradients']['up']:,.0f} up by rank 0's ledger; handed to gloo a step: "
          + ", ".join(f"{sent / made['steps']:,.0f}" for sent in made["sent"]))
    print(f"  simulation            {compared}")
    return 0


def _compare(last: dict[str, float], row: dict | None) -> str:
    if row is None or row["status"] != FINISHED:
        return "not in the store: execute it with commsweep run and the same settings"
    if row["run"]["model"].get("dropout"):
        return "not compared: dropout draws differ between processes"
    # The training loss is left out: a process knows that of its own share only.
    differ = max(abs(last[key] - row["metrics"][key]) for key in last if key.startswith(("val_", "test_")))
    return "the same scores, bit for bit" if differ == 0 else f"scores differ by up to {differ:.2g}"
