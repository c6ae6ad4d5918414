"""`commsweep forecast`: the forecast of worth kept, fitted to recorded trainings."""

from __future__ import annotations

import argparse
from contextlib import chdir
from pathlib import Path
from typing import TYPE_CHECKING

from commsweep.cli.board import train_cells, training_options
from commsweep.cli.options import folder
from commsweep.cli.runs import execution, execution_options, simulation_options
from commsweep.errors import UserError

if TYPE_CHECKING:
    from commsweep.config import Execution

CONSTANTS = "forecast.json"


def add_commands(commands: argparse._SubParsersAction, shared: argparse.ArgumentParser) -> None:
    """Register this file's subcommand."""
    parser = commands.add_parser(
        "forecast",
        parents=[shared, execution_options(), simulation_options()],
        help="the forecast of worth kept: fitted to recorded trainings, tried on unseen ones",
        description=(
            "Fit the forecast that shadow mode prints, and write its page: how it did on studies,\n"
            "architectures and codecs that were left out, and on unseen trainings. The folder has\n"
            "studies.csv, a study a line: a recorded one, or a preset that was never compressed."
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=(
            "examples:\n"
            "  commsweep forecast                   fit, and write the page from recorded files\n"
            "  commsweep forecast --watch           measure dense trainings, foretell unseen ones\n"
            "  commsweep forecast --train --minutes 30    execute the unseen trainings\n\n"
            "Forecasts are written before the trainings that they are about, and never again.\n"
            f"{CONSTANTS} holds what shadow mode reads; copy it over the package's own to use it."
        ),
    )
    parser.add_argument(
        "folder",
        nargs="?",
        type=folder,
        default=Path("docs/forecast"),
        metavar="FOLDER",
        help="folder with studies.csv (default: docs/forecast)",
    )
    parser.add_argument(
        "--watch",
        action="store_true",
        help="train dense networks in shadow where a study has not been measured",
    )
    parser.add_argument(
        "--train", action="store_true", help="execute the unseen trainings without a row"
    )
    training_options(parser)
    parser.set_defaults(command=_forecast)


def _forecast(args: argparse.Namespace) -> int:
    args.store = args.store.absolute()
    if not args.folder.is_dir():
        raise UserError(f"'{args.folder}': no such folder; name one that has studies.csv")
    settings = execution(args, by="forecast")
    with chdir(args.folder):  # studies name files from there, wherever the folder lies
        return _in_folder(args, settings)


def _in_folder(args: argparse.Namespace, settings: Execution) -> int:
    from tqdm import tqdm

    from commsweep.scoring import fit, forecasts
    from commsweep.scoring.forecast_page import write
    from commsweep.training.record import environment

    total, home, commit = 0, Path(), environment("cpu")["commit"]
    forecasts.lines(home)
    if args.watch:
        total = len(forecasts.seen_studies(home)) + len(forecasts.unseen(home))
    with tqdm(total=total, unit="study", desc="in shadow", disable=args.json or not total) as bar:
        if args.watch:
            forecasts.watch(home, settings, bar.update)
        table = forecasts.table(home)
        fitted = fit.fit_all(table)
        if args.watch:
            forecasts.predict(home, fitted, commit, settings, args.seeds, bar.update)
    fit.write_constants(table, fitted, commit, home / CONSTANTS)
    if args.train:
        train_cells(forecasts.cells(home, args.seeds), args, settings)
    outcomes = forecasts.outcomes(home, args.seeds)
    trials = write(home, table, fitted, outcomes)
    for trial in trials:
        if trial.by == "forecast" and trial.left_out == "study":
            print(
                f"{trial.message}: rank correlation {trial.rank:.2f}, {trial.covered} of "
                f"{trial.bounds} bounds held, on studies left out"
            )
    print(f"written: {args.folder}/README.md, worth.png, {CONSTANTS}")
    return 0
