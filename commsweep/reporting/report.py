"""Everything the rows of a sweep say, written to a folder: tables, figures, claims, and an HTML
page.

All of it can be written again from the store alone.
"""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commsweep.errors import UserError, nearest
from commsweep.registry import sweeps
from commsweep.reporting import results
from commsweep.reporting.published import CURVES

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from commsweep.reporting.claim import Claim
    from commsweep.reporting.table import Table


@dataclass
class Report:
    """The files that were written."""

    folder: Path
    tables: list[Table]
    claims: list[Claim]
    page: Path | None = None
    note: str = ""  # what must be known of the runs before the verdicts are read
    commands: dict[str, str] = field(default_factory=dict)  # by claim, what would decide it
    ran: str = ""  # models, data, settings, seeds and outcomes in a line

    def terminal(self) -> str:
        """The answers for a terminal, the table first: at most 60 lines, none wider than it."""
        width = shutil.get_terminal_size().columns
        table = self.tables[-1]
        rows = len(table.rows)
        shown = table.terminal(width, rows)
        while len(shown) > TABLE_LINES and rows > 1:
            rows -= 1
            shown = table.terminal(width, rows)
        lines = []
        for text in (self.ran, self.note):
            lines += textwrap.wrap(text, width)
        lines += ["", table.title, "", *shown]
        answers = _answers(self.claims, LINES - len(lines) - PLACES, width)
        return "\n".join([*lines, *answers])


LINES, TABLE_LINES, PLACES = 60, 40, 6  # of a terminal report: all, its table's, where files lie


def _answers(claims: list[Claim], room: int, width: int) -> list[str]:
    """Return a line a claim, and under it a line an effect where there is room for all of them."""
    from commsweep.reporting.claim import adjustment

    if not claims:
        return ["No claim of the papers has enough runs in this sweep.", ""]
    adjusted = textwrap.wrap(adjustment(claims), width)
    room -= 3 + len(adjusted)
    heads = [f"  {claim.name}: {claim.answer}. {claim.statement}" for claim in claims]
    wrapped = [textwrap.wrap(head, width, subsequent_indent="    ") for head in heads]
    effects = [
        [_cut(f"    {effect.short()}", width) for effect in claim.effects] for claim in claims
    ]
    lines = ["Answers; in full in claims.md"]
    if sum(map(len, [*wrapped, *effects])) <= room:
        for head, under in zip(wrapped, effects, strict=True):
            lines += [*head, *under]
    elif sum(map(len, wrapped)) <= room:
        lines += [line for head in wrapped for line in head]
    else:
        lines += [_cut(head, width) for head in heads[:room]]
        if len(claims) > room:
            lines.append(f"  ... {len(claims) - room} further claims")
    return [*lines, *adjusted, ""]


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 3]}..."


@dataclass
class More:
    """The additions of a plan to the report of its runs; figures with their captions."""

    tables: list[Table]
    claims: list[Claim]
    figures: list[tuple[str, Figure, str]]


@dataclass(frozen=True)
class Figures:
    """The figures of a report.

    scale: of vertical axes, "log" or "linear" ("": each figure's own). formats: beside PNG, "pdf"
    and "svg". only: the name of the one to draw ("": all). drawn: hears of each by its name. width,
    venue: of `style.sheet`.
    """

    scale: str = ""
    width: str = ""
    venue: str = ""
    formats: tuple[str, ...] = ()
    only: str = ""
    drawn: Callable[[str], object] = lambda name: None


