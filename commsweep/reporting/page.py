"""One self-contained HTML file about a sweep: it opens offline and on a telephone, and may be moved
anywhere.

Tables, verdicts and figures stand in it as they are; every number opens the list of its runs. The
runs themselves (all settings, outcome, evaluations) are packed data that page.js unpacks: a table
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

from commsweep.reporting import figure
from commsweep.reporting.claim import Claim, Effect, adjustment
from commsweep.reporting.results import settings, uneven
from commsweep.reporting.table import Cell, Table

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


def _beside(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def html(
    name: str,
    store: Path,
    frame: pd.DataFrame,
    curves: pd.DataFrame,
    tables: list[Table],
    claims: list[Claim],
    drawn: list[tuple[str, Path, str]],
) -> str:
    """The page of sweep `name`; `drawn`: name, PNG file and caption. `store` is only named, never
    linked to.
    """
    packed = json.dumps(data(store, frame, curves), separators=(",", ":"), allow_nan=False).encode()
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>commsweep: '
            f"{escape(name)}</title>",
            '<meta name="viewport" content="width=device-width, initial-scale=1"><style>'
            f"{_beside('page.css')}</style></head><body>",
            f"<h1>{escape(name)}</h1>",
            _overview(frame),
            '<nav><a href="#verdicts">verdicts</a><a href="#tables">tables</a><a '
            'href="#figures">figures</a><a href="#runs">runs</a></nav>',
            '<h2 id="verdicts">Verdicts</h2><p class="faint">Differences of test accuracy in '
            "points, or of test loss in nats, paired by seed and by every setting that is not "
            f"compared, with 95 % t intervals. {escape(adjustment(claims))} A verdict speaks "
            "for this model and data set only.</p>",
            *map(_claim, claims),
            *([] if claims else ["<p>No claim of the papers has runs in this sweep.</p>"]),
            '<h2 id="tables">Tables</h2><p class="faint">Mean ± sample standard deviation over '
            "seeds, last epoch. A number opens the list of its runs.</p>",
            *map(_table, tables),
            '<h2 id="figures">Figures</h2>',
            *(
                f"<figure>{figure.picture(png.read_bytes(), alt=f'figure {kind}')}"
                f"<figcaption><b>{escape(kind)}.</b> {escape(caption)}</figcaption></figure>"
                for kind, png, caption in drawn
            ),
            f'<h2 id="runs">Runs</h2><p class="faint">{len(frame)} cells. Choose some to draw '
            "their curves over each other; a run opens its settings and evaluations. Filter by "
            "words that all must occur, such as "
            '<code>"TopK 10 %" seed=1</code>; a heading sorts.</p>',
            '<div id="explorer"><noscript>The table of runs needs JavaScript; rows.csv beside '
            "this page has all of it.</noscript></div>",
            f'<script type="application/octet-stream" id="data">{_packed(packed)}</script>',
            f'<script type="application/octet-stream" id="plotly">{_packed(_plotly())}</script>',
            f"<script>{_beside('page.js')}</script></body></html>",
        ]
    )


def data(store: Path, frame: pd.DataFrame, curves: pd.DataFrame) -> dict[str, Any]:
    """Everything about the runs, without repetition: a setting's text is stored once and named by
    its place.
    """
    plain = ["id", "status", "method", "seed", "error"]
    own = [*settings(frame), "seed"]
    rest = [name for name in frame if name not in (*plain, *own, "setting")]
    kinds = frame.drop_duplicates("setting")
    place = {setting: turn for turn, setting in enumerate(kinds.setting)}
    records = [
        {name: _plain(row[name]) for name in own if name != "seed" and not _absent(row[name])}
        for row in kinds.to_dict("records")
    ]
    rows = [
        [
            _plain(row["id"]),
            _plain(row["status"]),
            place[row["setting"]],
            _plain(row["seed"]),
            None if _absent(row["error"]) else str(row["error"]),
            *(_number(row[name]) for name in rest),
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
        "methods": [str(one) for one in kinds.method],
        "settings": records,
        "columns": rest,
        "scores": {name: title for name, title in SCORES.items() if name in rest},
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
        f"<p>{counts}</p><p>Data: {escape(sets)}; model: {escape(model)}; "
        f"{frame.seed.nunique()} seeds; {seconds / 3600:.2f} worker hours. "
        f"{escape(uneven(frame))}</p>"
    )


def _claim(claim: Claim) -> str:
    lines = "".join(
        f"<li>{escape(effect.text())}: {escape(effect.judged())}{_behind(effect)}</li>"
        for effect in claim.effects
    )
    return (
        f'<p><b>{escape(claim.name)}</b> <span class="badge '
        f'{claim.verdict.split()[0]}">{claim.verdict}</span> '
        f"{escape(claim.statement)}</p><ul>{lines}</ul>"
    )


def _behind(effect: Effect) -> str:
    ids = list(dict.fromkeys(effect.ids))
    return (
        f'<details class="faint"><summary>{len(ids)} runs</summary>{_links(ids)}</details>'
        if ids
        else ""
    )


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(one)}</th>" for one in table.header)
    body = "".join(
        "<tr>" + "".join(f"<td>{_cell(one)}</td>" for one in row) + "</tr>" for row in table.rows
    )
    return (
        "<div "
        f'class="wide"><table><caption>{escape(table.title)}</caption><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _cell(one: Cell | str) -> str:
    if isinstance(one, str):
        return escape(one)
    if not one.ids:
        return escape(one.text())
    return f"<details><summary>{escape(one.text())}</summary>{_links(one.ids)}</details>"


def _links(ids: Iterable[str]) -> str:
    """Runs by name; of very many, the first, for the table of runs lists them all."""
    every = [escape(str(identifier), quote=True) for identifier in ids]
    more = f" and {len(every) - MANY} more" if len(every) > MANY else ""
    return " ".join(f'<a href="#{one}">{one}</a>' for one in every[:MANY]) + more
