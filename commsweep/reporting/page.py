"""The page of a sweep, a self-contained HTML file: it opens offline and on a telephone, and may be
moved anywhere.

It reads from the top like the results of a paper: what ran, the answers with their intervals, the
main figure, tables, further figures, runs. Every number opens the list of its runs. The runs
themselves (all settings, outcome, evaluations) are packed data that page.js unpacks: a table
to filter and sort, rows written only as they are looked at, and curves of any choice of runs drawn
over each other by Plotly, which is embedded, too.
"""

from __future__ import annotations

import gzip
import json
import math
from base64 import b64encode
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd

from commsweep.reporting import statistics, style
from commsweep.reporting.claim import Claim, Effect, adjustment, shown
from commsweep.reporting.results import scale, settings, uneven
from commsweep.reporting.statistics import mean_sd
from commsweep.reporting.table import PERCENT, PLAIN, Cell, Table
from commsweep.reporting.words import in_words

HERE = Path(__file__).parent
MANY = 400  # runs behind a number that are listed one by one
SCORES = {
    "test_on_acc": "accuracy, on",
    "test_off_acc": "accuracy, off",
    "test_on_ppl": "perplexity, on",
    "test_off_ppl": "perplexity, off",
    "bytes.ratio": "of dense bytes",
    "gradients.rate": "gradient rate",
}


def _next_to(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def html(
    name: str,
    store: Path,
    frame: pd.DataFrame,
    curves: pd.DataFrame,
    tables: list[Table],
    claims: list[Claim],
    drawn: list[tuple[str, Path, str]],
    running: int = 0,
) -> str:
    """The page of sweep `name`; `drawn`: name, PNG file and caption. `store` is only named, never
    linked to. running: seconds after which it loads itself anew.
    """
    none = "No claim of the papers has enough runs in this sweep."
    if running:
        none = "Claims are judged when all cells have an outcome: every look at a verdict counts."
    again = f'<meta http-equiv="refresh" content="{running}">' if running else ""
    main, other_figures = _headline(drawn)
    packed = json.dumps(data(store, frame, curves), separators=(",", ":"), allow_nan=False).encode()
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>commsweep: '
            f"{escape(name)}</title>",
            f'{again}<meta name="viewport" content="width=device-width, initial-scale=1"><style>'
            f"{_next_to('page.css')}</style></head><body>",
            f"<h1>{escape(name)}</h1>",
            _overview(frame),
            *map(_figure, main),
            '<nav><a href="#answers">answers</a><a href="#tables">tables</a><a '
            'href="#figures">figures</a><a href="#runs">runs</a></nav>',
            '<h2 id="answers">Answers</h2><p class="faint">A dot is the mean difference over '
            "seeds, the bar its 95 % interval, the shaded part what the claim says. Differences "
            "are points of test accuracy or nats of test loss, paired by seed.</p>",
            *map(_claim, claims),
            f'<p class="faint">{escape(adjustment(claims))} A verdict speaks for this model and '
            "data only.</p>"
            if claims
            else f"<p>{none}</p>",
            '<h2 id="tables">Tables</h2><p class="faint">Mean ± sample standard deviation over '
            "seeds, last epoch. A bold score is better than every other of its column at 5 % "
            "(Welch, Holm). A number opens the list of its runs, a heading sorts.</p>",
            *map(_table, tables),
            '<h2 id="figures">Figures</h2>',
            '<div class="figures">',
            *map(_figure, other_figures),
            "</div>",
            f'<h2 id="runs">Runs</h2><p class="faint">{len(frame)} cells. Choose some to draw '
            "their curves: one colour a setting, the mean over its seeds and a band of one "
            "standard deviation. Filter by words and numbers that all must fit, such as "
            '<code>"TopK 10 %" seed=1 bytes&lt;20%</code>. A heading sorts; a run opens its '
            "settings. The address keeps what you see.</p>",
            '<div id="explorer"><noscript>The table of runs needs JavaScript; rows.csv beside '
            "this page has all of it.</noscript></div>",
            f'<script type="application/octet-stream" id="data">{_packed(packed)}</script>',
            f'<script type="application/octet-stream" id="plotly">{_packed(_plotly())}</script>',
            f"<script>{_next_to('page.js')}</script></body></html>",
        ]
    )


