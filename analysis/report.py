"""Everything the rows of a sweep say, written to a folder: tables, figures, claims, and an HTML page.

The page is notebooks/report.ipynb, executed. All of it can be written again from the store alone.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from analysis import results
from experiments.errors import UserError

if TYPE_CHECKING:
    import pandas as pd

    from analysis.claims import Claim
    from analysis.tables import Table

NOTEBOOK = Path(__file__).resolve().parent.parent / "notebooks" / "report.ipynb"


@dataclass
class Report:
    """What was written."""

    folder: Path
    tables: list[Table]
    claims: list[Claim]
    page: Path | None = None


def write(store: Path, sweep: str, folder: Path, page: bool = True) -> Report:
    """Tables (md, tex, csv), figures (png, pdf, svg), claims (md, json) and report.html of one sweep.

    Raises UserError when the sweep is unknown to the store or none of its runs is finished.
    """
    frame = results.load(store, sweep)
    if not (frame.status == "finished").any():
        raise UserError(f"no run of sweep '{sweep}' is finished in '{store}': run commsweep sweep launch {sweep}")
    with ThreadPoolExecutor() as side:  # the notebook's kernel is another process: draw here meanwhile
        made = side.submit(execute, store, sweep, folder / "report.html") if page else None
        report = _write_files(folder, frame, store)
        report.page = made and made.result()
    return report


def _write_files(folder: Path, frame: pd.DataFrame, store: Path) -> Report:
    from analysis import claims, contents, figures  # seconds to import, so only once the kernel is starting

    for name in ("tables", "figures"):  # so that nothing drawn from other rows stays behind
        shutil.rmtree(folder / name, ignore_errors=True)
    report = Report(folder, contents.all_tables(frame), contents.all_claims(frame))
    for table in report.tables:
        for suffix, text in (("md", table.markdown()), ("tex", table.latex()), ("csv", table.csv())):
            _text(folder / "tables" / f"{table.name}.{suffix}", text)
    curves = results.curves(store, list(frame.id[frame.status == "finished"]))
    for name, figure in contents.all_figures(frame, curves):
        figures.save(figure, folder / "figures", name)
    _text(folder / "claims.md", claims.markdown(report.claims))
    _text(folder / "claims.json", json.dumps([claim.record() for claim in report.claims], indent=1))
    frame.to_csv(folder / "rows.csv", index=False)
    return report


def execute(store: Path, sweep: str, out: Path) -> Path:
    """Run the report notebook over a sweep and write it as one HTML file."""
    import nbformat
    from nbclient import NotebookClient
    from nbconvert import HTMLExporter

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    # The kernel reads these; a notebook opened by hand falls back to the demo.
    environment = os.environ | {"COMMSWEEP_STORE": str(store.resolve()), "COMMSWEEP_SWEEP": sweep}
    NotebookClient(notebook, timeout=300, kernel_name="python3", extra_arguments=["--log-level=ERROR"],
                   resources={"metadata": {"path": str(NOTEBOOK.parent)}}).execute(env=environment)
    exporter = HTMLExporter(template_name="lab", exclude_input=True)
    exporter.require_js_url = exporter.mathjax_url = ""  # the page opens offline
    html, _ = exporter.from_notebook_node(notebook)
    _text(out, re.sub(r'<script src="">\s*</script>', "", html))
    return out


def _text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