def write(
    store: Path,
    sweep: str,
    folder: Path,
    page: bool = True,
    papers: Collection[str] = (),
    mine: str = "",
    additional: Callable[[pd.DataFrame, pd.DataFrame], More] | None = None,
    running: int = 0,
    figures: Figures | None = None,
    against: str = "",
) -> Report:
    """Tables (md, tex, csv), figures (png), claims (md, json) and report.html of one sweep.

    papers: whose tables, figures and claims (none: of all that have runs; of a sweep of one's own,
    only claims with enough seeds to be judged). mine: a function of one's own that makes the
    claims. additional: makes what else belongs there, of the runs and their curves; it comes first,
    claims by their names. running: seconds after which the page loads itself anew, of a sweep that
    goes on: nothing is judged then, because every look at a verdict counts. figures: how
    they are drawn, and which. against: a setting that every other one is compared with, in a claim
    more. Raises UserError when the sweep is unknown to the store, none of its
    runs is finished, or no figure has the name.
    """
    frame = results.load(store, sweep)
    if not (frame.status == "finished").any():
        raise UserError(
            f"no run of sweep '{sweep}' is finished in '{store}': run commsweep sweep launch "
            f"{sweep}"
        )
    # Seconds to import, so only once there is something to draw.
    from commsweep.reporting import claim, interim_looks, report_parts, style
    from commsweep.reporting.against import claim as against_claim
    from commsweep.reporting.page import html

    wish = figures or Figures()
    # So that nothing drawn from other rows stays behind; one figure is drawn beside the others.
    for name in ("tables",) if wish.only else ("tables", "figures"):
        shutil.rmtree(folder / name, ignore_errors=True)
    finished = list(frame.id[frame.status == "finished"])
    curves, points = results.curves(store, finished), results.points(store, finished)
    if curves.empty:  # of rows that were measured elsewhere
        curves = points
    extra = additional(frame, curves) if additional else More([], [], [])
    interim_looks.take(store, sweep, folder / "claims.json")
    before = interim_looks.read(store, sweep)
    claims = []
    if not running:
        claims = report_parts.all_claims(frame, papers, mine)
        if sweep not in sweeps() and not papers and not mine:
            claims = [judged for judged in claims if judged.has_seeds]
        if sweep not in sweeps() and not mine:
            claims = [judged.explored() for judged in claims]
        claims = extra.claims + claims
        if against:
            claims.append(against_claim(frame, against))
    if additional:
        claims.sort(key=lambda claim: claim.name)
    report = Report(
        folder,
        extra.tables + report_parts.all_tables(frame, papers),
        claim.adjust(claims, before),
    )
    interim_looks.note(store, sweep, report.claims)
    for table in report.tables:
        for suffix, text in (
            ("md", table.markdown()),
            ("tex", table.latex()),
            ("csv", table.csv()),
        ):
            _text(folder / "tables" / f"{table.name}.{suffix}", text)
    drawn = []
    with style.drawing(style.sheet(wish.width, wish.venue)):
        for name, figure, caption in chain(
            extra.figures, report_parts.all_figures(frame, curves, papers, wish.only, points)
        ):
            style.finish(figure, caption)
            drawn.append((name, figure, caption))
            wish.drawn(name)
    if wish.only and not drawn:
        names = report_parts.figure_names(frame, papers)
        raise UserError(
            f"--figure {wish.only}: no figure of this report has this name, or it shows nothing"
            f"{nearest(wish.only, names)} (figures: {', '.join(names)})"
        )
    if wish.scale:
        for _, figure_, _ in drawn:
            style.rescale(figure_, wish.scale)
    notes = (results.uneven(frame), results.mixed_surroundings(frame))
    report.note = " ".join(note for note in notes if note)
    counts = frame.status.value_counts()
    report.ran = (
        f"{sweep}: {results.scale(frame)}; {frame.method.nunique()} settings, "
        f"{frame.seed.nunique()} seeds, "
        + ", ".join(f"{count} runs {status}" for status, count in counts.items())
    )
    report.commands = claim.deciding(report.claims, sweep, frame, papers)
    if not running:
        _text(folder / "claims.md", claim.markdown(report.claims, report.note, report.commands))
        content = {
            "sweep": sweep,
            "papers": sorted(papers),
            "note": report.note,
            "worth": _worth(frame),
            "claims": [claim.record() for claim in report.claims],
        }
        _text(folder / "claims.json", json.dumps(content, indent=1) + "\n")
    frame.to_csv(folder / "rows.csv", index=False)
    if len(points):
        compression: dict[str, Any] = {"method": "gzip", "mtime": 0}
        points.to_csv(folder / CURVES, index=False, compression=compression)
    pictures = [
        (name, style.save(figure_, folder / "figures", name, ("png", *wish.formats))[0], caption)
        for name, figure_, caption in drawn
    ]
    if page:
        report.page = folder / "report.html"
        text = html(sweep, store, frame, curves, report.tables, report.claims, pictures, running)
        _text(report.page, text)
    return report


def _text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _worth(frame: pd.DataFrame) -> dict[str, str]:
    """Return what each setting keeps of what its message is worth, in words; {} without a
    control.
    """
    from commsweep.reporting.worth import of_settings

    methods = dict(zip(frame.setting_id, frame.method, strict=True))
    return {
        methods[setting]: worth_kept.text() for setting, worth_kept in of_settings(frame).items()
    }
