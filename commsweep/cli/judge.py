"""`commsweep judge`: verdicts on rows that any tool recorded."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from commsweep.cli.options import folder, whole_number, writable
from commsweep.errors import UserError

if TYPE_CHECKING:
    from commsweep.reporting.foreign_rows import Rows
    from commsweep.reporting.judge import Judged

NAME_ROOM = 24  # characters of a setting's name on a terminal of 80


def add_commands(commands: argparse._SubParsersAction, _shared: argparse.ArgumentParser) -> None:
    """Register this file's subcommand."""
    parser = commands.add_parser(
        "judge",
        help="verdicts on anybody's rows: a table, or runs of W&B, TensorBoard, MLflow",
        description=(
            "Compare settings seed by seed: means, medians, intervals, p-values corrected for\n"
            "the number of comparisons, and the seeds that would decide what is open.\n\n"
            "FILE is a table with a row a training (.csv, .tsv, .parquet, .jsonl, .json), or a\n"
            "row a step of each, where the last number counts; or a folder of offline runs of\n"
            "W&B, of event files of TensorBoard, or of MLflow's file store."
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=(
            "examples:\n"
            "  commsweep judge runs.csv\n"
            "  commsweep judge runs.csv --score val_loss --seed run --against dense\n"
            '  commsweep judge mlruns --claim "topk > dense - 0.5" --claim "a = b +- 0.2"\n\n'
            "Columns that are not named are guessed, and the guess is printed. Settings are all\n"
            "columns that vary and come back with other seeds. Trainings that failed or have no\n"
            "number are counted and left out: that flatters what fails."
        ),
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="a table, or a tracker's folder")
    parser.add_argument("--score", metavar="COLUMN", help="what is compared (default: guessed)")
    parser.add_argument(
        "--better", choices=("lower", "higher"), help="which score wins (default: by its name)"
    )
    parser.add_argument(
        "--seed",
        metavar="COLUMN",
        help="what pairs the rows of two settings; 'order': their order (default: guessed)",
    )
    parser.add_argument(
        "--setting",
        action="append",
        default=[],
        metavar="COLUMN",
        help="a column of the setting, may be repeated (default: guessed)",
    )
    parser.add_argument(
        "--against", metavar="SETTING", help="compare all with it (default: dense, or the first)"
    )
    parser.add_argument(
        "--claim",
        action="append",
        default=[],
        metavar="TEXT",
        help='judge this instead, may be repeated: "A < B - 0.01", "A > B", "A = B +- 0.5"; B may '
        'be a number: "A < 3.28"',
    )
    parser.add_argument(
        "--look",
        action="append",
        type=whole_number(1, 100_000),
        default=[],
        metavar="N",
        help="you looked at the verdicts before, at N seeds; may be repeated",
    )
    parser.add_argument(
        "--out", type=folder, default=Path("judge"), help="folder to write to (default: judge)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    parser.set_defaults(command=_judge)


def _judge(args: argparse.Namespace) -> int:
    from commsweep.reporting import foreign_rows
    from commsweep.reporting import judge as judging
    from commsweep.reporting.style import save

    if args.claim and args.against:
        raise UserError("--against goes without --claim: a claim names both of its settings")
    writable(args.out)
    rows = foreign_rows.read(args.file)
    columns = judging.columns(rows, args.score, args.seed, args.setting, args.better)
    judged = judging.judge(rows, columns, args.against, args.claim, args.look)
    table = judging.table(judged)
    record = {
        "source": rows.source,
        "score": columns.score,
        "better": "lower" if columns.lower else "higher",
        "seed": columns.seed,
        "settings": list(columns.settings),
        "against": judged.baseline,
        "claims": [claim.record() for claim in judged.claims],
    }
    args.out.mkdir(parents=True, exist_ok=True)
    verdicts = judging.verdicts(judged)
    texts = {
        "settings.md": table.markdown(),
        "settings.tex": table.latex(),
        "settings.csv": judging.values(judged).to_csv(index=False),
        "claims.md": verdicts,
        "claims.json": json.dumps(record, indent=1) + "\n",
    }
    for name, text in texts.items():
        (args.out / name).write_text(text, encoding="utf-8")
    save(judging.figure(judged), args.out, "scores")
    if args.json:
        print(json.dumps(record))
        return 0
    print(_guesses(rows, judged))
    print()
    for line in table.texts():
        print(_line(line))
    print()
    print(verdicts if judged.claims else "One setting: nothing to compare.\n", end="")
    print(f"written: {args.out}/settings.md, .tex, .csv, claims.md, .json, scores.png, .pdf, .svg")
    return 0


def _guesses(rows: Rows, judged: Judged) -> str:
    columns = judged.columns
    direction = "lower" if columns.lower else "higher"
    lines = [
        rows.source,
        f"score     {columns.score}, {direction} is better",
        f"seed      {columns.seed}",
        f"settings  {', '.join(columns.settings) or 'none vary'}",
    ]
    if columns.step is not None:
        lines.append(f"step      {columns.step}: the last number of each training counts")
    if judged.baseline is not None:
        lines.append(f"against   {judged.baseline}")
    if judged.statuses:
        counts = ", ".join(f"{count} '{status}'" for status, count in judged.statuses.items())
        lines.append(f"status    {counts}: not known, counted as ended")
    return "\n".join(lines)


def _line(texts: list[str]) -> str:
    from commsweep.reporting.judge import shorten

    name, n, mean, middle, ends, note = texts
    name = shorten(name, NAME_ROOM)
    return f"{name:{NAME_ROOM}} n={n:3} {mean:16} median {middle:8} {ends} {note}".rstrip()
