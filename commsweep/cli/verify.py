"""`commsweep verify`: repeat a sample of published rows and compare."""

from __future__ import annotations

import argparse
import json
import math
import random
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commsweep.cli.options import count, whole_number
from commsweep.cli.runs import execution, execution_options
from commsweep.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from commsweep.store import Row

ROWS = "rows.csv"


def add_commands(commands: argparse._SubParsersAction, _shared: argparse.ArgumentParser) -> None:
    """Register this file's subcommand."""
    parser = commands.add_parser(
        "verify",
        parents=[execution_options()],
        help="repeat some published rows and compare their scores",
        description=(
            "Repeat a sample of a folder's rows here, and compare the scores. The same\n"
            "environment gives the same number. Another processor or version rounds otherwise:\n"
            "a training may then be another draw, as of another seed, so that two scores may\n"
            "differ by as much as two seeds do (95 %: 2.8 standard deviations of a setting)."
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=(
            "examples:\n"
            "  commsweep verify docs/results/floor_digits --runs 3\n"
            "  commsweep verify docs/results/floor_digits --runs 5 --draw 1    # five others"
        ),
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a folder with rows.csv")
    parser.add_argument("--sweep", metavar="NAME", help="sweep of the rows (default: the folder's)")
    parser.add_argument("--runs", type=count, default=3, help="rows to repeat (default: 3)")
    parser.add_argument(
        "--draw", type=whole_number(0), default=0, metavar="N", help="which sample (default: 0)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    parser.set_defaults(command=_verify)


def _verify(args: argparse.Namespace) -> int:
    rows = _published(args.folder, args.sweep)
    from tqdm import tqdm

    from commsweep.config.override import parse
    from commsweep.store import Store
    from commsweep.training.run import execute

    metric = "test_on_acc" if "test_on_acc" in rows[0]["metrics"] else "test_on_loss"
    spread = _spread(rows, metric)
    sample = random.Random(args.draw).sample(rows, min(args.runs, len(rows)))
    how = execution(args, by="verify")
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:  # nothing recorded is taken for a repetition
        for row in tqdm(sample, unit="run", desc="repeating", disable=args.json):
            repeated = execute(parse(row["run"]), Store(Path(folder)), how)
            lines.append(_compared(row, repeated, metric, spread))
    failed = [line for line in lines if not line["holds"]]
    if args.json:
        print(json.dumps({"metric": metric, "within": spread, "rows": lines}))
        return 1 if failed else 0
    print(f"{metric}; two seeds of a setting differ by at most {spread:.4g} in 95 of 100 pairs")
    for line in lines:
        verdict = "equal" if line["equal"] else "within" if line["holds"] else "OUTSIDE"
        print(
            f"  {line['id']}  published {line['published']:.6g}  here {line['here']:.6g}  {verdict}"
        )
    print(f"{len(lines) - len(failed)} of {len(lines)} rows hold")
    return 1 if failed else 0


def _published(folder: Path, sweep_name: str | None) -> list[Row]:
    """Return the finished rows of a folder. Raises UserError where there are none."""
    from commsweep.registry import sweep
    from commsweep.reporting.published import outcomes
    from commsweep.store import FINISHED

    path = folder / ROWS
    if not path.is_file():
        raise UserError(f"'{folder}' has no {ROWS}; name a folder of docs/results that has one")
    name = sweep_name or folder.resolve().name
    rows, _ = outcomes(path, sweep(name))
    finished = [row for row in rows if row["status"] == FINISHED]
    if not finished:
        raise UserError(f"'{path}': no row of sweep '{name}'; name its sweep with --sweep")
    return finished


def _spread(rows: Sequence[Row], metric: str) -> float:
    """Return what two seeds of a setting differ by at most in 95 of 100 pairs; 0 where no setting
    has two.
    """
    from commsweep.config.override import parse
    from commsweep.launching.grid import setting
    from commsweep.reporting.statistics import pair_spread

    by_setting: dict[str, list[float]] = {}
    for row in rows:
        by_setting.setdefault(setting(parse(row["run"])), []).append(row["metrics"][metric])
    spread = pair_spread(by_setting.values())
    return 0.0 if math.isnan(spread) else spread


def _compared(row: Row, repeated: Row, metric: str, spread: float) -> dict[str, Any]:
    published, score = row["metrics"][metric], repeated["metrics"].get(metric, math.nan)
    return {
        "id": row["id"],
        "published": published,
        "here": score,
        "equal": score == published,
        "holds": abs(score - published) <= spread,
    }
