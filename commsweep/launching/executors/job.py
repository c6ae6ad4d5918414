"""The interface of an executor: its job, its outcome, and what all executors need."""

from __future__ import annotations

import signal
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

from commsweep.config import Run, record, run_id
from commsweep.config.run import SCHEMA
from commsweep.store import Store


@dataclass
class Launched:
    """The outcome of a launch."""

    outcomes: Counter = field(default_factory=Counter)
    busy_seconds: float = 0.0  # inside optimisation steps and evaluation
    wall_seconds: float = 0.0
    workers: int = 1
    errors: list[str] = field(default_factory=list)

    def add(self, run: Run, answer: dict[str, Any]) -> None:
        """Count one cell's outcome."""
        self.outcomes[answer["status"]] += 1
        self.busy_seconds += answer.get("busy", 0.0)
        if answer.get("error"):
            self.errors.append(f"{run_id(run)} {answer['status']}: {answer['error']}")

    @property
    def efficiency(self) -> float:
        """Share of workers x wall time spent inside optimisation steps and evaluation."""
        return self.busy_seconds / (self.workers * self.wall_seconds) if self.wall_seconds else 0.0


@dataclass(frozen=True)
class Job:
    """The job of an executor."""

    runs: list[Run]  # the missing ones
    store: Store
    execution: Any  # an Execution
    workers: int | None = None  # cells at once; None: as many as there is room for
    # seconds a cell may take before it is stopped and recorded as such
    timeout: float | None = None
    per_gpu: int = 1  # cells at once on a GPU
    # what the executor must know of the cluster
    cluster: dict[str, str] = field(default_factory=dict)
    progress: Callable[[Run, str], None] = lambda run, status: None  # called after each cell
    notice: Callable[[str], None] = lambda line: None  # news for people


def missing(runs: list[Run], store: Store) -> list[Run]:
    """The runs without a recorded outcome."""
    return [run for run in runs if store.folder(run_id(run)).row() is None]


def record_end(run: Run, store: Store, status: str, error: str) -> dict[str, Any]:
    """Record the end of a cell whose process could not do so itself, unless the cell had come to
    one of its own.
    """
    folder = store.folder(run_id(run))
    with folder.locked():
        if (row := folder.row()) is not None:
            return {"status": row["status"], "error": row["error"]}
        if not (folder.path / "run.json").exists():
            folder.begin(run, {})
        folder.finish(
            {
                "schema": SCHEMA,
                "id": run_id(run),
                "status": status,
                "error": error,
                "run": record(run),
                "metrics": {},
                "seconds": {},
                "when": datetime.now(UTC).isoformat(timespec="seconds"),
            }
        )
    return {"status": status, "error": error}


class Interrupts:
    """While entered, the first Ctrl-C asks for an end (`asked`, `on_first`); the second raises
    KeyboardInterrupt, as SIGTERM does at once.
    """

    def __init__(self, on_first: Callable[[], None], notice: Callable[[str], None]) -> None:
        self.asked, self.on_first, self.notice = False, on_first, notice

    def ask(self) -> None:
        """End after the current epochs."""
        if not self.asked:
            self.asked = True
            self.on_first()

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.asked or number == signal.SIGTERM:
            raise KeyboardInterrupt
        self.ask()
        self.notice("stopping after the current epochs, with checkpoints; Ctrl-C again stops now")

    def __enter__(self) -> Interrupts:
        # signals are the main thread's
        self.here = threading.current_thread() is threading.main_thread()
        if self.here:
            signals = (signal.SIGINT, signal.SIGTERM)
            self.before = {number: signal.signal(number, self._handle) for number in signals}
        return self

    def __exit__(self, *_: object) -> None:
        if self.here:
            for number, handler in self.before.items():
                signal.signal(number, handler)


class StopFile:
    """Asks cells on other machines to end: a file of the store that they look for after each
    epoch.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.path = folder / f".stop-{name}"

    def __call__(self) -> bool:
        return self.path.exists()

    def set(self) -> None:
        """Ask."""
        self.path.touch()

    def clear(self) -> None:
        """The launch is over."""
        with suppress(OSError):
            self.path.unlink()
