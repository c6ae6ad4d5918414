"""A sweep as an Optuna study, so that its dashboard shows grids too. A view: made anew each time,
never the record.
"""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commsweep.config import flatten
from commsweep.config.coordinates import CODEC_SETTING, codecs
from commsweep.errors import UserError
from commsweep.store import FINISHED, Store

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.storages import BaseStorage


def mirror(name: str, store: Store) -> Path:
    """Write the finished runs of a sweep as the trials of a study; returns its journal file.

    Objectives: test quality with compression on (accuracy, or minus the loss) and share of the
    dense bytes. Parameters: codecs by side in words, K, bits, feedback, and the other settings in
    which the runs differ, each once and without the seed, so that importance counts what varied.
    Raises UserError when the store knows no such sweep.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        named = store.cells(name)
    except FileNotFoundError:
        raise UserError(
            f"store '{store.root}' knows no sweep '{name}'; launch it with: commsweep sweep "
            f"launch {name}"
        ) from None
    rows = [row for row in store.rows() if row["id"] in named and row["status"] == FINISHED]
    settings = [_parameters(flatten(row["run"])) for row in rows]
    choices = {}
    partitions: set[tuple[int, ...]] = set()  # how a parameter parts the runs
    for key in dict.fromkeys(key for setting in settings for key in setting):
        values = [str(setting.get(key)) for setting in settings]
        partition = tuple(map(values.index, values))
        if len(set(values)) > 1 and partition not in partitions:
            partitions.add(partition)
            choices[key] = sorted({setting.get(key) for setting in settings}, key=str)
    journal = store.root / "studies" / f"{name}.journal"
    mark = {"mirror": name}
    if journal.exists() and _mark(journal, name) != mark:
        raise UserError(
            f"study '{name}' in store '{store.root}' is a search's, not a view of the sweep of "
            f"that name; look at it with: optuna-dashboard {journal}, and rename the file to "
            "see the sweep"
        )
    partial = journal.with_name(f".{name}.{os.getpid()}")
    partial.parent.mkdir(parents=True, exist_ok=True)
    partial.unlink(missing_ok=True)
    study = optuna.create_study(
        study_name=name,
        directions=["maximize", "minimize"],
        storage=journal_storage(partial),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study.set_metric_names(["quality", "share of dense bytes"])
    study.set_user_attr("commsweep", mark)
    kinds: dict[str, BaseDistribution] = {
        key: optuna.distributions.CategoricalDistribution(values) for key, values in choices.items()
    }
    for row, setting in zip(rows, settings, strict=True):
        metrics = row["metrics"]
        quality = metrics["test_on_acc"] if "test_on_acc" in metrics else -metrics["test_on_loss"]
        study.add_trial(
            optuna.trial.create_trial(
                params={key: setting.get(key) for key in kinds},
                distributions=kinds,
                values=[quality, row["bytes"]["ratio"]],
                user_attrs={
                    "run": row["id"],
                    **{key: round(value, 6) for key, value in metrics.items()},
                },
            )
        )
    os.replace(partial, journal)
    return journal


def journal_storage(path: Path) -> BaseStorage:
    """Return the storage of a study in a file of its own."""
    from optuna.storages.journal import JournalFileBackend, JournalStorage

    return JournalStorage(JournalFileBackend(str(path)))


def _mark(journal: Path, name: str) -> Any:
    import optuna

    return optuna.load_study(study_name=name, storage=journal_storage(journal)).user_attrs.get(
        "commsweep"
    )


def _parameters(settings: dict[str, Any]) -> dict[str, Any]:
    """The parameters of a run, as Optuna takes them."""
    words = codecs(settings)
    words.pop("codec")  # of all sides at once
    # numbers first, for axes of their own, where they say the same as words
    parameters = {key: words.pop(key) for key in ("K", "bits", "feedback")} | words
    for key, value in settings.items():
        if key != "seed" and not CODEC_SETTING.match(key):
            listed = isinstance(value, (list, tuple, dict))
            parameters[key] = json.dumps(value) if listed else value
    return parameters
