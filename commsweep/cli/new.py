"""`commsweep new`: a small project of one's own to begin from."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from commsweep.cli.options import folder
from commsweep.errors import UserError

TEMPLATE = Path(__file__).resolve().parent.parent / "template"


def add_commands(commands: argparse._SubParsersAction, shared: argparse.ArgumentParser) -> None:
    """Register this file's subcommand."""
    parser = commands.add_parser(
        "new",
        help="make a project: a model, data, a grid and an analysis of your own",
        description="Write a small project: a network and data (mine.py), presets "
        "(experiments/), a grid (sweeps/), tables, a claim and a figure (analysis/), and a "
        "notebook. Every command that is started in its folder finds them.",
        epilog="example: commsweep new my_project && cd my_project && commsweep run mine",
    )
    parser.add_argument("folder", type=folder, help="the project's folder, which must not exist")
    parser.set_defaults(command=_new)


def _new(args: argparse.Namespace) -> int:
    target: Path = args.folder
    if target.exists():
        raise UserError(f"'{target}' exists; name a folder that does not")
    shutil.copytree(TEMPLATE, target, ignore=shutil.ignore_patterns("__pycache__"))
    readme = target / "README.md"
    text = readme.read_text(encoding="utf-8").replace("# NAME", f"# {target.resolve().name}")
    readme.write_text(text, encoding="utf-8")
    print(
        f"made {target}; go on with\n"
        f"  cd {target}\n"
        "  commsweep run mine\n"
        "  commsweep sweep launch mine_ratios\n"
        "  commsweep report mine_ratios"
    )
    return 0
