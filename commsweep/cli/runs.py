"""`commsweep run`, `presets`, `list` and `show`."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from commsweep import input_digests
from commsweep.cli.explain import meaning
from commsweep.cli.options import check_roles, count, folder, number, whole_number
from commsweep.config import Execution, Run, flatten, override, record, run_id
from commsweep.config.execution import MODES, POINTS, check_device
from commsweep.config.override import parse
from commsweep.data import sources
from commsweep.errors import UserError, notice
from commsweep.lean_imports import loading
from commsweep.registry import grouped, preset, presets
from commsweep.store import DIVERGED, FAILED, FINISHED, Busy, Row, Store

CODECS = """codecs in one word, behind their feedback: topk:0.1  ef+topk:0.1  mxfp4  eden:2
  uniform:4,scale=group,rounding=stochastic   ef21,key=sample+topk:0.1   codec.py:Class,k=4
where they go:
  commsweep run digits fwd=topk:0.1 bwd=uniform:8            every boundary, forward and backward
  commsweep run digits fwd=topk:0.1 at.layer1.fwd=uniform:4  another one at a boundary
  commsweep run digits at.1.fwd=topk:0.1                     at the first boundary, by its number
  commsweep run digits grad.learners=4 grad=ef+topk:0.01     between learners
their kinds: commsweep explain fwd.compressor.kind"""
SWEPT_ROLES = ("activations", "gradients", "learners")


def add_commands(commands: argparse._SubParsersAction, shared: argparse.ArgumentParser) -> None:
    """Register this file's subcommands."""
    run = commands.add_parser(
        "run",
        parents=[shared, execution_options(), simulation_options(), points_option()],
        help="execute one run",
        description=(
            "Execute one run: a preset with some settings changed. A finished run is shown, not "
            "repeated; an interrupted one continues from its checkpoint."
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=CODECS,
    )
    run.add_argument("preset", help="a preset (commsweep presets lists them)")
    run.add_argument(
        "settings",
        nargs="*",
        default=[],
        metavar="KEY=VALUE",
        help="for instance fwd=topk:0.05, bwd=ef+topk:0.1, at.layer1.fwd=uniform:4, epochs=3",
    )
    run.add_argument(
        "--wandb",
        choices=("disabled", "offline", "online"),
        default="disabled",
        help="show the run in Weights & Biases when it is recorded",
    )
    run.set_defaults(command=_run)
    presets = commands.add_parser(
        "presets",
        help="list presets, those with a word, or the settings of one",
        description=(
            "List the presets by group, those whose name or group has a word, or every setting of "
            "one by its dotted name, with its meaning and range. commsweep explain says more of "
            "any of them."
        ),
        epilog="examples: commsweep presets; commsweep presets kfac; commsweep presets digits",
    )
    presets.add_argument("preset", nargs="?", metavar="NAME or WORD")
    presets.add_argument("--json", action="store_true", help="print JSON for programs")
    presets.set_defaults(command=_presets)
    listing = commands.add_parser(
        "list",
        parents=[shared],
        help="list the runs of a store",
        epilog="example: commsweep list | grep EF21",
        description=(
            "One line a run: id, status (finished, diverged, failed, oom, timeout, running, "
            "interrupted, damaged), score with compression on and off at inference, share of "
            "the dense bytes, method."
        ),
    )
    listing.add_argument(
        "--conflicts",
        type=folder,
        metavar="FOLDER",
        help=(
            "instead: the ids whose scores differ between the rows.csv files below FOLDER and the "
            "store, with the environment of each where it is known"
        ),
    )
    listing.set_defaults(command=_list)
    show = commands.add_parser(
        "show",
        parents=[shared],
        help="show one run: settings, outcome, numbers, bytes",
        epilog="example: commsweep show 3f2a     (ids: commsweep list)",
        description=(
            "Everything a run's folder says: outcome, scores, bytes of each boundary, settings "
            "as they were installed, and every evaluation."
        ),
    )
    show.add_argument("run_id", help="a run id or the beginning of one")
    show.set_defaults(command=_show)


def execution_options() -> argparse.ArgumentParser:
    """Options that say where a run executes and change no result."""
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--device", default="auto", help="cpu, cuda, cuda:1 or auto (default)")
    options.add_argument(
        "--data-root",
        type=folder,
        help="folder of CIFAR-10 (torchvision's or the hub's Parquet files) or of texts",
    )
    options.add_argument(
        "--model-root",
        type=folder,
        help="folder with a folder for each pretrained model or tokenizer",
    )
    options.add_argument(
        "--buffers",
        choices=("memory", "mmap"),
        default="memory",
        help="where feedback memories with one row a sample lie (default: memory)",
    )
    options.add_argument(
        "--tensorboard",
        action="store_true",
        help="also write TensorBoard's files into the run's folder (tensorboard --logdir STORE)",
    )
    options.add_argument(
        "--checkpoint-every",
        type=number(0, included=True),
        default=30.0,
        metavar="SECONDS",
        help=(
            "least time between checkpoints, taken after an epoch, and 20 times as long as one "
            "takes at least; 0: after every epoch, inf: none (default: 30)"
        ),
    )
    options.add_argument(
        "--threads",
        type=count,
        metavar="N",
        help=(
            "threads of the computation (default: one for small models, for others all cores a "
            "worker has; another number rounds sums otherwise)"
        ),
    )
    return options


def points_option() -> argparse.ArgumentParser:
    """The option of commands that train runs to their end."""
    option = argparse.ArgumentParser(add_help=False)
    option.add_argument(
        "--points",
        type=whole_number(0),
        metavar="N",
        help=(
            "scores of a fixed part of the validation set along a training, for curves: N evenly "
            f"over its steps (default: {POINTS}; 0: none); they change no result and lie in "
            "points.jsonl of the run's folder"
        ),
    )
    return option


def simulation_options() -> argparse.ArgumentParser:
    """Options of commands that execute simulated runs."""
    option = argparse.ArgumentParser(add_help=False)
    option.add_argument(
        "--compile",
        choices=MODES,
        metavar="MODE",
        help=(
            "torch.compile for the blocks between boundaries, in this mode "
            f"({', '.join(MODES)}; all but the first capture CUDA graphs, too); results are the "
            "eager ones up to rounding, and the first steps take a minute"
        ),
    )
    option.add_argument(
        "--diagnose",
        action="store_true",
        help=(
            "measure what compression does to every tenth message of a boundary: error, bias, "
            "cosine, energy kept, features never sent, entropy of codes (commsweep show ID; "
            "diagnosis.jsonl)"
        ),
    )
    return option


def execution(args: argparse.Namespace, progress: bool = False, by: str = "run") -> Execution:
    """The Execution these options describe; `by`: who asks. Raises UserError on an option's
    value.
    """
    for name, root in (("data", args.data_root), ("model", args.model_root)):
        if root is not None and not root.is_dir():
            raise UserError(f"--{name}-root '{root}': no such folder")
    check_device(args.device)
    # own code may change the folder
    return Execution(
        args.device,
        args.data_root and args.data_root.absolute(),
        args.model_root and args.model_root.absolute(),
        args.buffers,
        args.checkpoint_every,
        progress,
        getattr(args, "diagnose", False),
        args.tensorboard,
        args.threads,
        compile=getattr(args, "compile", None),
        points=_points(args),
        by=by,
    )


def _points(args: argparse.Namespace) -> int:
    """Return the points along a training that these options mean. Raises UserError where nothing is
    trained to its end.
    """
    points, steps = getattr(args, "points", None), getattr(args, "steps", 0)
    if points is not None and steps:
        raise UserError(f"--points {points}: with --steps {steps} nothing is scored; leave one out")
    if not hasattr(args, "points") or steps:
        return 0
    return POINTS if points is None else points


def changes(settings: list[str]) -> dict[str, str]:
    """KEY=VALUE arguments as a dict. Raises UserError on one without "="."""
    pairs = [setting.partition("=") for setting in settings]
    for (key, equals, _), setting in zip(pairs, settings, strict=True):
        if not equals or not key:
            raise UserError(f"'{setting}' is not KEY=VALUE; write for instance seed=1")
    keys = [key for key, _, _ in pairs]
    if twice := next((key for key in keys if keys.count(key) > 1), None):
        raise UserError(
            f"'{twice}' is set more than once: "
            + ", ".join(setting for setting in settings if setting.startswith(f"{twice}="))
        )
    return {key: value for key, _, value in pairs}


def chosen(name: str, settings: dict[str, str]) -> Run:
    """Return the preset with changes. Raises UserError where one of them is wrong, and where more
    epochs than the preset has would let a cosine rise again.
    """
    run = override(preset(name), settings)
    schedule = run.schedule
    if "epochs" in settings and schedule.kind == "cosine" and run.epochs > schedule.t_max:
        raise UserError(
            f"epochs={run.epochs} goes beyond schedule.t_max={schedule.t_max}, where the learning "
            f"rate would rise again; add schedule.t_max={run.epochs}"
        )
    return run


def add_codecs(parser: argparse.ArgumentParser) -> None:
    """Add the options of `codecs_of`."""
    parser.add_argument(
        "--codecs",
        metavar="LIST",
        help='with --base: codecs to compare, such as "topk:0.1; uniform:2; ef+topk:0.01"',
    )
    parser.add_argument(
        "--role",
        action="append",
        metavar="ROLE",
        help="with --codecs: what they compress, may be repeated: activations, gradients (of "
        "activations), learners (gradients of weights); default: gradients",
    )


def codecs_of(args: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Return (the codecs of --codecs, their roles). Raises UserError on a role without them."""
    if args.codecs is None:
        if args.role:
            raise UserError(f"--role {args.role[0]}: the role of which codecs? Add --codecs")
        return [], []
    from commsweep.launching.codecs import listed

    roles = args.role or ["gradients"]
    check_roles(roles, SWEPT_ROLES)
    return listed(args.codecs), roles


def _run(args: argparse.Namespace) -> int:
    run = chosen(args.preset, changes(args.settings))
    store = Store(args.store)
    recorded = store.folder(run_id(run)).row()
    if args.diagnose and recorded is not None and "diagnosis" not in recorded:
        notice(
            f"run {run_id(run)} was recorded without --diagnose; another --store executes it again"
        )
    how = execution(args, progress=not args.json)
    if recorded is None:
        sources.check(run.data.name, how.data_root)
    else:
        input_digests.check(store.folder(run_id(run)), run, recorded, how)
    view = None
    if args.wandb != "disabled":
        from commsweep.launching.views.wandb import View

        view = View(store, mode=args.wandb)
        view.check()

    try:
        row = recorded or _execute(run, store, how)
    except Busy:
        raise UserError(f"run {run_id(run)} is being executed by another process") from None
    if view is not None:
        view.push([row["id"]])
    print(
        json.dumps(row)
        if args.json
        else _describe(row, store.folder(row["id"]).path, recorded is not None)
    )
    return {FINISHED: 0, DIVERGED: 3}.get(row["status"], 1)


def _execute(run: Run, store: Store, how: Execution) -> Row:
    with loading():  # torch, which a recorded run does not need
        from commsweep.training.run import execute

    return execute(run, store, how)


def _presets(args: argparse.Namespace) -> int:
    presets_by_name = presets()
    if args.preset is None or args.preset not in presets_by_name:
        groups = _with_word(args.preset or "")
        if not groups:
            preset(args.preset or "")  # says which is meant
        if args.json:
            runs_by_name = {name: run for group in groups.values() for name, run in group.items()}
            print(json.dumps({name: record(run) for name, run in runs_by_name.items()}))
            return 0
        for title, group in groups.items():
            print(f"{title}:")
            for name, run in group.items():
                print(f"  {name:26} {_in_words(run)}")
        return 0
    named = {args.preset: presets_by_name[args.preset]}
    if args.json:
        print(json.dumps({name: record(run) for name, run in named.items()}))
        return 0
    lines = [
        (f"{key}={word}", "a codec in one word; its settings follow")
        for key, word in named[args.preset].codecs.items()
    ]
    lines += [
        (f"{key}={value}", meaning(named[args.preset], key))
        for key, value in _settings(named[args.preset])
    ]
    print("\n".join(f"{line:44} {meaning}" if meaning else line for line, meaning in lines))
    return 0


def _with_word(word: str) -> dict[str, dict[str, Run]]:
    """Return the presets by group that have a word in their name, their group, or in what they
    train.
    """
    groups: dict[str, dict[str, Run]] = {}
    for title, group in grouped("experiments", "PRESETS").items():
        for name, run in group.items():
            if not word or word.lower() in f"{name} {title} {_in_words(run)}".lower():
                groups.setdefault(title, {})[name] = run
    return groups


def _in_words(run: Run) -> str:
    """Return what a preset trains, and how its messages are compressed."""
    from commsweep.config.labels import describe

    epochs = f"{run.epochs} epoch{'s' * (run.epochs > 1)}"
    words = describe(flatten(record(run)))
    compressed = "" if words == "dense" else f": {words}"
    return f"{run.model.name} on {run.data.name}, {epochs}, {run.optim.kind}{compressed}"


def _settings(run: Run) -> list[tuple[str, Any]]:
    return [(key, json.dumps(value)) for key, value in flatten(record(run)).items()]


def _list(args: argparse.Namespace) -> int:
    if args.conflicts is not None:
        return _conflicts(args)
    store = Store(args.store, create=False).exists()
    if args.json:
        return _list_json(store)
    entries = []
    for name in store.ids():
        row = store.read(name) or {}
        status = row.get("status") or store.status(name)
        metrics = row.get("metrics", {})
        entries.append(
            {
                "id": name,
                "status": status,
                "on": metrics.get("test_on_acc"),
                "off": metrics.get("test_off_acc"),
                "on_ppl": metrics.get("test_on_ppl"),
                "off_ppl": metrics.get("test_off_ppl"),
                "ratio": row.get("bytes", {}).get("ratio"),
                **_named(store, name, row),
            }
        )
    _tell_apart(entries)
    print(
        f"{'run':13} {'status':11} {'on':>9} {'off':>9} {'bytes %':>7}  method   (on, off: "
        "accuracy or perplexity with compression on and off at inference)"
    )
    for entry in entries:
        ratio = "-" if entry["ratio"] is None else f"{100 * entry['ratio']:.1f}"
        print(
            f"{entry['id']:13} {entry['status']:11} {_score(entry, 'on'):>9} "
            f"{_score(entry, 'off'):>9} {ratio:>7}  {entry['method']}"
        )
    return 0


def _list_json(store: Store) -> int:
    """Print all runs with the columns of `cs.load_rows`."""
    from commsweep.reporting.results import of_cells
    from commsweep.reporting.tidy import tidy

    runs = {}
    for name in store.ids():
        try:
            runs[name] = record(store.folder(name).run())
        except UserError as error:
            notice(str(error))
    frame = tidy(of_cells(store.root, runs))
    print(frame.to_json(orient="records"))
    return 0


def _conflicts(args: argparse.Namespace) -> int:
    from commsweep.reporting.published import conflicts

    if not args.conflicts.is_dir():
        raise UserError(f"--conflicts '{args.conflicts}' is no folder")
    store = Store(args.store, create=False)
    conflicts_ = conflicts(sorted(args.conflicts.rglob("rows.csv")), store.rows())
    if args.json:
        print(json.dumps(conflicts_))
        return 0
    for name, scores in conflicts_.items():
        print(name)
        for source, score in scores.items():
            print(f"  {score:<10.6g} {source}")
    print(f"{len(conflicts_)} ids have several scores")
    return 0


def _score(entry: dict[str, Any], mode: str) -> str:
    if entry[mode] is not None:
        return f"{100 * entry[mode]:.1f} %"
    return "-" if entry[f"{mode}_ppl"] is None else f"{entry[f'{mode}_ppl']:.5g}"


def _named(store: Store, name: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """The label of a run, and its settings."""
    from commsweep.config.labels import title

    try:
        run = row.get("run") or record(store.folder(name).run())
    except UserError as error:
        notice(str(error))
        return {"method": "-", "run": {}}
    return {"method": title(run), "run": flatten(run)}


def _tell_apart(entries: list[dict[str, Any]]) -> None:
    """Add to labels that several runs share the settings in which these runs differ."""
    alike: dict[str, list[dict[str, Any]]] = {}
    for entry in entries:
        alike.setdefault(entry["method"], []).append(entry)
    for group in alike.values():
        keys = dict.fromkeys(key for entry in group for key in entry["run"])
        varied = [key for key in keys if len({str(entry["run"].get(key)) for entry in group}) > 1]
        for entry in group:
            settings = [f"{key}={entry['run'][key]}" for key in varied if key in entry["run"]]
            entry["method"] += f" ({', '.join(settings)})" if settings else ""


def _show(args: argparse.Namespace) -> int:
    store = Store(args.store, create=False).exists()
    folder = store.find(args.run_id)
    name = folder.path.name
    row: dict[str, Any] = {
        "id": name,
        "status": store.status(name),
        "error": None,
        "run": record(folder.run()),
        "metrics": {},
        **(folder.row() or {}),
    }
    if args.json:
        print(json.dumps(row | {"evaluations": folder.metrics()}))
        return 0
    print(_describe(row, folder.path, False))
    for entry in row.get("diagnosis", ()):
        print(
            f"  {entry['boundary']:10} {entry['direction']}  "
            + "  ".join(
                f"{key} {entry[key]:.3g}"
                for key in ("error", "bias", "cosine", "energy", "remembered", "silent", "entropy")
                if entry.get(key) is not None
            )
        )
    print("\n".join(f"  {key} = {value}" for key, value in flatten(row["run"]).items()))
    for metric in folder.metrics():
        print(
            "  "
            + "  ".join(
                f"{key} {value:.4g}" for key, value in metric.items() if not isinstance(value, dict)
            )
        )
    return 0


_INFERENCE = (
    ("on", "compressed inference"),
    ("off", "dense inference"),
    ("recalibrated", "dense, recalibrated"),
)


def _describe(row: Mapping[str, Any], path: Path, repeated: bool) -> str:
    recorded = " (recorded earlier)" if repeated else ""
    if repeated and row["status"] == FAILED:
        recorded = f" (recorded earlier; remove {path} to execute it anew)"
    lines = [f"run {row['id']}: {row['status']}{recorded}"]
    lines += [f"  {row['error']}"] if row.get("error") else []
    lines += [f"  measured elsewhere, taken from {row['adopted']}"] if row.get("adopted") else []
    words = parse(row["run"]).codecs
    if words:
        lines.append("  codecs                " + " ".join(f"{k}={v}" for k, v in words.items()))
    metrics = row["metrics"]
    for mode, title in _INFERENCE:
        if f"test_{mode}_acc" in metrics:
            lines.append(
                f"  {title:21} test accuracy {100 * metrics[f'test_{mode}_acc']:.2f} %, loss "
                f"{metrics.get(f'test_{mode}_loss', math.nan):.4f}"
            )
        if f"test_{mode}_ppl" in metrics:
            lines.append(
                f"  {title:21} test perplexity {metrics[f'test_{mode}_ppl']:.3f}, loss "
                f"{metrics.get(f'test_{mode}_loss', math.nan):.4f} a token"
            )
    for boundary, sent in row.get("boundaries", {}).items():
        steps = max(1, row["steps"])
        lines.append(
            f"  boundary {boundary:10} {sent['fwd'] / steps:,.0f} bytes forward, "
            f"{sent['bwd'] / steps:,.0f} backward a step"
            + (f" (dense: {sent['fwd_dense'] / steps:,.0f})" if "fwd_dense" in sent else "")
        )
    if row.get("boundaries"):
        ratio = row.get("bytes", {}).get("ratio", math.nan)
        lines.append(f"  traffic               {100 * ratio:.2f} % of dense at the boundaries")
    if sent := row.get("gradients"):
        lines.append(
            f"  gradients             {sent['up']:,.0f} bytes up a step and learner, a rate of "
            f"{sent.get('rate', 1.0):.1f}"
        )
    if sent := row.get("kfac"):
        also = {
            "inverses": sent.get("inverses_balanced"),
            "preconditioned gradients": sent.get("preconditioned"),
        }
        lines.append(
            f"  K-FAC                 {sent.get('factors', 0):.0f} factors, "
            f"{sent['factors_up']:,.0f} bytes up a step and learner"
            + "".join(f", {n:,.0f} of {kind}" for kind, n in also.items() if n)
        )
    if "relative" in (spent := row.get("flops", {})):
        masks = row["masks"]
        lines.append(
            f"  FLOPs                 {spent['total']:.3e}, {100 * spent['relative']:.1f} % of "
            "the dense run "
            + (
                f"({100 * spent['relative_without_head']:.1f} % without the head); "
                if spent["relative_without_head"] is not None
                else ""
            )
            + (
                f"mean density {100 * masks['mean_density']:.1f} %, {100 * masks['ever']:.1f} % "
                "ever active"
            )
        )
    if "tokens_per_second" in row.get("speed", {}):
        speed = row["speed"]
        lines.append(
            f"  speed                 {speed['tokens_per_second']:,.0f} tokens a second; a "
            f"token costs {speed['fwd_bytes_per_token']:.1f} bytes forward, "
            f"{speed['bwd_bytes_per_token']:.1f} backward at a boundary"
        )
    return "\n".join([*lines, f"  folder {path}"])


def compared_with_simulation(row: Row, recorded: Row | None) -> str:
    """Return whether the recorded simulation of the same run has the same scores."""
    if row["status"] != FINISHED:
        return "not compared: it was not trained to the end"
    if recorded is None or recorded["status"] != FINISHED:
        return "not in the store: execute it with commsweep run and the same settings"
    differ = max(
        abs(row["metrics"][key] - recorded["metrics"][key])
        for key in recorded["metrics"]
        if key.startswith(("train_", "val_", "test_"))
    )
    return "the same scores, bit for bit" if differ == 0 else f"scores differ by up to {differ:.2g}"
