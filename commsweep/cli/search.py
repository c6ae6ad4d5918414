"""`commsweep search`: Optuna over compression settings; `commsweep dashboard`: optuna-dashboard on
its studies.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from commsweep.cli.options import count, name
from commsweep.cli.runs import (
    add_codecs,
    changes,
    chosen,
    codecs_of,
    execution,
    execution_options,
    points_option,
)
from commsweep.config import run_id
from commsweep.errors import UserError
from commsweep.store import Store


def add_commands(commands: argparse._SubParsersAction, shared: argparse.ArgumentParser) -> None:
    """Register this file's subcommands."""
    parser = commands.add_parser(
        "search",
        parents=[shared, execution_options(), points_option()],
        help="search for the best settings with Optuna",
        description=(
            "Search over K, bits, scales and feedback of both directions: the best validation "
            "quality within a byte budget, or (without --budget) the front of quality against "
            "bytes. A killed search continues with the same command; its runs are ordinary runs "
            "of the store."
        ),
    )
    parser.add_argument(
        "name",
        nargs="?",
        help=(
            "what to search: synthetic, digits, sotu_nano, resnet18, gpt2_scratch (presets of "
            "the same names, resnet18_corrected for resnet18); or, with --base, a name of yours"
        ),
    )
    parser.add_argument(
        "settings",
        nargs="*",
        default=[],
        metavar="KEY=VALUE",
        help=(
            "with --base: settings of the preset, for instance model.name=own "
            "model.build=mine.py:net"
        ),
    )
    parser.add_argument(
        "--base", metavar="PRESET", help="search over the boundaries of this preset"
    )
    add_codecs(parser)
    parser.add_argument(
        "--trials",
        type=count,
        default=30,
        help="trials the study shall have in the end (default: 30)",
    )
    parser.add_argument(
        "--budget",
        type=float,
        metavar="SHARE",
        help="largest share of the dense bytes, such as 0.125",
    )
    parser.add_argument("--sampler", choices=("tpe", "nsga2"), default="tpe")
    parser.add_argument(
        "--prune", action="store_true", help="stop hopeless trials early (needs --budget)"
    )
    parser.add_argument(
        "--per-boundary", action="store_true", help="give every boundary settings of its own"
    )
    parser.add_argument(
        "--study", type=name, help="name of the study (default: from NAME and goal)"
    )
    parser.add_argument(
        "--storage",
        metavar="URL",
        help=(
            "a database for many machines, such as postgresql://host/name (default: a journal "
            "file in the store)"
        ),
    )
    parser.add_argument(
        "--workers", type=count, help="processes (default: one a GPU, or one a CPU core)"
    )
    parser.set_defaults(command=_search)


def _search(args: argparse.Namespace) -> int:
    from tqdm import tqdm

    from commsweep.launching import search as searching

    title, search = _chosen(args)
    goal = _goal(args)
    if goal.per_boundary and not search.cuts:
        raise UserError(
            "--per-boundary: the boundaries of pretrained weights are not known before they are "
            "loaded; leave it out"
        )
    aim = "front" if args.budget is None else f"budget-{args.budget:g}"
    name = args.study or f"{title}{'-boundaries' if args.per_boundary else ''}-{aim}"
    bar = None

    def show(printed: int) -> None:
        nonlocal bar  # begun by the first word of progress: a mistake is one line, without a bar
        bar = bar or tqdm(
            total=args.trials, unit="trial", desc=title, file=sys.stderr, disable=args.json
        )
        if (new := min(args.trials, printed) - bar.n) > 0:
            bar.update(new)

    try:
        study = searching.run(
            search,
            name,
            goal,
            args.storage,
            Store(args.store),
            execution(args, by="search"),
            args.trials,
            args.workers,
            show,
        )
    finally:
        if bar is not None:
            bar.close()
    chosen, done = searching.best(study, goal), searching.finished_trials(study)
    if args.json:
        print(
            json.dumps(
                {
                    "study": name,
                    "trials": done,
                    "best": [searching.summary(axis) for axis in chosen],
                }
            )
        )
    else:
        print(
            f"study {name}: {done} trials; "
            + (
                "the front of validation quality against bytes:"
                if args.budget is None
                else f"best validation quality within {100 * args.budget:g} % of the bytes:"
                if chosen
                else f"none within {100 * args.budget:g} % of the bytes"
            )
        )
        print("\n".join(searching.describe(search, trial, goal) for trial in chosen))
        if chosen:
            base = args.base or searching.preset_of(args.name)
            settings = [f"{key}={value}" for key, value in changes(args.settings).items()]
            best = chosen[0] if args.budget is not None else searching.knee(chosen)
            label = "again" if args.budget is not None else f"the knee, trial {best.number}"
            line = " ".join([base, *settings, searching.words(search, best, goal)])
            print(f"{label}: commsweep run {line}")
    return 0 if done >= args.trials else 1


def _chosen(args: argparse.Namespace) -> tuple[str, Any]:
    """(the name of the search, the search): one of ours, or over the boundaries of a preset."""
    from commsweep.launching import search as searching

    if "=" in (args.name or ""):
        args.settings, args.name = [args.name, *args.settings], None
    if args.base is not None:
        run = chosen(args.base, changes(args.settings))
        codecs, roles = codecs_of(args)
        return args.name or f"{args.base}-{run_id(run)[:6]}", searching.based(run, codecs, roles)
    if args.codecs is not None:
        raise UserError("--codecs goes over the boundaries of a preset: name it with --base")
    if args.settings:
        raise UserError(f"'{args.settings[0]}' changes a preset: name it with --base")
    if args.name is None:
        raise UserError(f"name a search ({', '.join(searching.SEARCHES)}), or a preset with --base")
    return args.name, searching.search_of(args.name)


def _goal(args: argparse.Namespace) -> Any:
    from commsweep.launching.search import Goal

    if args.budget is not None and not 0 < args.budget <= 1:
        raise UserError(f"--budget {args.budget:g}: a share of the dense bytes, 0 < SHARE <= 1")
    if args.prune and args.budget is None:
        raise UserError("--prune needs one objective: give a --budget")
    return Goal(args.budget, args.sampler, args.prune, args.per_boundary)