def data(store: Path, frame: pd.DataFrame, curves: pd.DataFrame) -> dict[str, Any]:
    """Everything about the runs, without repetition: a setting's text is stored once and named by
    its place.
    """
    plain = ["id", "status", "method", "seed", "error"]
    setting_columns = [*settings(frame), "seed"]
    more_columns = [name for name in frame if name not in (*plain, *setting_columns, "setting_id")]
    kinds = frame.drop_duplicates("setting_id")
    index_of = {setting: index for index, setting in enumerate(kinds.setting_id)}
    records = [
        {
            name: _plain(row[name])
            for name in setting_columns
            if name != "seed" and not _absent(row[name])
        }
        for row in kinds.to_dict("records")
    ]
    rows = [
        [
            _plain(row["id"]),
            _plain(row["status"]),
            index_of[row["setting_id"]],
            _plain(row["seed"]),
            None if _absent(row["error"]) else str(row["error"]),
            *(_number(row[name]) for name in more_columns),
        ]
        for row in frame.to_dict("records")
    ]
    columns = [name for name in curves if name not in ("id", "rates")] if len(curves) else []
    drawn: dict[str, list[list[Any]]] = {}
    series_of = (curves[column].tolist() for column in ("id", *columns)) if columns else ()
    for name, *values in zip(*series_of, strict=True):
        for series, value in zip(
            drawn.setdefault(str(name), [[] for _ in columns]), values, strict=True
        ):
            series.append(_number(value))
    return {
        "store": str(store),
        "methods": [in_words(str(method)) for method in kinds.method],
        "settings": records,
        "columns": more_columns,
        "scores": {name: title for name, title in SCORES.items() if name in more_columns},
        "rows": rows,
        "curveColumns": columns,
        "curves": drawn,
    }


def _plotly() -> bytes:
    """Plotly's own script, as its package carries it."""
    from importlib.resources import files

    return (files("plotly") / "package_data" / "plotly.min.js").read_bytes()


def _packed(content: bytes) -> str:
    return b64encode(gzip.compress(content, 9, mtime=0)).decode()


def _plain(value: Any) -> Any:
    """A value as JSON takes it."""
    return value.item() if hasattr(value, "item") else value


def _number(value: Any) -> Any:
    """Six digits are what a screen shows; rows.csv has them all."""
    if _absent(value):
        return None
    value = _plain(value)
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    return value if isinstance(value, (int, str, bool)) else str(value)


def _absent(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _overview(frame: pd.DataFrame) -> str:
    counts = " ".join(
        f'<span class="badge {escape(str(status), quote=True)}">{n} {escape(str(status))}</span>'
        for status, n in frame.status.value_counts().items()
    )
    sets, model = (
        ", ".join(sorted(frame[key].dropna().unique())) for key in ("data.name", "model.name")
    )
    seconds = frame["seconds.wall"].sum() if "seconds.wall" in frame else 0.0
    return (
        f"<p>{counts}</p><p>{escape(scale(frame) or f'{model} on {sets}')}; "
        f"{frame.method.nunique()} settings, {frame.seed.nunique()} seeds; "
        f"{seconds / 3600:.2f} worker hours. {escape(uneven(frame))}</p>"
    )


Drawn = tuple[str, Path, str]  # name, PNG file and caption


def _headline(drawn: list[Drawn]) -> tuple[list[Drawn], list[Drawn]]:
    """(the main figure, the others): score against bytes, else the first."""
    chosen = next((at for at, (name, _, _) in enumerate(drawn) if name == "score_bytes"), 0)
    return drawn[chosen : chosen + 1], drawn[:chosen] + drawn[chosen + 1 :]


def _figure(drawn: Drawn) -> str:
    name, png, caption = drawn
    return (
        f'<figure id="figure-{escape(name)}">'
        f"{style.picture(png.read_bytes(), alt=f'figure {name}')}"
        f'<figcaption><a href="#figure-{escape(name)}"><b>{escape(name)}.</b></a> '
        f"{escape(caption)}</figcaption></figure>"
    )


def _claim(claim: Claim) -> str:
    numbers = [0.0]
    for effect in claim.effects:
        if effect.values:
            numbers += [*(effect.interval or ()), *effect.values[:1], effect.region.edge]
            if effect.within is not None:
                numbers.append(-effect.within)
    low, high = min(numbers), max(numbers)
    room = 0.06 * (high - low) or 1.0
    lines = "".join(_effect(effect, low - room, high + room) for effect in claim.effects)
    return (
        f'<p class="claim"><span class="badge {claim.verdict.split()[0]}">{claim.answer}</span> '
        f'<b>{escape(claim.name)}.</b> {escape(claim.statement)}<span class="faint">'
        f"{escape(claim.where)} ({escape(claim.origin)})</span></p>{lines}"
    )


def _effect(effect: Effect, low: float, high: float) -> str:
    """Return a line: what, the interval drawn and in digits, and on demand the test and
    its runs.
    """
    number = shown(effect.values, effect.interval, effect.digits)
    if effect.values:
        number += f", n={len(effect.values)}"
    return (
        f'<div class="effect"><span>{escape(effect.what)}</span>{_interval(effect, low, high)}'
        f"<span>{escape(number)}</span><details><summary>{escape(effect.verdict)}</summary>"
        f"<p>{escape(effect.text())}: {escape(effect.judged())}</p>{_behind(effect)}"
        "</details></div>"
    )


WIDTH, HEIGHT = 240, 22  # of the picture of an interval


def _interval(effect: Effect, low: float, high: float) -> str:
    """A dot and its interval over the claimed region, as SVG."""

    def at(value: float) -> float:
        return round(WIDTH * (min(max(value, low), high) - low) / (high - low), 1)

    region = effect.region
    if effect.within is not None:
        left, right = at(-effect.within), at(effect.within)
    else:
        left, right = (at(region.edge), WIDTH) if effect.above is not None else (0, at(region.edge))
    middle = HEIGHT / 2
    shapes = [
        f'<rect x="{left}" y="1" width="{right - left:.1f}" height="{HEIGHT - 2}" '
        'class="claimed"/>',
        f'<line x1="{at(0)}" x2="{at(0)}" y1="0" y2="{HEIGHT}" class="zero"/>',
    ]
    if effect.values:
        mean, _ = mean_sd(effect.values)
        ends = effect.interval or (mean, mean)
        kind = effect.verdict.split()[0]
        shapes += [
            f'<line x1="{at(ends[0])}" x2="{at(ends[1])}" y1="{middle}" y2="{middle}" '
            f'class="bar {kind}"/>',
            f'<circle cx="{at(mean)}" cy="{middle}" r="4" class="dot {kind}"/>',
        ]
    label = escape(effect.text(), quote=True)
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img" '
        f'aria-label="{label}">{"".join(shapes)}</svg>'
    )


