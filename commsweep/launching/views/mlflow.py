"""MLflow as a view of the store: runs are replayed into it, nothing is read back from it.

One MLflow run a recorded run, in the experiment of its sweep. It has the flat dotted settings with
codec, K, bits and feedback as parameters, the points or evaluations of its training as metrics by
step, its outcome, and our id and the time of its outcome as tags, by which a replay finds it again.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from commsweep.config.labels import title
from commsweep.errors import UserError
from commsweep.launching.views.follow import config_of
from commsweep.store import FINISHED, POINTS, Row, RunFolder, Store

ID, RECORDED = "commsweep.id", "commsweep.recorded"
LONGEST = 500  # characters of a parameter that every server takes
PARAMETERS, METRICS = 100, 1000  # that MLflow takes at once


@dataclass(frozen=True)
class View:
    """A view of runs in MLflow.

    uri: of a tracking server or a database, or a folder, whose mlflow.db is used.
    """

    store: Store
    group: str
    uri: str

    @cached_property
    def client(self) -> Any:
        """MLflow's own client. Raises UserError when it is not installed or the server refuses."""
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        try:
            from mlflow import MlflowClient
        except ImportError:
            raise UserError(
                f"--mlflow {self.uri} needs MLflow: pip install 'commsweep[mlflow]'"
            ) from None
        for logger in ("mlflow", "alembic"):  # they tell of every table that they create
            logging.getLogger(logger).setLevel(logging.WARNING)
        uri = self.uri
        if "://" not in uri:
            os.makedirs(uri, exist_ok=True)
            uri = f"sqlite:///{os.path.abspath(uri)}/mlflow.db"
        try:
            return MlflowClient(tracking_uri=uri)
        except Exception as error:
            raise UserError(f"--mlflow {self.uri}: {_line(error)}") from None

    @cached_property
    def experiment(self) -> str:
        """The id of the sweep's experiment."""
        name = f"commsweep/{self.group}"
        try:
            experiment = self.client.get_experiment_by_name(name)
            return experiment.experiment_id if experiment else self.client.create_experiment(name)
        except Exception as error:
            raise UserError(f"--mlflow {self.uri}: {_line(error)}") from None

    def push(self, ids: Iterable[str]) -> int:
        """Replay these recorded runs unless they were; how many were sent. An outcome that was
        recorded anew replaces the run of the earlier one.
        """
        stamps, sent = self.store.stamps(), 0
        replayed = self._replayed()
        for name in ids:
            if name not in stamps or replayed.get(name, ("", ""))[1] == str(stamps[name][0]):
                continue
            folder = self.store.folder(name)
            row = folder.row()
            if row is None:  # removed since that look
                continue
            if name in replayed:
                self.client.delete_run(replayed[name][0])
            self._replay(row, folder, str(stamps[name][0]))
            sent += 1
        return sent

    def _replayed(self) -> dict[str, tuple[str, str]]:
        """By our id: MLflow's id, and the time of the outcome, of runs that were replayed whole."""
        replayed, token = {}, None
        while True:
            page = self.client.search_runs([self.experiment], page_token=token)
            for run in page:
                tags = run.data.tags
                if ID in tags:
                    replayed[tags[ID]] = run.info.run_id, tags.get(RECORDED, "")
            token = page.token
            if not token:
                return replayed

    def _replay(self, row: Row, folder: RunFolder, recorded: str) -> None:
        from mlflow.entities import Metric, Param

        run = self.client.create_run(
            self.experiment, run_name=title(row["run"]), tags={ID: row["id"]}
        )
        name, milliseconds = run.info.run_id, int(1000 * time.time())
        parameters = [
            Param(key, str(value)[:LONGEST])
            for key, value in config_of(row).items()
            if value is not None
        ]
        for batch in _batches(parameters, PARAMETERS):
            self.client.log_batch(name, params=batch)
        metrics = []
        for point in folder.metrics(POINTS) or folder.metrics():
            for key, value in _numbers(point):
                if key not in ("step", "epoch"):
                    metrics.append(Metric(key, value, milliseconds, int(point["step"])))
        last = dict(row["metrics"])
        for section in ("bytes", "seconds", "speed", "gradients"):
            last |= {f"{section}.{key}": value for key, value in row.get(section, {}).items()}
        for key, value in _numbers(last):
            metrics.append(Metric(key, value, milliseconds, int(row.get("steps") or 0)))
        for batch in _batches(metrics, METRICS):
            self.client.log_batch(name, metrics=batch)
        status = "FINISHED" if row["status"] == FINISHED else "FAILED"
        self.client.set_tag(name, "status", row["status"])
        self.client.set_tag(name, RECORDED, recorded)  # last: a replay that was cut is made again
        self.client.set_terminated(name, status)


def _numbers(record: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in record.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if number and math.isfinite(value):
            yield key, float(value)


def _batches(entries: list[Any], size: int) -> Iterator[list[Any]]:
    for first in range(0, len(entries), size):
        yield entries[first : first + size]


def _line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
