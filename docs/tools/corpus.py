"""Every step that was measured and published here, as one table with a schema.

`python -m docs.tools.corpus` writes `docs/results/steps`: `steps.csv`, and `datapackage.json`
that describes its columns (Frictionless Data's Table Schema).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
SOURCES = (
    "demo-links",
    "heldout-links",
    "heldout-advice",
    "unequal-links",
    "late-links",
    "heldout-learners",
)
FOLDER, TABLE, PACKAGE = RESULTS / "steps", "steps.csv", "datapackage.json"
# name, type, unit or values, what it is
COLUMNS = (
    ("source", "string", "folder of docs/results", "where the measurement was published"),
    ("id", "string", "", "of the measurement in its source"),
    ("run", "string", "", "id of the training settings"),
    ("kind", "string", "pipeline, learners", "what the processes are to each other"),
    ("processes", "integer", "", "stages of a pipeline, or learners"),
    ("schedule", "string", "gpipe, 1f1b", "of a pipeline's microbatches; empty for learners"),
    ("method", "string", "", "what is compressed, in words"),
    ("bytes", "number", "bytes", "that a step sends, compressed: of a pipeline or a learner"),
    ("bandwidth_mbit", "number", "Mbit/s", "of every link; empty: not limited"),
    ("latency_ms", "number", "ms", "of every link, one way"),
    ("links", "string", "", "of a pipeline whose links differ: each one in words"),
    ("steps", "integer", "", "measured steps"),
    ("step_ms", "number", "ms", "median duration of a step"),
    ("quartile_1_ms", "number", "ms", "a quarter of the steps took less"),
    ("quartile_3_ms", "number", "ms", "a quarter of the steps took more"),
    ("predicted_ms", "number", "ms", "predicted of the step, with the CPU speed of its sitting"),
    ("beforehand_ms", "number", "ms", "predicted before the step was measured; empty: none was"),
)


def corpus(results: Path = RESULTS) -> pd.DataFrame:
    """The table, by source in the order of `SOURCES`."""
    parts = [_part(name, pd.read_csv(results / name / "measurements.csv")) for name in SOURCES]
    return pd.concat(parts, ignore_index=True)[[name for name, *_ in COLUMNS]]


def _part(source: str, frame: pd.DataFrame) -> pd.DataFrame:
    learners = "learners" in frame
    made = frame.reindex(columns=["id", "run", "schedule", "method", "bytes", "links", "steps"])
    made["source"], made["kind"] = source, "learners" if learners else "pipeline"
    made["processes"] = frame["learners" if learners else "stages"]
    bandwidth = frame["bandwidth"] / 1e6
    made["bandwidth_mbit"] = bandwidth.where((bandwidth > 0) & made["links"].isna())
    made["latency_ms"] = 1e3 * frame["latency"]
    for name, column in (
        ("step_ms", "seconds"),
        ("quartile_1_ms", "quartile_1"),
        ("quartile_3_ms", "quartile_3"),
        ("predicted_ms", "predicted"),
        ("beforehand_ms", "beforehand"),
    ):
        made[name] = (1e3 * frame[column]).round(3) if column in frame else float("nan")
    return made


def package() -> dict[str, Any]:
    """The description of the table."""
    required = {"source", "id", "run", "kind", "processes", "method", "bytes", "steps", "step_ms"}
    fields = []
    for name, kind, unit, said in COLUMNS:
        field: dict[str, Any] = {"name": name, "type": kind, "description": said}
        if unit:
            field["description"] += f" ({unit})"
        if name in required:
            field["constraints"] = {"required": True}
        fields.append(field)
    schema = {"fields": fields, "missingValues": [""], "primaryKey": ["source", "id"]}
    title = "Measured steps of pipelines and learners over shaped links, two CPU cores"
    table = {"name": "steps", "path": TABLE, "format": "csv", "schema": schema}
    return {"name": "commsweep-steps", "title": title, "resources": [table]}


def write(folder: Path = FOLDER) -> None:
    """Both files."""
    folder.mkdir(parents=True, exist_ok=True)
    corpus().to_csv(folder / TABLE, index=False)
    (folder / PACKAGE).write_text(json.dumps(package(), indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write()
