"""`commsweep sweep plan | launch | adopt | status | prune`."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from commsweep import input_digests
from commsweep.cli.options import count, folder, number, words
from commsweep.cli.runs import (
    add_codecs,
    changes,
    chosen,
    codecs_of,
    execution,
    execution_options,
    points_option,
    simulation_options,
)
from commsweep.config import Execution, Run, record, run_id
from commsweep.data import sources
from commsweep.errors import UserError, nearest, notice
from commsweep.launching import codecs
from commsweep.launching.grid import axes, opened, product, seeds, setting, union
from commsweep.launching.launch import EXECUTORS, added, adopt, launch, missing, register, set_aside
from commsweep.launching.missing_cells import estimate, rate
from commsweep.registry import first_sentence, grouped, label, sweep, sweeps
from commsweep.store import (
    CONTINUABLE,
    FINISHED,
    UNFINISHED,
    WITHOUT_OUTCOME,
    Damaged,
    Store,
)

if TYPE_CHECKING:
    import pandas as pd

    from commsweep.launching.views.follow import Follower


EPILOG = """\
commsweep sweep list names the sweeps and says what each runs.

your own:
  commsweep sweep launch my_grid.py:grid
  commsweep sweep launch ratios --base digits_topk --axis fwd.compressor.ratio=0.1,0.05 --seeds 3
"""


def add_commands(commands: argparse._SubParsersAction, shared: argparse.ArgumentParser) -> None:
    """Register this file's subcommands."""
    parent = commands.add_parser(
        "sweep",
        help="plan, launch or inspect a named grid of runs",
        description="A sweep is a list of runs; only those without an outcome are executed.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=EPILOG,
    )
    kinds = parent.add_subparsers(required=True, metavar="ACTION")
    for add in (_add_list, _add_plan, _add_launch, _add_adopt, _add_status, _add_prune):
        add(kinds, shared)


def _add_list(kinds: argparse._SubParsersAction, _shared: argparse.ArgumentParser) -> None:
    listing = kinds.add_parser(
        "list",
        help="name the sweeps, and say what each runs",
        description="Name the sweeps by group, or those whose name or group has a word.",
    )
    listing.add_argument("word", nargs="?", default="")
    listing.add_argument("--json", action="store_true", help="print JSON for programs")
    listing.set_defaults(command=_list)


def _add_plan(kinds: argparse._SubParsersAction, shared: argparse.ArgumentParser) -> None:
    plan = kinds.add_parser(
        "plan", parents=[shared, execution_options()], help="show the cells and estimate the time"
    )
    plan.add_argument(
        "--probe",
        action="store_true",
        help="measure some steps here of every size of run that was not timed three times yet",
    )
    plan.add_argument("--cells", action="store_true", help="also list every cell")
    plan.add_argument(
        "--claims",
        action="store_true",
        help="print what the claims are, with margins, and how many seeds would decide them",
    )
    plan.set_defaults(command=_plan)
    _add_choice(plan)


def _add_launch(kinds: argparse._SubParsersAction, shared: argparse.ArgumentParser) -> None:
    start = kinds.add_parser(
        "launch",
        parents=[shared, execution_options(), simulation_options(), points_option()],
        help="execute the missing cells",
    )
    start.add_argument(
        "--retry",
        metavar="OUTCOMES",
        default="",
        help=f"execute these again, too: {', '.join(UNFINISHED)} (comma-separated)",
    )
    start.add_argument(
        "--timeout",
        type=number(0),
        metavar="SECONDS",
        help="stop a cell after so long and record it (default: never)",
    )
    start.add_argument(
        "--per-gpu",
        type=count,
        default=1,
        metavar="N",
        help="cells at once on each GPU (default: 1)",
    )
    start.add_argument(
        "--executor",
        metavar="ENGINE",
        default="local",
        help=f"{', '.join(EXECUTORS)} (default: local)",
    )
    start.add_argument(
        "--ray-address",
        metavar="HOST:PORT",
        help="a running Ray cluster (default: this machine as one)",
    )
    start.add_argument(
        "--ray-cpus",
        type=number(0, 1e6),
        metavar="N",
        help="CPU cores of a cell on Ray (default: 1)",
    )
    start.add_argument(
        "--ray-gpus",
        type=number(0, 1e6, included=True),
        metavar="N",
        help="GPUs of a cell on Ray (default: one for --per-gpu cells)",
    )
    start.add_argument(
        "--slurm",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help=(
            "parameter of submitit, such as partition=gpu, gpus_per_node=1, timeout_min=240; "
            "cluster=local tries it here; --workers is the size of the job array"
        ),
    )
    start.add_argument(
        "--wandb",
        choices=("disabled", "offline", "online"),
        default="disabled",
        help="show finished runs in Weights & Biases, the report at the end",
    )
    start.add_argument(
        "--mlflow",
        metavar="FOLDER|URI",
        help="show finished runs in MLflow: a folder, whose mlflow.db is used, a database or a "
        "tracking server",
    )
    start.add_argument(
        "--looks",
        type=count,
        metavar="N",
        help=(
            "register, before the first report, that the verdicts will be looked at N times while "
            "seeds are added: each look then has an N-th of the level (default: one look)"
        ),
    )
    start.set_defaults(command=_launch)
    _add_choice(start)


