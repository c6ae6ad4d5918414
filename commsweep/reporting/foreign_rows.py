"""Rows of trainings that other tools recorded, one a training: tables and the folders of trackers.

    .csv, .tsv, .parquet, .jsonl, .json   a row a training, or a row a step of each
    folder of W&B                         runs that were recorded offline (run-*.wandb)
    folder of TensorBoard                 event files; settings from hparams and from folder names
    folder of MLflow                      the file store (mlruns)

Nothing is unpickled, and no tool's server is asked.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import pandas as pd

from commsweep.errors import UserError, reason
from commsweep.reporting import foreign_tables

BLOCK, HEAD, FILE_HEAD = 32768, 7, 7  # bytes of LevelDB's log format, and of W&B's file header
WHOLE, LAST = 1, 4  # kinds of a piece that end a record
MLFLOW_STATUS = {1: "running", 2: "scheduled", 3: "finished", 4: "failed", 5: "killed"}
# "lr=0.1" in a folder's name, and the end of one that counts seeds: "dense/seed_3", "dense-s3".
ASSIGNED = re.compile(r"([A-Za-z][\w.]*?)=([^,/\s]+?)(?=[,/\s]|_[A-Za-z][\w.]*=|$)")
NUMBERED = re.compile(r"(?:^|[_\-/ ])(?:seed|run|version|trial|s)[_\-]?(\d+)$")


@dataclass
class Rows:
    """Rows as a tool recorded them.

    settings, metrics: the columns that it keeps as such; None where it does not say.
    """

    frame: pd.DataFrame
    source: str
    settings: list[str] | None = None
    metrics: list[str] | None = None


@dataclass
class _Run:
    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    status: str = "finished"


def read(path: Path) -> Rows:
    """Return the rows of a file or a folder. Raises UserError where it is neither known nor
    readable.
    """
    if not path.exists():
        raise UserError(f"'{path}': no such file or folder")
    try:
        rows = _folder(path) if path.is_dir() else Rows(_table(path), f"table {path.name}")
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"'{path}' cannot be read: {reason(error)}") from None
    if rows.frame.empty:
        raise UserError(f"'{path}' has no rows")
    return rows


def _table(path: Path) -> pd.DataFrame:
    suffix = path.suffix.lower()
    if suffix in (".csv", ".tsv", ".txt"):
        return foreign_tables.read(path)
    if suffix == ".parquet":
        return pd.read_parquet(path)
    if suffix in (".jsonl", ".ndjson", ".json"):
        text = path.read_text(encoding="utf-8")
        records = _records(text) if suffix == ".json" else None
        if records is None:
            records = [json.loads(line) for line in text.splitlines() if line.strip()]
        if not all(isinstance(record, dict) for record in records):
            raise ValueError("each record must be an object, as {'seed': 1, 'loss': 0.5}")
        return pd.json_normalize(records)
    raise ValueError("its name must end in .csv, .tsv, .parquet, .jsonl or .json")


def _records(text: str) -> list[Any] | None:
    """Return the list that is the whole text; None where it has an object a line."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, list) else [value]


def _folder(path: Path) -> Rows:
    readers: list[tuple[str, str, Callable[[Path], _Run]]] = [
        ("W&B", "run-*.wandb", _wandb),
        ("TensorBoard", "*tfevents*", lambda file: _tensorboard(file.parent, path.resolve())),
        ("MLflow", "meta.yaml", _mlflow),
    ]
    for tool, pattern, reader in readers:
        files = sorted({file.resolve() for file in path.resolve().rglob(pattern)})
        if tool == "MLflow":
            files = [file for file in files if (file.parent / "metrics").is_dir()]
        if tool == "TensorBoard":  # a folder is one run, however many files it has
            files = [folder / "tfevents" for folder in sorted({file.parent for file in files})]
        if files:
            return _rows([reader(file) for file in files], f"{len(files)} runs of {tool}")
    raise ValueError("no run of W&B, TensorBoard or MLflow lies in it")


def _rows(runs: list[_Run], source: str) -> Rows:
    settings = list(dict.fromkeys(name for run in runs for name in run.settings))
    metrics = list(dict.fromkeys(name for run in runs for name in run.metrics))
    for run in runs:
        for name, value in run.metrics.items():
            if _is_not_finite(value):  # the training diverged
                run.metrics[name] = math.inf
    # a method that was logged beside the scores is a setting all the same
    words = {name for run in runs for name, value in run.metrics.items() if isinstance(value, str)}
    settings = [name for name in settings if name not in metrics] + sorted(words)
    metrics = [name for name in metrics if name not in words]
    lines = [
        run.settings | run.metrics | {"run name": run.name, "status": run.status} for run in runs
    ]
    return Rows(pd.DataFrame(lines), source, settings, metrics)


