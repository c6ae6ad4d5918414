"""`commsweep wandb push | sweep | cell`: the store shown in Weights & Biases."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from commsweep.cli.options import words
from commsweep.cli.runs import changes, execution, execution_options, points_option
from commsweep.config import run_id
from commsweep.errors import UserError
from commsweep.launching.views.wandb import (
    METHODS,
    MODES,
    View,
    cell_of,
    definition,
    report_cell,
)
from commsweep.lean_imports import loading
from commsweep.registry import sweep
from commsweep.store import FINISHED, Store


def add_commands(commands: argparse._SubParsersAction, shared: argparse.ArgumentParser) -> None:
    """Register this file's subcommands."""
    parent = commands.add_parser(
        "wandb",
        help="show a store in Weights & Biases",
        description="W&B is a view: runs are replayed from the store, which stays the record.",
    )
    kinds = parent.add_subparsers(required=True, metavar="ACTION")
    push = kinds.add_parser(
        "push",
        parents=[shared],
        help="replay recorded runs; those replayed before are left out",
        description=(
            "Replay the recorded runs of a sweep (or of the whole store) into W&B, under our "
            "ids. Offline files can be looked at with: wandb leet run STORE/.wandb"
        ),
    )
    push.add_argument("name", nargs="?", help="a sweep of the store (default: every recorded run)")
    push.add_argument(
        "--report", type=Path, metavar="FOLDER", help="also send this folder of commsweep report"
    )
    push.add_argument("--wandb", choices=MODES[1:], default="online", help="default: online")
    push.add_argument("--project", default="commsweep")
    push.set_defaults(command=_push)
    define = kinds.add_parser(
        "sweep",
        parents=[shared],
        help="print the W&B sweep of a grid as YAML",
        description=(
            "Print a W&B sweep definition whose command is commsweep's own. Start it with: "
            "commsweep wandb sweep demo > demo.yaml && wandb sweep demo.yaml"
        ),
    )
    define.add_argument("name", help="a sweep")
    define.add_argument("--project", default="commsweep")
    define.add_argument(
        "--method",
        choices=METHODS,
        default="grid",
        help="grid goes through the cells; random and bayes choose settings, each trained with "
        "all seeds of the sweep (default: grid)",
    )
    define.set_defaults(command=_define)
    cell = kinds.add_parser(
        "cell",
        parents=[shared, execution_options(), points_option()],
        help="what a W&B agent runs: one cell",
        description=(
            "Execute one cell of a sweep and fill in the run of the W&B agent that asked. A cell "
            "that is recorded is not trained again."
        ),
    )
    cell.add_argument("name", help="a sweep")
    cell.add_argument(
        "parameters",
        nargs="+",
        metavar="KEY=VALUE",
        help="parameters of commsweep wandb sweep, such as 'codecs=fwd=topk:0.1'; cell=ID for one "
        "run by its id",
    )
    cell.add_argument(
        "--seeds",
        type=words,
        default=(),
        metavar="N,N",
        help="train the setting with each of these seeds and report the mean",
    )
    cell.set_defaults(command=_cell)


def _push(args: argparse.Namespace) -> int:
    store = Store(args.store)
    view = View(store, args.name or "", args.wandb, args.project)
    view.check()
    ids = sorted(store.stamps())
    if args.name:
        ids = [run_id(run) for run in sweep(args.name, store)]
    sent = view.push(ids)
    if args.report:
        if not (args.report / "claims.md").exists():
            raise UserError(
                f"--report '{args.report}': no report in it; write one with: commsweep report NAME"
            )
        view.push_report(args.report)
    print(
        f"{sent} runs sent to W&B project {args.project} ({args.wandb}); {len(ids) - sent} were "
        "there or have no outcome yet"
        + (
            f"\nlook at them with: wandb leet run {view.folder}/wandb/latest-run"
            if args.wandb == "offline"
            else ""
        )
    )
    return 0


def _define(args: argparse.Namespace) -> int:
    import yaml

    content = definition(args.name, args.store, args.project, args.method)
    yaml.safe_dump(content, sys.stdout, sort_keys=False)
    return 0


def _cell(args: argparse.Namespace) -> int:
    store = Store(args.store)
    runs = sweep(args.name, store)
    by_id = {run_id(run): run for run in runs}
    chosen = changes(args.parameters)
    if "cell" in chosen:
        if chosen.keys() != {"cell"} or chosen["cell"] not in by_id:
            raise UserError(
                f"'cell={chosen['cell']}' names no cell of sweep '{args.name}'; write cell=ID with "
                f"an id of: commsweep sweep plan {args.name}"
            )
        cells = [by_id[chosen["cell"]]]
    else:
        if bad := [seed for seed in args.seeds if not seed.isdigit()]:
            raise UserError(f"--seeds {bad[0]}: not a whole number; write for instance 0,1,2")
        seeds = [int(seed) for seed in args.seeds]
        cells = cell_of(runs, chosen, seeds)
    with loading():
        from commsweep.training.run import execute

    rows = [execute(run, store, execution(args, by="sweep")) for run in cells]
    report_cell(rows, store)
    for row in rows:
        print(f"{row['id']} {row['status']}")
    return 0 if all(row["status"] == FINISHED for row in rows) else 1