def _add_adopt(kinds: argparse._SubParsersAction, shared: argparse.ArgumentParser) -> None:
    take = kinds.add_parser(
        "adopt",
        parents=[shared],
        help="take outcomes from a report's rows.csv",
        description=(
            "Record outcomes that a report published (rows.csv) as if they had been measured "
            "here: a launch continues from them, a report counts them. Each is taken only for "
            "the very run that its id names. What is recorded here stays. A table holds no "
            "curves, so none are drawn of these runs."
        ),
        epilog="  commsweep sweep adopt demo docs/results/demo/rows.csv && commsweep report demo",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    take.add_argument("name", help="a sweep, my_grid.py:grid, or the name of one that was launched")
    take.add_argument(
        "files", type=folder, nargs="+", metavar="FILE", help="rows.csv of a report of this sweep"
    )
    take.set_defaults(command=_adopt)


def _add_status(kinds: argparse._SubParsersAction, shared: argparse.ArgumentParser) -> None:
    status = kinds.add_parser(
        "status", parents=[shared], help="outcomes so far, rate, time left, failures"
    )
    status.set_defaults(command=_status)
    status.add_argument(
        "name", help="a sweep, my_grid.py:grid, or the name of one that was launched"
    )


def _add_prune(kinds: argparse._SubParsersAction, shared: argparse.ArgumentParser) -> None:
    prune = kinds.add_parser(
        "prune",
        parents=[shared],
        help="remove runs of sweeps that name them no more",
        description=(
            "Remove the run folders that a sweep made and that no sweep of the store names any "
            "more. Runs that commsweep run or a search made stay unless --all; those being "
            "executed stay in any case."
        ),
    )
    prune.add_argument("--dry-run", action="store_true", help="only say what would go")
    prune.add_argument(
        "--all", action="store_true", help="also what commsweep run and searches made"
    )
    prune.add_argument("--yes", action="store_true", help="do not ask")
    prune.set_defaults(command=_prune)


def _add_choice(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that choose the cells of a plan or a launch."""
    parser.add_argument(
        "name",
        nargs="?",
        help=(
            "a sweep of a paper (commsweep sweep list lists them), or a function of yours "
            "that returns a list of Runs, my_grid.py:grid"
        ),
    )
    parser.add_argument(
        "settings",
        nargs="*",
        default=[],
        metavar="KEY=VALUE",
        help="with --base: settings of the preset, for instance optim.lr=0.02",
    )
    parser.add_argument(
        "--base", metavar="PRESET", help="make the sweep here: this preset, varied by --axis"
    )
    parser.add_argument(
        "--axis",
        action="append",
        default=[],
        metavar="KEY=V1,V2",
        help=(
            "settings to vary, such as fwd=topk:0.1,ef+topk:0.1 or at.layer1.fwd=topk:0.1,mxfp4 "
            "or epochs=2,4; 'fwd={,ef+}topk:{0.3,0.1}' has each of its alternatives; KEY+KEY=... "
            "gives both the same values; several axes make every combination"
        ),
    )
    add_codecs(parser)
    parser.add_argument(
        "--seeds",
        type=count,
        metavar="N",
        help=(
            "with --base: each cell with N seeds (default: 1); of a named sweep: each "
            "setting with at least N"
        ),
    )
    parser.add_argument(
        "--claim",
        metavar="NAME",
        help=(
            "only the settings that this claim compares (commsweep claims SWEEP names "
            "them), with --seeds of each; none of those whose effects are all decided by "
            "what is recorded, unless all of the claim's are"
        ),
    )
    parser.add_argument(
        "--decide",
        action="store_true",
        help=(
            "only what would decide the claims (or --claim) by what is recorded: each "
            "undecided effect's settings with the seeds that it asks for (commsweep claims "
            "SWEEP); what an earlier launch of these settings left undone comes first"
        ),
    )
    parser.add_argument(
        "--papers",
        type=words,
        default=(),
        metavar="NAMES",
        help="with --decide (and --claims of a plan): only the claims of these, as of a report",
    )
    parser.add_argument(
        "--workers", type=count, help="processes (default: one a GPU, or one a CPU core)"
    )


def _chosen(args: argparse.Namespace, store: Store) -> tuple[str, list[Run], list[Run]]:
    """(what the store calls the sweep, its runs, those of them that are meant): with --claim, those
    that it compares and that may decide something yet; with --seeds, with so many seeds at least;
    with --decide, with the seeds that its effects ask for.
    """
    name, runs = _cells(args, store)
    if args.papers and not (args.decide or getattr(args, "claims", False)):
        raise UserError(
            f"--papers {','.join(args.papers)}: chooses claims, of --decide or of a plan's --claims"
        )
    if args.decide:
        if args.seeds is not None:
            raise UserError(
                f"--seeds {args.seeds} and --decide: an effect asks for seeds of its own; leave "
                "one out"
            )
        chosen = _deciding(args.claim, store, name, runs, args.papers)
        return name, union(runs, chosen), chosen
    if args.claim is None and (args.seeds is None or args.base is not None):
        return name, runs, runs
    chosen = runs if args.claim is None else _behind(args.claim, store, name, runs)
    settings = {setting(run): run for run in chosen}
    chosen = union(chosen, seeds(list(settings.values()), args.seeds or 0))
    return name, union(runs, chosen), chosen


def _deciding(
    claim: str | None, store: Store, name: str, runs: list[Run], papers: tuple[str, ...]
) -> list[Run]:
    """Return what undecided effects, of one claim or of all, compare, each with the seeds that
    would decide it by what is recorded; while seeds that were asked for before are missing, these.
    Raises UserError when there is no such claim, or nothing that seeds would decide.
    """
    from commsweep.reporting import interim_looks
    from commsweep.reporting.report_parts import all_claims

    by_id = {run_id(run): run for run in runs}
    papers = interim_looks.papers(store.root, name, papers)
    before = interim_looks.read(store.root, name)
    claims_ = all_claims(_outcomes(store, by_id), papers, interim=before)
    claims = {claim.name: claim for claim in claims_}
    if claim is not None:
        _check(claim, claims, f"sweep '{name}' has results")
    asking = [
        effect
        for claim_ in claims.values()
        if claim in (None, claim_.name)
        for effect in claim_.effects
        if effect.seeds
    ]
    if not asking:
        raise UserError(
            f"--decide: of {f'claim {claim!r}' if claim else f'the claims of {name!r}'} nothing "
            f"is left that seeds would decide (commsweep claims {name})"
        )
    settings = [
        {setting(by_id[identifier]): by_id[identifier] for identifier in effect.ids}
        for effect in asking
    ]
    settings_asked = {pair for pairs in settings for pair in pairs}
    launched = [run for run in runs if setting(run) in settings_asked]
    if missing(launched, store):  # half of what was asked for is no time to ask again
        return launched
    return union(
        *(
            seeds(list(effect_settings.values()), effect.seeds or 0)
            for effect, effect_settings in zip(asking, settings, strict=True)
        )
    )


def _behind(claim: str, store: Store, name: str, runs: list[Run]) -> list[Run]:
    """The runs that a claim compares, of effects that are not decided. Raises UserError when there
    is no such claim.
    """
    from commsweep.reporting import interim_looks
    from commsweep.reporting.claim import CONTRADICTED, SUPPORTED
    from commsweep.reporting.power import planned
    from commsweep.reporting.report_parts import all_claims

    by_id = {run_id(run): run for run in runs}
    frame = _outcomes(store, by_id)
    claims = {claim.name: claim for claim in planned(frame)}
    _check(claim, claims, f"sweep '{name}' has runs")
    decided = set()
    for judged in all_claims(frame, interim=interim_looks.read(store.root, name)):
        for effect in judged.effects:
            if judged.name == claim and effect.verdict in (SUPPORTED, CONTRADICTED):
                decided.add(effect.what)
    effects = claims[claim].effects
    undecided = [effect for effect in effects if effect.what not in decided] or effects
    identifiers = {identifier for effect in undecided for identifier in effect.ids}
    return [run for key, run in by_id.items() if key in identifiers]


def _outcomes(store: Store, by_id: dict[str, Run]) -> pd.DataFrame:
    """Return what is recorded of these runs, and that the others are missing."""
    from commsweep.reporting.results import of_cells

    return of_cells(store.root, {key: record(run) for key, run in by_id.items()})


def _check(claim: str, names: Iterable[str], has: str) -> None:
    if claim not in names:
        raise UserError(
            f"--claim '{claim}': {has} for {', '.join(names) or 'none'}{nearest(claim, names)}"
        )


def _cells(args: argparse.Namespace, store: Store) -> tuple[str, list[Run]]:
    """(what the store calls the sweep, its runs): named, of one's own, or made of a base and
    axes.
    """
    base, settings = getattr(args, "base", None), getattr(args, "settings", [])
    if base is not None and "=" in (args.name or ""):  # no name, and settings of the preset
        args.settings, args.name = [args.name, *settings], None
    if base is None:
        if settings or "=" in (args.name or ""):
            raise UserError(
                f"'{(settings or [args.name])[0]}' changes a preset: name it with --base"
            )
        for option in ("axis", "codecs"):
            if getattr(args, option, None):
                raise UserError(f"--{option} varies a preset: name it with --base")
        if args.name is None:
            raise UserError(
                "name a sweep (all of them: commsweep sweep list), a function "
                "(my_grid.py:grid), or a preset with --base"
            )
        name, runs = label(args.name), sweep(args.name, store)
        return name, union(runs, added(name, runs, store)) if args.name in sweeps() else runs
    if args.name in sweeps() or ":" in (args.name or ""):
        raise UserError(
            f"'{args.name}' is a sweep already; give the one of --base another name, or none"
        )
    run = chosen(base, changes(args.settings))
    varied, runs = axes(args.axis), []
    named, roles = codecs_of(args)
    for start in codecs.runs(run, named, roles) if named else [run]:
        runs += product(start, {**opened(start, varied), **varied})
    runs = union(runs)
    _note_ends(runs)
    if "seed" not in [name for axis in varied for name in axis.split("+")]:
        runs = seeds(runs, args.seeds or 1, run.seed)
    elif args.seeds is not None:
        raise UserError(
            f"--seeds {args.seeds} and --axis seed=...: the axis names the seeds already; leave "
            "one out"
        )
    return (
        args.name or f"{base}-{sha256(' '.join(map(run_id, runs)).encode()).hexdigest()[:6]}",
        runs,
    )


def _note_ends(runs: list[Run]) -> None:
    """Say where a grid of codecs has no dense run or no control: it has no worth and no verdicts
    then.
    """
    sides = {"fwd", "bwd"} & {side for run in runs for side in run.codecs}
    if not sides:
        return
    words = {"dense run (none)": "none", "control that sends nothing (zero)": "zero"}
    for side in sorted(sides):
        sent = {run.codecs.get(side, "none") for run in runs}
        lost = [text for text, word in words.items() if word not in sent]
        if lost and len(sent) > 1:
            notice(
                f"the grid has no {' and no '.join(lost)} in {side}: what codecs keep of a "
                f"message's worth is not known without; add to --axis {side}=none,zero,... or use "
                "--codecs, which has both"
            )


def _probe(args: argparse.Namespace) -> Callable[[Run], float]:
    from commsweep.training.probe import seconds_per_epoch

    return lambda run: seconds_per_epoch(run, execution(args))


def _plan(args: argparse.Namespace) -> int:
    store = Store(args.store, create=False)
    name, _, runs = _chosen(args, store)
    cells = {run_id(run): run for run in runs}
    if args.claims:
        from commsweep.reporting.power import markdown

        print(markdown(_outcomes(store, cells), args.papers), end="")
        return 0
    rows = store.rows()
    statuses = store.statuses(list(cells), rows)
    left = [run for name, run in cells.items() if statuses[name] not in (FINISHED, *UNFINISHED)]
    seconds, basis = estimate(left, rows, _probe(args) if args.probe else None)
    workers = args.workers or execution(args).workers()
    plan = {
        "sweep": name,
        "cells": len(runs),
        "missing": len(left),
        "workers": workers,
        "seconds": None if seconds is None else seconds / workers,
        "missing_runs": [run_id(run) for run in left],
    }
    if args.json:
        print(json.dumps(plan))
        return 0
    if seconds is None:
        time = "the time is unknown (no run of this kind was timed yet: add --probe)"
    else:
        time = f"about {_clock(plan['seconds'])} with {workers} workers, by {basis}"
    print(
        f"{len(runs)} cells, {len(left)} missing; {time}"
        if left
        else f"{len(runs)} cells, none missing"
    )
    groups: dict[str, Counter] = {}
    labels = (
        dict(zip(frame.id, frame.method, strict=True))
        if len(frame := _outcomes(store, cells))
        else {}
    )
    for cell, run in cells.items():
        label = labels[cell]
        groups.setdefault(label, Counter())[statuses[cell]] += 1
        if args.cells:
            print(f"{cell}  {statuses[cell]:11}  seed {run.seed}  {label}")
    for label, counts in groups.items() if not args.cells else ():
        print(f"  {label:50} " + ", ".join(f"{n} {status}" for status, n in counts.items()))
    return 0


def _launch(args: argparse.Namespace) -> int:
    from tqdm import tqdm

    store = Store(args.store)
    name, grid, runs = _chosen(args, store)
    if (
        args.base is not None
        and name in store.sweeps()
        and set(store.cells(name)) != {run_id(run) for run in runs}
    ):
        raise UserError(f"this store has a sweep '{name}' of other runs; choose another name")
    options = execution(args, by="sweep")
    retry = {status for status in args.retry.split(",") if status}
    if unknown := retry - set(UNFINISHED):
        raise UserError(
            f"--retry {','.join(sorted(unknown))}: not an outcome; use some of "
            f"{', '.join(UNFINISHED)}"
        )
    for kind in {run.data.name for run in missing(runs, store)}:
        sources.check(kind, options.data_root)
    _check_inputs(runs, store, options)
    register(name, grid, store)
    if args.looks is not None:
        from commsweep.reporting import interim_looks

        interim_looks.register(store.root, name, args.looks)
    store.tidy()
    for line in store.mend([run_id(run) for run in runs]):
        print(f"commsweep: {line}", file=sys.stderr)
    set_aside(runs, store, retry)
    left = missing(runs, store)
    failed = _failed(runs, store)
    if options.device != "auto":
        options.torch_device()  # a device that is not there is said once, not once a cell
    followers = _followers(args, store, name)
    with tqdm(
        total=len(runs),
        initial=len(runs) - len(left),
        unit="run",
        desc=name,
        file=sys.stderr,
        disable=args.json,
        smoothing=0.05,
    ) as bar:

        def note(run: Run, _status: str) -> None:
            bar.update()
            for follower in followers:
                follower.add(run_id(run))

        try:
            report = launch(
                left,
                store,
                options,
                args.workers,
                executor=args.executor,
                cluster=_cluster(args),
                timeout=args.timeout,
                per_gpu=args.per_gpu,
                progress=note,
                notice=lambda line: bar.write(line, file=sys.stderr),
            )
        finally:
            for follower in followers:
                follower.end()
    for follower in followers:
        if follower.fault:
            print(f"commsweep: {follower.fault}", file=sys.stderr)
        else:
            _show(follower, args, name, runs)
    result = {
        "sweep": name,
        "executed": sum(report.outcomes.values()),
        "outcomes": dict(report.outcomes),
        "efficiency": round(report.efficiency, 4),
        "seconds": round(report.wall_seconds, 1),
        "errors": report.errors,
    }
    result["failed"] = failed
    if args.json:
        print(json.dumps(result))
    else:
        counts = [f"{n} {status}" for status, n in report.outcomes.items()]
        if failed:
            counts.append(_again(failed))
        outcomes = ", ".join(counts) or "nothing was missing"
        print(
            f"{name}: {outcomes} in {_clock(report.wall_seconds)}"
            + (
                f"; {100 * report.efficiency:.0f} % of {report.workers} workers' time in steps "
                "and evaluation"
                if report.outcomes
                else ""
            )
        )
        for line in list(dict.fromkeys(report.errors))[:5]:
            print(f"  {line}", file=sys.stderr)
    bad = any(report.outcomes[status] for status in (*CONTINUABLE, "refused", "interrupted"))
    return 1 if bad or failed else 0


def _failed(runs: list[Run], store: Store) -> list[str]:
    """The ids of these runs that ended without a result in an earlier launch."""
    names = [run_id(run) for run in runs]
    return [name for name in names if store.status(name) in CONTINUABLE]


def _again(failed: list[str]) -> str:
    named = ", ".join(failed[:5]) + (f" and {len(failed) - 5} more" if len(failed) > 5 else "")
    return (
        f"{len(failed)} cells failed in an earlier launch ({named}); --retry failed (or oom, "
        "timeout) executes them again"
    )


def _check_inputs(runs: list[Run], store: Store, how: Execution) -> None:
    """Raise UserError when outcomes that count here are of other data than the missing runs would
    get.
    """
    rows = {}
    for name in map(run_id, runs):
        folder = store.folder(name)
        with suppress(Damaged):
            if (row := folder.row()) is not None:
                rows[name] = folder, row
    input_digests.check_all(runs, rows, how)


def _list(args: argparse.Namespace) -> int:
    groups = grouped("sweeps", "SWEEPS", args.word)
    if not groups:
        raise UserError(f"no sweep has '{args.word}'{nearest(args.word, sweeps())}")
    if args.json:
        summaries = {}
        for group in groups.values():
            for name, function in group.items():
                summaries[name] = first_sentence(function.__doc__)
        print(json.dumps(summaries))
        return 0
    for title, group in groups.items():
        print(f"{title}:")
        for name, function in group.items():
            print(f"  {name:24} {first_sentence(function.__doc__)}")
    return 0


def _adopt(args: argparse.Namespace) -> int:
    from commsweep.reporting import interim_looks, published

    store = Store(args.store)
    name, runs = _cells(args, store)
    adopted = [published.outcomes(path, runs) for path in args.files]
    rows = {row["id"]: row for rows, _ in adopted for row in rows}
    left_out = sum(left for _, left in adopted)
    if not rows:
        raise UserError(
            f"{', '.join(map(str, args.files))}: no line is an outcome of a run of sweep "
            f"'{name}' (of {left_out} lines); is it the rows.csv of this sweep, and of this "
            "version of it?"
        )
    taken = adopt(name, runs, list(rows.values()), store)
    with_curves = 0
    for path in args.files:  # whoever measured them has looked at them
        interim_looks.take(store.root, name, path.with_name("claims.json"))
        curves = path.with_name(published.CURVES)
        with_curves += published.adopt_curves(curves, set(rows), store)
    if args.json:
        counts = {"adopted": taken, "kept": len(rows) - taken, "others": left_out}
        print(json.dumps({"sweep": name, **counts, "with_curves": with_curves}))
        return 0
    curves_text = f"{with_curves} with their curves" if with_curves else "no curves lie beside them"
    print(
        f"{name}: {taken} runs adopted, {curves_text}"
        + (f"; {len(rows) - taken} stay as recorded here" * (taken < len(rows)))
        + (f"; {left_out} lines have no outcome of a run of this sweep" if left_out else "")
    )
    return 0


def _followers(args: argparse.Namespace, store: Store, name: str) -> list[Follower]:
    """The replays into trackers beside a launch."""
    from commsweep.launching.views.follow import Follower

    followers = []
    if args.wandb != "disabled":
        from commsweep.launching.views import wandb

        view = wandb.View(store, name, args.wandb)
        view.check()
        followers.append(Follower(view, "commsweep wandb push", view.push_report))
    if args.mlflow:
        from commsweep.launching.views import mlflow

        view = mlflow.View(store, name, args.mlflow)
        view.push([])  # whatever is wrong with the server is said before a run is trained
        followers.append(Follower(view, f"the same command with --mlflow {args.mlflow}"))
    return followers


def _show(follower: Follower, args: argparse.Namespace, name: str, runs: list[Run]) -> None:
    """Show what was recorded by earlier launches, and in W&B the report, where there is anything
    to report.
    """
    follower.view.push([run_id(run) for run in runs])
    if follower.report is not None:
        from commsweep.reporting import report

        with tempfile.TemporaryDirectory() as folder, suppress(UserError):  # none has finished yet
            follower.report(report.write(args.store, name, Path(folder), page=False).folder)


def _cluster(args: argparse.Namespace) -> dict[str, str]:
    """Return what the executor must know of its cluster. Raises UserError on options of another
    executor.
    """
    of = {
        "ray": {
            key: value
            for key in ("address", "cpus", "gpus")
            if (value := getattr(args, f"ray_{key}")) is not None
        },
        "slurm": changes(args.slurm),
    }
    for engine, value in of.items():
        if value and args.executor != engine:
            raise UserError(
                f"--{engine}... has no effect with --executor {args.executor}; set --executor "
                f"{engine}"
            )
    return of.get(args.executor, {})


def _status(args: argparse.Namespace) -> int:
    store = Store(args.store, create=False).exists()
    name, runs = _cells(args, store)
    recorded = store.rows()
    statuses = store.statuses([run_id(run) for run in runs], recorded)
    counts = Counter(statuses.values())
    rows = [row for row in recorded if row["id"] in statuses]
    speed = rate(rows)
    left = sum(counts[status] for status in WITHOUT_OUTCOME)
    seconds = left / speed if speed and counts["running"] else None
    if args.json:
        print(
            json.dumps(
                {
                    "sweep": name,
                    "cells": len(runs),
                    **counts,
                    "per_hour": speed and 3600 * speed,
                    "seconds_left": seconds,
                    "failures": {
                        row["id"]: f"{row['status']}: {row['error']}"
                        for row in rows
                        if row["error"]
                    },
                }
            )
        )
        return 0
    print(
        f"{name}: {len(runs)} cells: " + ", ".join(f"{n} {status}" for status, n in counts.items())
    )
    if speed:
        print(
            f"  {3600 * speed:.0f} runs an hour"
            + (
                f", about {_clock(seconds)} left"
                if seconds is not None
                else ""
                if not left
                else "; nothing is being executed"
            )
        )
    for row in rows:
        if row["error"]:
            print(f"  {row['id']} {row['status']}: {row['error']}")
    return 0


def _prune(args: argparse.Namespace) -> int:
    store = Store(args.store, create=False).exists()
    unnamed = store.unnamed()
    chosen = [name for name in unnamed if args.all or store.folder(name).begun_by() == "sweep"]
    spared = len(unnamed) - len(chosen)
    obsolete, busy = [], []
    if chosen and not args.dry_run and not args.yes:
        if args.json or not sys.stdin.isatty():
            raise UserError(
                f"{len(chosen)} run folders would be removed; say --yes, or look first with "
                "--dry-run"
            )
        answer = input(f"remove {len(chosen)} run folders of '{store.root}' for good? [y/N] ")
        if answer.strip().lower() not in ("y", "yes"):
            print("nothing was removed")
            return 1
    if args.dry_run:
        obsolete = chosen
    else:
        store.tidy()
        # a launch may have named some of them since they were looked for
        with store.changing_sweeps():
            unnamed = store.unnamed()
            for name in chosen:
                if name in unnamed:
                    (obsolete if store.remove(name) else busy).append(name)
    if args.json:
        print(
            json.dumps(
                {"removed": obsolete, "running": busy, "spared": spared, "dry_run": args.dry_run}
            )
        )
        return 0
    print(
        f"{len(obsolete)} run folders {'would be' if args.dry_run else 'were'} removed"
        + (f"; {len(busy)} are being executed and stay" if busy else "")
        + (f"; {spared} that no sweep made stay (--all takes them, too)" if spared else "")
    )
    print("".join(f"  {name}\n" for name in obsolete), end="")
    return 0


def _clock(seconds: float) -> str:
    minutes, seconds_left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return (
        f"{hours} h {minutes} min"
        if hours
        else f"{minutes} min {seconds_left} s"
        if minutes
        else f"{seconds_left} s"
    )