def _behind(effect: Effect) -> str:
    ids = list(dict.fromkeys(effect.ids))
    return (
        f'<details class="faint"><summary>{len(ids)} runs</summary>{_links(ids)}</details>'
        if ids
        else ""
    )


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in table.header)
    best = [_best(table, column) for column in range(len(table.header))]
    body = ""
    for row in table.rows:
        cells = ""
        for column, value in enumerate(row):
            bold = isinstance(value, Cell) and value.values and value.mean == best[column]
            cells += f"<td{' class=best' * bool(bold)}>{_cell(value)}</td>"
        body += f"<tr>{cells}</tr>"
    return (
        f'<p class="caption">{escape(table.title)}</p><div class="wide"><table class="sortable">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


# Columns in which a mean may be the best, by unit: of accuracies the highest, of losses the lowest.
SCORED = ("compressed inference", "dense inference", "on", "off", "off, recalibrated", "score")


def _best(table: Table, column: int) -> float | None:
    """The mean in a column of scores that is better than each other one at 5 % of the column
    (Welch's test, Holm's procedure); None where none is, or of another column.
    """
    if table.header[column] not in SCORED:
        return None
    cells = [row[column] for row in table.rows]
    scores = [cell for cell in cells if isinstance(cell, Cell) and len(cell.values) > 1]
    if len(scores) < 2 or any(cell.unit not in (PERCENT, PLAIN) for cell in scores):
        return None
    sign = 1 if scores[0].unit == PERCENT else -1
    best = max(scores, key=lambda score: sign * score.mean)
    better = statistics.Region(above=0.0) if sign > 0 else statistics.Region(below=0.0)
    ps = []
    for score in scores:
        if score is not best:
            ps.append(statistics.difference(best.values, score.values).p(better))
    levels = statistics.levels(ps, [1] * len(ps))
    leads = all(p <= level for p, level in zip(ps, levels, strict=True))
    return best.mean if leads else None


def _cell(cell_: Cell | str) -> str:
    if isinstance(cell_, str):
        return escape(cell_)
    if not cell_.ids:
        return escape(cell_.text())
    return f"<details><summary>{escape(cell_.text())}</summary>{_links(cell_.ids)}</details>"


def _links(ids: Iterable[str]) -> str:
    """Runs by name; of very many, the first, for the table of runs lists them all."""
    identifiers = [escape(str(identifier), quote=True) for identifier in ids]
    ending = f" and {len(identifiers) - MANY} more" if len(identifiers) > MANY else ""
    return (
        " ".join(f'<a href="#{identifier}">{identifier}</a>' for identifier in identifiers[:MANY])
        + ending
    )
