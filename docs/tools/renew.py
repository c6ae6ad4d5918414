"""Writes the folders of docs/results anew from their rows: verdicts, tables and figures.

`python -m docs.tools.renew [NAME ...]` renews these folders; without names all that have rows. A
file is written where it lies already, so a folder keeps its choice of tables and figures. What no
report makes, such as texts and measurements, stays.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from dataclasses import fields
from pathlib import Path

from commsweep import registry
from commsweep.launching.launch import adopt
from commsweep.registry import sweep
from commsweep.reporting import interim_looks, report
from commsweep.reporting.claim import Claim, Effect, Looked, adjust, markdown
from commsweep.reporting.published import CURVES, adopt_curves, outcomes
from commsweep.reporting.statistics import grid_of
from commsweep.store import Store, read_json

RESULTS = Path(__file__).parents[1] / "results"
ALL = "**All settings"  # how the table of all settings begins
FORETOLD = "foretold.md"  # written down before its runs
MEASURED = "measurements.jsonl"  # beside rows, of a command of its own that judges both


def renew(folder: Path) -> list[str]:
    """Write a folder anew; the names of the files that were made."""
    name = folder.name
    claims = folder / "claims.json"
    papers = read_json(claims).get("papers", ()) if claims.exists() else ()
    runs = sweep(name)
    with tempfile.TemporaryDirectory() as scratch:
        store, out = Store(Path(scratch) / "store"), Path(scratch) / "out"
        rows, _ = outcomes(folder / "rows.csv", runs)
        adopt(name, runs, rows, store)
        adopt_curves(folder / CURVES, [row["id"] for row in rows], store)
        interim_looks.take(store.root, name, claims)
        written = report.write(store.root, name, out, page=False, papers=papers)
        files = {"claims.json": out / "claims.json", "claims.md": out / "claims.md"}
        files |= _files(out)
        if papers and {path.name for path in folder.glob("*.png")} - set(files):
            all_papers = (
                Path(scratch) / "all"
            )  # a figure of another paper than those that are judged
            report.write(store.root, name, all_papers, page=False)
            files = _files(all_papers) | files
        together = out / "tables.md"
        before = (folder / "tables.md").read_text() if (folder / "tables.md").exists() else ""
        tables = [
            table.markdown()
            for table in written.tables
            if table.name != "settings" or ALL in before
        ]
        together.write_text("\n".join(tables))
        files["tables.md"] = together
        renewed = []
        for file, path in sorted(files.items()):
            if (folder / file).exists() and file != FORETOLD:
                shutil.copy(path, folder / file)
                renewed.append(file)
    return renewed


def _files(out: Path) -> dict[str, Path]:
    """The tables and figures of a report by their names in a folder of results."""
    files = {f"{path.stem}.md": path for path in (out / "tables").glob("*.md")}
    files |= {path.name: path for path in (out / "figures").glob("*.png")}
    for name, path in list(files.items()):  # where several papers have rows, names have theirs
        for paper in registry.papers():
            files.setdefault(name.removeprefix(f"{paper.NAME}_"), path)
    return files


def rejudge(folder: Path) -> list[str]:
    """Judge the recorded effects of a folder anew, whose measurements no store has; the names of
    the files that were written.
    """
    path = folder / "claims.json"
    content = read_json(path)
    names = {field.name for field in fields(Effect)}
    claims = []
    for record in content["claims"]:
        effects = []
        for effect in record["effects"]:
            values = {name: value for name, value in effect.items() if name in names}
            values["registered"] = effect.get("registered", max(1, len(effect["looks"])))
            values["grid"] = effect.get("grid") or grid_of([0.0, *effect["values"]])
            effects.append(Effect(**values))
        claim = Claim(record["claim"], record["statement"], effects, record["source"])
        claim.scale, claim.commit = record["scale"], record["origin"].partition("commit ")[2]
        claims.append(claim)
    looked = {}
    for claim in claims:
        for effect in claim.effects:
            looked[claim.name, effect.what] = Looked(effect.looks, effect.registered)
    adjust(claims, looked)
    for record, claim in zip(content["claims"], claims, strict=True):
        record.update(claim.record() | {"origin": record["origin"]})
    path.write_text(json.dumps(content, indent=1) + "\n")
    text = markdown(claims, content["note"])
    for record, claim in zip(content["claims"], claims, strict=True):
        text = text.replace(
            f"({claim.origin}). {claim.statement}", f"({record['origin']}). {claim.statement}"
        )
    (folder / "claims.md").write_text(text)
    return ["claims.json", "claims.md"]


def main() -> None:
    """Renew the folders that are named, or all."""
    named = sys.argv[1:]
    for folder in sorted(path for path in RESULTS.iterdir() if path.is_dir()):
        if named and folder.name not in named:
            continue
        if not (folder / "rows.csv").exists():
            figures = ", ".join(sorted(path.name for path in folder.glob("*.png")))
            print(
                f"{folder.name}: has no rows; not made here: {figures or 'no figure'}", flush=True
            )
            continue
        try:
            write = rejudge if (folder / MEASURED).exists() else renew
            print(f"{folder.name}: {', '.join(write(folder))}", flush=True)
        except Exception as fault:
            print(f"{folder.name}: left out, {type(fault).__name__}: {fault}", flush=True)


if __name__ == "__main__":
    main()
