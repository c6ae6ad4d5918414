"""`commsweep board`: codecs side by side, from the rows of a folder."""

from __future__ import annotations

import argparse
import math
import time
from contextlib import chdir
from pathlib import Path
from typing import TYPE_CHECKING

from commsweep.cli.options import check_roles, count, folder, number
from commsweep.cli.runs import execution, execution_options, simulation_options
from commsweep.cli.score import launch_shown
from commsweep.errors import UserError
from commsweep.scoring import ROLES
from commsweep.store import Store

if TYPE_CHECKING:
    from commsweep.config import Execution
    from commsweep.scoring.board import Board, Cell

SEEDS = 3  # of a board's page
NEARLY = 1e-3  # of a loss: what another machine's rounding may change in a repeated training


def add_commands(commands: argparse._SubParsersAction, shared: argparse.ArgumentParser) -> None:
    """Register this file's subcommand."""
    parser = commands.add_parser(
        "board",
        parents=[shared, execution_options(), simulation_options()],
        help="codecs side by side: fronts of bytes against worth kept, by role",
        description=(
            "Write the page, the figure and the cards of a board from its rows. A board is a\n"
            "folder with entries.csv: a codec, its feedback and its roles a line."
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=(
            "examples:\n"
            "  commsweep board                                write the page from recorded rows\n"
            "  commsweep board --train --role gradients --minutes 30\n"
            "  commsweep board --check three_lc/codec.py:ThreeLC\n\n"
            "Codes of your own lie in the folder, and entries.csv names them from there. Rows are\n"
            "kept: finished trainings are not repeated."
        ),
    )
    parser.add_argument(
        "folder",
        nargs="?",
        type=folder,
        default=Path("docs/board"),
        metavar="FOLDER",
        help="folder of the board (default: docs/board)",
    )
    parser.add_argument("--train", action="store_true", help="execute the trainings without a row")
    parser.add_argument(
        "--check",
        metavar="CODEC",
        help=(
            "try an entry's laws, compare the ids of its rows with its code, and repeat some of "
            "its trainings"
        ),
    )
    parser.add_argument(
        "--repeat",
        type=count,
        default=2,
        metavar="N",
        help=(
            "with --check: trainings to repeat, drawn from all roles by a digest of the entry's "
            "rows (default: 2)"
        ),
    )
    parser.add_argument(
        "--role",
        action="append",
        metavar="ROLE",
        help=f"train in this role only, may be repeated: {', '.join(ROLES)}",
    )
    parser.add_argument(
        "--long",
        action="store_true",
        help="train three codecs of each role with four times the steps and twice the width",
    )
    training_options(parser)
    parser.set_defaults(command=_board)


def training_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `train_cells`."""
    parser.add_argument(
        "--minutes",
        type=number(0),
        default=math.inf,
        help="no training begins after so many minutes (default: no limit)",
    )
    parser.add_argument(
        "--seeds", type=count, default=SEEDS, help=f"seeds of a training (default: {SEEDS})"
    )
    parser.add_argument("--workers", type=count, help="trainings at once (default: as many as fit)")


def _board(args: argparse.Namespace) -> int:
    check_roles(args.role or (), ROLES)
    args.store = args.store.absolute()
    if not args.folder.is_dir():
        raise UserError(f"'{args.folder}': no such folder; name one that has entries.csv")
    settings = execution(args, by="board")
    with chdir(args.folder):  # entries name files from there, wherever the folder lies
        return _in_folder(args, settings)


def _in_folder(args: argparse.Namespace, settings: Execution) -> int:
    from commsweep.scoring import board as boards
    from commsweep.scoring.board_page import write

    board = boards.read(Path())
    if args.check:
        return _check(board, args, settings)
    length = boards.LONG if args.long else boards.SHORT
    if args.train:
        cells = boards.cells(board, args.role or ROLES, args.seeds, length)
        train_cells(cells, args, settings)
        board = boards.read(Path())
    from tqdm import tqdm

    with tqdm(total=len(ROLES), desc="messages", unit="role", disable=args.json) as bar:
        boards.measure(board, bar.update)
    trainings = write(board, max(args.seeds, SEEDS))
    ranked = sum(len(training.standings) for training in trainings)
    entries = len(board.entries)
    print(f"{entries} entries, {ranked} places in {len(trainings)} trainings")
    print(f"written: {args.folder}/README.md, which.md, fronts.png, cards/")
    return 0


def train_cells(cells: dict[str, Cell], args: argparse.Namespace, settings: Execution) -> None:
    """Execute the trainings without a row in this folder, the first seed first, and add their
    rows.
    """
    from tqdm import tqdm

    from commsweep.scoring import board as boards
    from commsweep.scoring.training import ENDED

    store, began = Store(args.store), time.monotonic()
    recorded = boards.scores_of(Path(boards.ROWS))
    left = {name: cell for name, cell in cells.items() if name not in recorded}
    batches: dict[tuple[int, str, str], dict[str, Cell]] = {}
    for name, cell in left.items():
        key = cell.run.seed, cell.setup.role, cell.setup.name
        batches.setdefault(key, {})[name] = cell
    with tqdm(total=len(left), unit="run", desc="trainings", disable=args.json) as bar:
        for key in sorted(batches):
            if time.monotonic() - began > 60 * args.minutes:
                break
            batch = batches[key]
            launch_shown([cell.run for cell in batch.values()], store, settings, args.workers, bar)
            lines = []
            for name, cell in batch.items():
                row = store.folder(name).row()
                if row is not None and row["status"] in ENDED:
                    lines.append(boards.line(cell, row))
            boards.write_rows(Path(), lines)


def _check(board: Board, args: argparse.Namespace, settings: Execution) -> int:
    """Print what is wrong with an entry, or that nothing is."""
    from commsweep.config import run_id
    from commsweep.scoring import board as boards
    from commsweep.scoring.training import score
    from commsweep.training.run import execute

    entries = boards.entries_named(board, args.check)
    problems = boards.check(board, entries, args.seeds)
    cells = boards.entry_cells(entries, args.seeds)
    drawn = [] if problems else boards.draw(board, cells, args.repeat)
    store = Store(args.store)
    for cell in drawn:
        where = f"{cell.name} as {cell.setup.role}, {cell.setup.name}, seed {cell.run.seed}"
        print(f"training {where}")
        loss = score(cell.setup, execute(cell.run, store, settings)).loss
        recorded = board.scores[run_id(cell.run)].loss
        if not math.isclose(loss, recorded, rel_tol=NEARLY):
            problems.append(f"{where}: recorded loss {recorded:.6g}, this training's {loss:.6g}")
    for problem in problems:
        print(problem)
    if not problems:
        print(
            f"{args.check}: laws hold, rows are of this code, {len(drawn)} of {len(cells)} "
            f"trainings repeated with the same loss; {len(cells) - len(drawn)} were not tried"
        )
    return 1 if problems else 0