def _is_not_finite(value: Any) -> bool:
    if isinstance(value, str):
        return value.lower().lstrip("+-") in foreign_tables.NOT_FINITE
    return isinstance(value, float) and not math.isfinite(value)


# W&B: LevelDB's log format, each record a protocol buffer.


def wandb_records(path: Path) -> Iterator[Any]:
    """Yield the records of an offline file of W&B. A record that was cut off is left out."""
    proto: Any = import_module("wandb.proto.wandb_internal_pb2")

    data, text, at = path.read_bytes(), b"", FILE_HEAD
    while at + HEAD <= len(data):
        room = BLOCK - at % BLOCK
        if room < HEAD:
            at += room
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + HEAD])
        text += data[at + HEAD : at + HEAD + length]
        at += HEAD + length
        if kind in (WHOLE, LAST):
            record = proto.Record()
            record.ParseFromString(text)
            yield record
            text = b""


def wandb_key(item: Any) -> str:
    """Return the name of an entry of a record: "optim.lr"."""
    return item.key or ".".join(item.nested_key)


def _wandb(path: Path) -> _Run:
    run = _Run(path.stem, status="crashed")
    for record in wandb_records(path):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run.name = record.run.display_name or record.run.run_id
            for item in record.run.config.update:
                run.settings |= _flat(wandb_key(item), json.loads(item.value_json))
        elif kind == "history":
            for item in record.history.item:
                run.metrics[wandb_key(item)] = json.loads(item.value_json)
        elif kind == "summary":
            for item in record.summary.update:
                run.metrics[wandb_key(item)] = json.loads(item.value_json)
        elif kind == "exit":
            run.status = "finished" if record.exit.exit_code == 0 else "failed"
    run.settings = {key: value for key, value in run.settings.items() if key[0] != "_"}
    run.metrics = {
        key: value
        for key, value in run.metrics.items()
        if key[0] != "_" and not isinstance(value, dict | list)
    }
    return run


def _flat(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        return {name: str(value) if isinstance(value, list) else value}
    fields: dict[str, Any] = {}
    for key, inner in value.items():
        fields |= _flat(f"{name}.{key}", inner)
    return fields


def _tensorboard(folder: Path, root: Path) -> _Run:
    """Return the last value of each scalar of a folder; settings from hparams.yaml (Lightning),
    from the hparams plugin, or from the folder's name.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    events = EventAccumulator(str(folder), size_guidance={"scalars": 1})
    events.Reload()
    name = folder.relative_to(root).as_posix()
    run = _Run(name)
    for tag in events.Tags()["scalars"]:
        run.metrics[tag] = events.Scalars(tag)[-1].value
    for metadata in events.summary_metadata.values():
        if metadata.plugin_data.plugin_name == "hparams":
            data = HParamsPluginData.FromString(metadata.plugin_data.content)
            for key, value in data.session_start_info.hparams.items():
                run.settings[key] = getattr(value, value.WhichOneof("kind") or "string_value")
    if (folder / "hparams.yaml").is_file():
        for key, value in (_yaml(folder / "hparams.yaml") or {}).items():
            run.settings |= _flat(str(key), value)
    run.settings = named_settings(name) | run.settings
    return run


def named_settings(name: str) -> dict[str, Any]:
    """Return the settings that a run's name tells: of "lr=0.1/seed_3" {"lr": 0.1, "seed": 3}; what
    is left of it is "run".
    """
    settings: dict[str, Any] = {key: _number(value) for key, value in ASSIGNED.findall(name)}
    label = ASSIGNED.sub("", name).strip("/_-, ")
    if (numbered := NUMBERED.search(label)) and "seed" not in settings:
        settings["seed"] = int(numbered.group(1))
        label = label[: numbered.start()]
    return settings | ({"run": label} if label.strip("/_-, .") else {})


def _mlflow(path: Path) -> _Run:
    meta, folder = _yaml(path), path.parent
    status = meta.get("status", 3)
    run = _Run(meta.get("run_name") or folder.name, status=MLFLOW_STATUS.get(status, str(status)))
    for file in sorted((folder / "params").rglob("*")):
        if file.is_file():
            name = file.relative_to(folder / "params").as_posix()
            run.settings[name] = _number(file.read_text(encoding="utf-8").strip())
    for file in sorted((folder / "metrics").rglob("*")):
        lines = file.read_text(encoding="utf-8").split("\n") if file.is_file() else []
        values = [line.split()[1] for line in lines if line.strip()]  # time, value, step
        if values:
            run.metrics[file.relative_to(folder / "metrics").as_posix()] = float(values[-1])
    return run


def _yaml(path: Path) -> Any:
    import yaml

    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path.name}: {reason(error)}") from None


def _number(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
