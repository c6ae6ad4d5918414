"""`commsweep score`: a card of codecs, their laws, messages, speed, and what training keeps."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commsweep.cli.options import check_roles, count, folder, number, writable
from commsweep.cli.runs import execution, execution_options
from commsweep.config.compressors.spelling import spelled, unknown
from commsweep.errors import UserError
from commsweep.scoring import ROLES
from commsweep.store import Store

if TYPE_CHECKING:
    from tqdm import tqdm

    from commsweep.config import Execution, Run
    from commsweep.scoring.card import Card
    from commsweep.scoring.training import Setup

SWEEP = "score"


def add_commands(commands: argparse._SubParsersAction, shared: argparse.ArgumentParser) -> None:
    """Register this file's subcommand."""
    roles = "\n".join(f"  {role:17} {text}" for role, text in ROLES.items())
    parser = commands.add_parser(
        "score",
        parents=[shared, execution_options()],
        help="a codec's card: laws, real messages, speed, worth kept in training",
        description=(
            "Score codecs: try the laws that all must keep, send real messages through them, time\n"
            "them through packed bytes, train with them beside dense, beside a control in which\n"
            "nothing is sent, and beside the best shipped codec of at most their bytes."
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=(
            f"roles:\n{roles}\n\n"
            "examples:\n"
            "  commsweep score mine.py:RowSigns,k=4 --quick\n"
            "  commsweep score mine.py:RowSigns,k=4 uniform:2 --role gradients --minutes 10\n\n"
            "Finished trainings are kept in the store: the same command goes on where it ended.\n"
            "A codec is a shipped one in a word (topk:0.1) or file.py:class; write one with\n"
            "commsweep new."
        ),
    )
    parser.add_argument("codecs", nargs="+", metavar="CODEC", help="codecs to score")
    parser.add_argument(
        "--role",
        action="append",
        metavar="ROLE",
        help=f"role of the messages, may be repeated (default: gradients): {', '.join(ROLES)}",
    )
    parser.add_argument(
        "--quick", action="store_true", help="without training: laws, messages, speed"
    )
    parser.add_argument(
        "--minutes",
        type=number(0),
        default=math.inf,
        help="no training begins after so many minutes (default: no limit)",
    )
    parser.add_argument(
        "--seeds", type=count, default=3, help="seeds of each training (default: 3)"
    )
    parser.add_argument("--long", action="store_true", help="trainings of four times as many steps")
    parser.add_argument(
        "--feedback", default="none", metavar="KIND", help="error feedback of the codecs, as ef"
    )
    parser.add_argument("--workers", type=count, help="trainings at once (default: as many as fit)")
    parser.add_argument(
        "--out", type=folder, default=Path("score"), help="folder of the card (default: score)"
    )
    parser.set_defaults(command=_score)


def _score(args: argparse.Namespace) -> int:
    roles = list(dict.fromkeys(args.role or ["gradients"]))
    check_roles(roles, ROLES)
    if len(set(args.codecs)) < len(args.codecs):
        raise UserError(f"{' '.join(args.codecs)}: a codec is named twice; name it once")
    for text in args.codecs:
        try:
            is_known = spelled(text) is not None
        except ValueError as error:
            raise UserError(f"codec {error}") from None
        if not is_known:
            raise UserError(f"codec {unknown(text)}")
    writable(args.out)
    began = time.monotonic()
    cards = _examined(args.codecs, roles, quiet=args.json)
    if not args.quick:
        _train(cards, args, began)
    _write(cards, args.out)
    if args.json:
        print(json.dumps([card.record() for card in cards]))
    else:
        from commsweep.scoring.card import LIMITS

        print(_text(cards))
        if not args.quick:
            print(LIMITS)
        print(f"written: {args.out}/card.md, card.json, rows.csv, card.png")
    return 1 if any(card.broken for card in cards) else 0


def _examined(codecs: list[str], roles: list[str], quiet: bool) -> list[Card]:
    """Return cards with laws, messages and speed. Raises UserError on a codec that does not exist
    or cannot work on the messages.
    """
    from tqdm import tqdm

    from commsweep.scoring import laws, samples, speed
    from commsweep.scoring.card import Card

    checked = {codec: laws.check(codec) for codec in codecs}
    rivals = [name for name in samples.RIVALS if name not in codecs]
    cards = []
    for role in tqdm(roles, desc="messages", unit="role", file=sys.stderr, disable=quiet):
        summaries = samples.summaries(codecs, role)
        speeds = speed.measured([*codecs, *rivals], role)
        for codec in codecs:
            rival = samples.rival(summaries[codec])
            codec_speed = speeds[codec]
            fastest = speed.fastest(speeds, rivals, codec_speed.share)
            cards.append(
                Card(codec, role, checked[codec], summaries[codec], rival, codec_speed, fastest)
            )
    return cards


def _train(cards: list[Card], args: argparse.Namespace, began: float) -> None:
    """Train with all codecs that keep the laws, and add what is recorded to the cards."""
    from commsweep.scoring.card import judge
    from commsweep.scoring.training import outcome, recorded, setups

    store = Store(args.store)
    pairs: list[tuple[Setup, Card]] = []
    for role in dict.fromkeys(card.role for card in cards):
        for setup in setups(role, 4 if args.long else 1):
            for card in cards:
                if card.role == role and not card.broken and _fits(card, setup, args.feedback):
                    pairs.append((setup, card))
    _execute(pairs, store, args, began)
    scores = recorded(store)
    for setup, card in pairs:
        result = outcome(setup, card.codec, card.rival.codec, args.feedback, args.seeds, scores)
        if result is None:
            card.missing.append(f"{setup.name}: no finished runs yet; the same command goes on")
        else:
            card.outcomes.append(result)
    judge(cards)


def _execute(
    pairs: list[tuple[Setup, Card]], store: Store, args: argparse.Namespace, began: float
) -> None:
    """Execute the missing runs of all trainings, first with the first seed, until the minutes are
    used up.
    """
    from tqdm import tqdm

    from commsweep.launching.executors.job import missing
    from commsweep.launching.grid import union
    from commsweep.launching.launch import register
    from commsweep.scoring.training import runs_of

    runs = []
    for setup, card in pairs:
        runs += runs_of(setup, [card.codec], args.feedback, args.seeds)
        runs += runs_of(setup, [card.rival.codec], "none", args.seeds)
    runs = union(runs)
    register(SWEEP, runs, store)
    left, settings = missing(runs, store), execution(args, by="score")
    with tqdm(
        total=len(runs),
        initial=len(runs) - len(left),
        unit="run",
        desc="trainings",
        file=sys.stderr,
        disable=args.json,
    ) as bar:
        for seed in sorted({run.seed for run in left}):
            for name in dict.fromkeys(run.data.name for run in left):
                if time.monotonic() - began > 60 * args.minutes:
                    return
                batch = [run for run in left if run.seed == seed and run.data.name == name]
                launch_shown(batch, store, settings, args.workers, bar)


def launch_shown(
    runs: list[Run], store: Store, settings: Execution, workers: int | None, bar: tqdm
) -> None:
    """Execute runs; a bar counts them and shows what goes wrong."""
    from commsweep.launching.launch import launch

    report = launch(
        runs,
        store,
        settings,
        workers,
        progress=lambda _run, _status: bar.update(),
        notice=lambda line: bar.write(line, file=sys.stderr),
    )
    for line in report.errors:
        bar.write(line, file=sys.stderr)


def _fits(card: Card, setup: Setup, feedback: str) -> bool:
    """Return whether a codec may be used in a training; the card says why not."""
    try:
        setup.coded(card.codec, feedback)
    except UserError as refusal:
        card.missing.append(f"{setup.name}: {refusal}")
        return False
    return True


def _text(cards: list[Card]) -> str:
    """Return tables of all codecs, where there are several, and then each one's card."""
    from commsweep.scoring.card import comparison

    tables = [table.markdown() for table in comparison(cards)]
    return "\n".join([*tables, *(card.markdown() for card in cards)])


def _write(cards: list[Card], out: Path) -> None:
    """Write card.md, card.json, rows.csv and the figure."""
    import pandas as pd

    from commsweep.reporting.style import save
    from commsweep.scoring import samples
    from commsweep.scoring.card import LIMITS, figure

    out.mkdir(parents=True, exist_ok=True)
    (out / "card.md").write_text(f"# Score card\n\n{_text(cards)}\n{LIMITS}\n", encoding="utf-8")
    record = json.dumps([card.record() for card in cards], indent=1)
    (out / "card.json").write_text(record + "\n", encoding="utf-8")
    rows: list[dict[str, Any]] = []
    for role in dict.fromkeys(card.role for card in cards):
        codecs = [card.codec for card in cards if card.role == role]
        rows += samples.rows(samples.measured(codecs, role))
    pd.DataFrame(rows).to_csv(out / "rows.csv", index=False)
    save(figure(cards), out, "card")
