"""The inputs that a run was trained on: digests of the loaded samples and weights, recorded beside
its outcome.

A Run names its data, and the command line says where they lie. So the same Run could be answered
with the outcome of other data. The digests tell the two apart; a stamp of the files (names, sizes,
times) saves loading them to find out. No torch here before something must be loaded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commsweep.config import Execution, Run, run_id
from commsweep.config.training import OwnSet, TextModel, TextSet
from commsweep.errors import UserError
from commsweep.store import Row, RunFolder, read_json, write_json

if TYPE_CHECKING:
    from torch import nn

    from commsweep.data.module import Blocks, ImageData

FILE = "inputs.json"
DATA_FILES = ("*.txt", "*.md", "*.raw", "*.tokens", "*.parquet", "*_batch*")
EMBEDDED = ("digits", "synthetic", "sotu", "synthetic-text")  # sets that need no folder
Inputs = dict[str, str]


def digests(run: Run, data: ImageData | Blocks, model: nn.Module) -> Inputs:
    """Digests of what was loaded for a run: "data", and "weights" of a pretrained model before it
    is trained.
    """
    digests = {"data": data.source_digest}
    if _pretrained(run):
        sha = hashlib.sha256()
        for name, tensor in model.state_dict().items():
            sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            sha.update(tensor.detach().cpu().contiguous().view(-1).numpy().tobytes())
        digests["weights"] = sha.hexdigest()[:12]
    return digests


def keep(folder: RunFolder, run: Run, execution: Execution, inputs_: Inputs) -> None:
    """Note what a run that begins, or goes on, was given. Raises UserError when it had begun with
    something else.
    """
    path = folder.path / FILE
    if path.exists():
        _compare(run, read_json(path).get("digests", {}), inputs_, execution, "was begun")
    write_json(
        path,
        {
            "digests": inputs_,
            "stamp": stamp(run, execution),
            "data_root": _shown(execution.data_root),
            "model_root": _shown(execution.model_root),
        },
    )


def check(folder: RunFolder, run: Run, row: Row, execution: Execution) -> None:
    """Raise UserError when a recorded outcome is of other data, or of other weights, than are named
    now.
    """
    recorded = row.get("inputs")
    if not recorded or not _named(run, execution):
        return
    try:
        noted = read_json(folder.path / FILE).get("stamp")
    except (OSError, UserError):
        noted = None
    current = stamp(run, execution)
    if current and current == noted:
        return
    _compare(run, recorded, _loaded(run, execution), execution, "was recorded")


def check_all(
    runs: Iterable[Run], rows: dict[str, tuple[RunFolder, Row]], execution: Execution
) -> None:
    """Do what `check` does, of the runs of a sweep with an outcome in `rows`; runs that name the
    same data are looked at once.
    """
    first_seen: dict[str, tuple[str, Inputs]] = {}
    for run in runs:
        name = run_id(run)
        if name not in rows:
            continue
        folder, row = rows[name]
        recorded = row.get("inputs")
        if not recorded:
            continue
        source = _source(run)
        if source not in first_seen:
            check(folder, run, row, execution)
            first_seen[source] = name, recorded
        elif first_seen[source][1] != recorded:
            raise UserError(mixed(name, recorded, *first_seen[source]))


def mixed(name_first: str, its: Inputs, name_second: str, inputs_second: Inputs) -> str:
    """Return what to say of two runs of one setting, or sweep, that were given different data."""
    return (
        f"runs {name_second} and {name_first} were trained on different data (digests "
        f"{_digests_text(inputs_second)} and "
        f"{_digests_text(its)}); numbers of both cannot be compared: keep one kind in this "
        "--store, and "
        "execute the other in its own"
    )


def stamp(run: Run, execution: Execution) -> str:
    """Stands for the files that data and weights are read from, by name, size and time; "" where
    they are not known.
    """
    if isinstance(run.data, OwnSet):
        return ""
    files: list[Path] = []
    if execution.data_root is not None and run.data.name not in EMBEDDED:
        for pattern in DATA_FILES:
            files += execution.data_root.rglob(pattern)
    if execution.model_root is not None:
        for name in _model_names(run):
            files += (path for path in (execution.model_root / name).rglob("*") if path.is_file())
    sha = hashlib.sha256()
    for path in sorted(files):
        state = path.stat()
        sha.update(f"{path.absolute()} {state.st_size} {state.st_mtime_ns}\n".encode())
    return sha.hexdigest()[:12]


def _loaded(run: Run, execution: Execution) -> Inputs:
    import torch

    from commsweep import models
    from commsweep.data import load as datasets

    datasets.forget()
    data = datasets.build(run, execution.data_root, execution.model_root, torch.device("cpu"))
    if not _pretrained(run):
        return {"data": data.source_digest}
    model, _ = models.build(run, data, execution.model_root)
    return digests(run, data, model)


def _compare(
    run: Run, recorded: Inputs, inputs_now: Inputs, execution: Execution, label: str
) -> None:
    for name, option, root in (
        ("data", "--data-root", execution.data_root),
        ("weights", "--model-root", execution.model_root),
    ):
        if name in recorded and recorded[name] != inputs_now.get(name):
            where = f"{option} '{root}'" if root is not None else "what is found here"
            raise UserError(
                f"run {run_id(run)} {label} with other {name} (digest {recorded[name]}) than "
                f"{where} holds ({inputs_now.get(name)}); name the {name} it was given, or another "
                "--store"
            )


def _named(run: Run, execution: Execution) -> bool:
    """Return whether it is said, or can be known without being said, where data or weights lie."""
    if isinstance(run.data, OwnSet):
        return True
    data = run.data.name not in EMBEDDED and execution.data_root is not None
    return data or (execution.model_root is not None and bool(_model_names(run)))


def _model_names(run: Run) -> list[str]:
    """Folders of the model root that a run may read."""
    if not (isinstance(run.model, TextModel) and isinstance(run.data, TextSet)):
        return []
    names = [run.model.weights, run.data.tokenizer]
    return [name for name in dict.fromkeys(names) if name not in ("", "bytes", "weights")]


def _pretrained(run: Run) -> bool:
    return isinstance(run.model, TextModel) and run.model.name == "pretrained"


def _source(run: Run) -> str:
    """Stands for what a run names as its data and weights."""
    spec: dict[str, Any] = run.data.model_dump(mode="json")
    return " ".join(str(spec.get(key)) for key in ("name", "load", "source", "tokenizer")) + (
        run.model.weights if isinstance(run.model, TextModel) else ""
    )


def _digests_text(inputs_: Inputs) -> str:
    return ", ".join(f"{name} {digest}" for name, digest in inputs_.items())


def _shown(root: Path | None) -> str | None:
    return None if root is None else str(root.absolute())
