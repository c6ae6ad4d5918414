"""`commsweep report`: tables, figures, verdicts and a page from a store; `commsweep claims` prints
the verdicts.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from datetime import datetime
from pathlib import Path

from commsweep.cli.options import folder, usual_store, whole_number, words, writable
from commsweep.errors import UserError
from commsweep.store import WITHOUT_OUTCOME

PAPERS = (
    "only the claims, tables and figures of these, comma-separated, such as images,bias "
    "(default: of adopted rows those of their report, else all with runs; all: all)"
)


MINE = (
    "judge claims of your own instead of the papers': a function of the rows (a DataFrame) that "
    "returns a list of commsweep.reporting.claim.Claim"
)


AGAINST = (
    "compare every setting with this one, such as eden:2, bwd=ef+topk:0.1 or dense, all effects "
    "judged together"
)


def add_commands(commands: argparse._SubParsersAction, shared: argparse.ArgumentParser) -> None:
    """Register this file's subcommands."""
    report = commands.add_parser(
        "report",
        parents=[shared],
        help="write tables, figures, claims and an HTML page",
        description="Write everything the recorded runs of a sweep say. Needs files only.",
    )
    report.add_argument("name", help="a sweep that was launched into this store")
    report.add_argument("--out", type=folder, help="folder to write to (default: out/NAME)")
    report.add_argument("--papers", type=words, default=(), metavar="NAMES", help=PAPERS)
    report.add_argument("--claims", default="", metavar="FILE:FUNCTION", help=MINE)
    report.add_argument("--against", default="", metavar="CODEC", help=AGAINST)
    report.add_argument(
        "--scale",
        choices=("log", "linear"),
        default="",
        help="of the vertical axes of figures (default: each figure's own); log keeps zeros",
    )
    report.add_argument(
        "--watch",
        type=whole_number(5, 86400),
        metavar="SECONDS",
        help="of a running sweep: write tables and page anew so often, and judge the claims once "
        "all cells have an outcome",
    )
    report.add_argument(
        "--figures",
        type=formats,
        default=(),
        metavar="FORMATS",
        help="formats of figures beside PNG: pdf, svg, or both, with a comma (default: none)",
    )
    report.add_argument(
        "--figure", default="", metavar="NAME", help="draw this figure only, and no page"
    )
    report.add_argument(
        "--width",
        choices=("column", "page"),
        default="",
        help="of every figure: one column, 3.3 inches, or two, 6.9 (default: what each needs)",
    )
    report.add_argument(
        "--venue",
        default="",
        metavar="NAME",
        help="sizes and fonts of a venue, such as icml2024, from the library tueplots",
    )
    report.add_argument("--no-page", action="store_true", help="skip the HTML page")
    report.set_defaults(command=_report)
    findings_parser = commands.add_parser(
        "findings",
        help="write the page of findings from the recorded verdicts",
        description=(
            "Write the page of findings from the claims.json of folders that commsweep report "
            "wrote: question, verdict, effects with interval and n, figure, the command that "
            "repeats it, and what it does not say."
        ),
    )
    findings_parser.add_argument(
        "--results", type=folder, default=Path("docs/results"), help="(default: docs/results)"
    )
    findings_parser.add_argument(
        "--out", type=folder, default=Path("docs/findings.md"), help="(default: docs/findings.md)"
    )
    findings_parser.set_defaults(command=_findings)
    claims = commands.add_parser(
        "claims", parents=[shared], help="print the verdict on each claim of the paper"
    )
    claims.add_argument("name", help="a sweep that was launched into this store")
    claims.add_argument("--papers", type=words, default=(), metavar="NAMES", help=PAPERS)
    claims.add_argument("--claims", default="", metavar="FILE:FUNCTION", help=MINE)
    claims.add_argument("--against", default="", metavar="CODEC", help=AGAINST)
    claims.set_defaults(command=_claims)


def formats(text: str) -> tuple[str, ...]:
    """Formats of figures, with commas between them."""
    names = words(text)
    for name in names:
        if name not in ("png", "pdf", "svg"):
            raise argparse.ArgumentTypeError(f"'{name}' is none of png, pdf, svg")
    return tuple(name for name in dict.fromkeys(names) if name != "png")


