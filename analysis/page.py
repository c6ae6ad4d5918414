"""One self-contained HTML file about a sweep: it opens offline and on a telephone; every number leads to its runs.

No library is loaded: a number opens a list of its runs, a run opens its curves and settings, both as <details>.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd

from commsweep.analysis import figures
from commsweep.analysis.claims import Claim, Effect
from commsweep.analysis.figures import Figure
from commsweep.analysis.tables import Cell, Table

STYLE = """
:root{color-scheme:light dark}
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:0 auto;padding:1rem;overflow-wrap:anywhere}
h1{line-height:1.2} h2{margin-top:2.5rem;border-bottom:1px solid #8886}
nav a{margin-right:1rem} .wide{overflow-x:auto} .faint{opacity:.7;font-size:.85rem}
table{border-collapse:collapse;font-size:.9rem} caption{text-align:left;font-weight:600;padding:.4rem 0}
td,th{padding:.25rem .6rem;text-align:left;border-bottom:1px solid #8884;vertical-align:top;white-space:nowrap}
td details a{display:block;font:.8rem monospace} summary{cursor:pointer} td summary{list-style:none}
td summary::after{content:" \\25be";opacity:.5} figure{margin:1.5rem 0} img,svg{max-width:100%;height:auto}
.run{border-bottom:1px solid #8884;padding:.3rem 0} .run:target{outline:2px solid #0072B2}
.run code{font-size:.8rem} .badge{border-radius:.6rem;padding:0 .5rem;color:#fff;background:#666;white-space:nowrap}
.supported,.finished{background:#00744f} .contradicted,.failed,.oom{background:#a83d00}
svg text{font:10px system-ui,sans-serif;fill:currentColor}
"""
# A link to a closed run opens it; without scripts it still leads there.
SCRIPT = """
function open_target(){const e=document.getElementById(location.hash.slice(1));if(e&&e.tagName=="DETAILS")e.open=true}
addEventListener("hashchange",open_target);open_target()
"""


def html(name: str, store: Path, frame: pd.DataFrame, curves: pd.DataFrame, tables: list[Table], claims: list[Claim],
         drawn: list[tuple[str, Figure]], folder: Path) -> str:
    """The page of sweep `name`; links to run folders are relative to `folder`, where it will lie."""
    by_run = dict(tuple(curves.groupby("id"))) if len(curves) else {}
    parts = [
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>commsweep: {escape(name)}</title>',
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head><body>',
        f"<h1>{escape(name)}</h1>", _overview(frame),
        '<nav><a href="#verdicts">verdicts</a><a href="#tables">tables</a><a href="#figures">figures</a>'
        '<a href="#runs">runs</a></nav>',
        '<h2 id="verdicts">Verdicts</h2><p class="faint">Differences of test accuracy in points, or of test loss in '
        "nats, paired by seed, with 95 % t intervals. A verdict speaks for this model and data set only.</p>",
        *map(_claim, claims),
        '<h2 id="tables">Tables</h2><p class="faint">Mean ± sample standard deviation over seeds, last epoch. A number '
        "opens the list of its runs.</p>",
        *map(_table, tables),
        '<h2 id="figures">Figures</h2>',
        *(f"<figure>{figures.tag(figure, alt=f'figure {kind}')}</figure>" for kind, figure in drawn),
        f'<h2 id="runs">Runs</h2><p class="faint">{len(frame)} cells. A run opens its curves, settings and folder.</p>',
        *_runs(frame, by_run, os.path.relpath(store, folder)),
        f"<script>{SCRIPT}</script></body></html>",
    ]
    return "\n".join(parts)


def _overview(frame: pd.DataFrame) -> str:
    counts = " ".join(f'<span class="badge {status}">{n} {status}</span>'
                      for status, n in frame.status.value_counts().items())
    data, model = (", ".join(sorted(frame[key].dropna().unique())) for key in ("data.name", "model.name"))
    seconds = frame["seconds.wall"].sum() if "seconds.wall" in frame else 0.0
    return (f"<p>{counts}</p><p>Data: {escape(data)}; model: {escape(model)}; {frame.seed.nunique()} seeds; "
            f"{seconds / 3600:.2f} worker hours.</p>")


def _claim(claim: Claim) -> str:
    lines = "".join(f"<li>{escape(effect.text())}{_behind(effect)}</li>" for effect in claim.effects)
    return (f'<p><b>{escape(claim.name)}</b> <span class="badge {claim.verdict.split()[0]}">{claim.verdict}</span> '
            f"{escape(claim.statement)}</p><ul>{lines}</ul>")


def _behind(effect: Effect) -> str:
    ids = dict.fromkeys(effect.ids)
    return f'<details class="faint"><summary>{len(ids)} runs</summary>{_links(ids)}</details>' if ids else ""


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(one)}</th>" for one in table.header)
    body = "".join("<tr>" + "".join(f"<td>{_cell(one)}</td>" for one in row) + "</tr>" for row in table.rows)
    return (f'<div class="wide"><table><caption>{escape(table.title)}</caption><thead><tr>{head}</tr></thead>'
            f"<tbody>{body}</tbody></table></div>")


def _cell(one: Cell | str) -> str:
    if isinstance(one, str):
        return escape(one)
    if not one.ids:
        return escape(one.text())
    return f"<details><summary>{escape(one.text())}</summary>{_links(one.ids)}</details>"


def _links(ids: Any) -> str:
    return " ".join(f'<a href="#{one}">{one}</a>' for one in ids)


def _runs(frame: pd.DataFrame, by_run: dict[str, pd.DataFrame], store: str) -> Iterator[str]:
    scores = {key: label for key, label in (("test_on_acc", "on"), ("test_off_acc", "off"), ("test_on_ppl", "on, ppl"),
                                            ("test_off_ppl", "off, ppl"), ("bytes.ratio", "of dense bytes"))
              if key in frame}
    plain = {"id", "status", "error", "method", "steps"}
    results = ("test_", "val_", "train_", "best_")
    settings = [name for name in frame if name not in plain and not name.startswith(results)]
    for row in frame.to_dict("records"):
        said = ", ".join(f"{label} {row[key]:.4g}" for key, label in scores.items() if not pd.isna(row[key]))
        listed = "\n".join(f"{key} = {row[key]}" for key in settings if not _absent(row[key]))
        error = f"<p>{escape(str(row['error']))}</p>" if not _absent(row["error"]) else ""
        curves = _curves(by_run[row["id"]]) if row["id"] in by_run else ""
        yield (f'<details class="run" id="{row["id"]}"><summary><code>{row["id"]}</code> <span class="badge '
               f'{row["status"]}">{row["status"]}</span> {escape(row["method"])}, seed {row["seed"]}'
               f'{": " + said if said else ""}</summary>{error}{curves}<p><a href="{escape(store)}/{row["id"]}">'
               f"run folder</a></p><pre class=\"faint wide\">{escape(listed)}</pre></details>")


def _absent(value: Any) -> bool:
    return value is None or (isinstance(value, float) and pd.isna(value))


def _curves(records: pd.DataFrame) -> str:
    """Loss and score of a run over its evaluations, as SVG."""
    score = "acc" if "test_on_acc" in records else "ppl"
    panels = [("loss", [("train", "train_loss"), ("test, on", "test_on_loss"), ("test, off", "test_off_loss")]),
              ({"acc": "accuracy", "ppl": "perplexity"}[score],
               [("test, on", f"test_on_{score}"), ("test, off", f"test_off_{score}")])]
    return "".join(_panel(title, records, [one for one in lines if one[1] in records]) for title, lines in panels)


def _panel(title: str, records: pd.DataFrame, lines: list[tuple[str, str]]) -> str:
    width, height, left, top, bottom = 300, 150, 48, 18, 18
    values = records[[column for _, column in lines]]
    low, high = float(values.min().min()), float(values.max().max())
    first, last = int(records.epoch.min()), int(records.epoch.max())

    def at(epoch: float, value: float) -> str:
        x = left + (width - left - 8) * ((epoch - first) / (last - first) if last > first else 0.5)
        y = top + (height - top - bottom) * (1 - ((value - low) / (high - low) if high > low else 0.5))
        return f"{x:.1f},{y:.1f}"

    drawn, legend = [], []
    for ink, (label, column) in zip((figures.INK[6], figures.INK[0], figures.INK[1]) if len(lines) == 3 else
                                    figures.INK[:2], lines, strict=True):
        colour = "currentColor" if ink == "#000000" else ink
        points = [at(epoch, value) for epoch, value in zip(records.epoch, records[column], strict=True)
                  if not pd.isna(value)]
        drawn.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" points="{" ".join(points)}"/>')
        drawn += [f'<circle cx="{x}" cy="{y}" r="2" fill="{colour}"/>' for x, y in (one.split(",") for one in points)]
        legend.append(f'<tspan fill="{colour}">{label}</tspan>')
    return (f'<svg role="img" aria-label="{title} over epochs" viewBox="0 0 {width} {height}" width="{width}">'
            f'<text x="{left}" y="11">{title}: {" · ".join(legend)}</text>'
            f'<text x="{left - 4}" y="{top + 8}" text-anchor="end">{high:.4g}</text>'
            f'<text x="{left - 4}" y="{height - bottom}" text-anchor="end">{low:.4g}</text>'
            f'<text x="{left}" y="{height - 4}">epoch {first}</text>'
            f'<text x="{width - 8}" y="{height - 4}" text-anchor="end">{last}</text>{"".join(drawn)}</svg>')