def _report(args: argparse.Namespace) -> int:
    from commsweep.registry import label
    from commsweep.reporting import interim_looks, report

    name = label(args.name)
    args.papers = interim_looks.papers(args.store, name, args.papers)
    writable(args.out or Path("out") / name)
    if args.watch is not None:
        _watch(args, name)
    from tqdm import tqdm

    bar = tqdm(desc="figures", unit="figure", disable=args.json or None, leave=False)
    written = report.write(
        args.store,
        name,
        args.out or Path("out") / name,
        page=not args.no_page and not args.figure,
        papers=args.papers,
        mine=args.claims,
        figures=report.Figures(
            scale=args.scale,
            width=args.width,
            venue=args.venue,
            formats=args.figures,
            only=args.figure,
            drawn=lambda name: bar.update(),
        ),
        against=args.against,
    )
    bar.close()
    if args.json:
        print(
            json.dumps(
                {
                    "folder": str(written.folder),
                    "page": written.page and str(written.page),
                    "tables": [table.name for table in written.tables],
                    "claims": {claim.name: claim.verdict for claim in written.claims},
                }
            )
        )
        return 0
    print(written.terminal())
    if written.commands:
        store = "" if args.store == usual_store() else f" --store {args.store}"
        print(
            f"undecided: commsweep sweep launch {name} --decide{store} runs the seeds that would "
            "decide"
        )
    print(
        f"tables   {written.folder / 'tables'} (md, tex, csv)\n"
        f"figures  {written.folder / 'figures'} ({', '.join(('png', *args.figures))})\n"
        f"claims   {written.folder / 'claims.md'}\n"
        f"rows     {written.folder / 'rows.csv'}"
        + (f"\npage     {written.page}" if written.page else "")
    )
    return 0


def _watch(args: argparse.Namespace, name: str) -> None:
    """Write what is there of a running sweep, again and again, until all cells have an outcome."""
    from commsweep.reporting import report, results

    while True:
        counts = results.load(args.store, name).status.value_counts().to_dict()
        left = sum(counts.get(status, 0) for status in WITHOUT_OUTCOME)
        counts_text = ", ".join(f"{count} {status}" for status, count in counts.items())
        print(f"{datetime.now():%H:%M:%S}  {name}: {counts_text}", flush=True)
        if not left:
            return
        if counts.get("finished"):
            report.write(
                args.store,
                name,
                args.out or Path("out") / name,
                page=not args.no_page,
                papers=args.papers,
                running=args.watch,
            )
        time.sleep(args.watch)


def _findings(args: argparse.Namespace) -> int:
    from commsweep.registry import findings
    from commsweep.reporting.findings import page

    if not any(args.results.glob("*/claims.json")):
        raise UserError(
            f"--results '{args.results}': no folder in it has a claims.json; this command is "
            "for those who maintain commsweep: it makes a page of folders that commsweep report "
            "--out has written"
        )
    writable(args.out, file=True)
    text = page(findings(), args.results, os.path.relpath(args.results, args.out.parent))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(text, encoding="utf-8")
    print(f"written to {args.out}")
    return 0


def _claims(args: argparse.Namespace) -> int:
    from commsweep.registry import label, sweeps
    from commsweep.reporting import against, interim_looks
    from commsweep.reporting.claim import adjust, deciding, markdown
    from commsweep.reporting.report_parts import all_claims
    from commsweep.reporting.results import load, uneven

    name = label(args.name)
    frame = load(args.store, name)
    args.papers = interim_looks.papers(args.store, name, args.papers)
    verdicts = all_claims(frame, args.papers, args.claims, interim_looks.read(args.store, name))
    if name not in sweeps() and not args.claims:
        verdicts = [claim.explored() for claim in verdicts]
    if args.against:
        verdicts.append(against.claim(frame, args.against))
        adjust(verdicts, interim_looks.read(args.store, name))
    interim_looks.note(args.store, name, verdicts)
    print(
        json.dumps([claim.record() for claim in verdicts])
        if args.json
        else markdown(verdicts, uneven(frame), deciding(verdicts, name, frame, args.papers))
    )
    return 0
