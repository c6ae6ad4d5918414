"""A launch beside a tracker: what is recorded is replayed into it, from a thread of its own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

from commsweep.config import flatten
from commsweep.config.coordinates import codecs
from commsweep.config.run import setting_id
from commsweep.store import Row


class View(Protocol):
    """A tracker that shows recorded runs."""

    def push(self, ids: Iterable[str]) -> int:
        """Replay these recorded runs unless they were; how many were sent."""
        ...


def config_of(row: Row) -> dict[str, Any]:
    """Settings under flat dotted names, with our id; the setting (equal for its seeds), codec, K,
    bits and feedback as `cs.load_rows` has them.
    """
    settings = flatten(row["run"])
    return {"id": row["id"], "setting": setting_id(row["run"]), **codecs(settings), **settings}


class Follower:
    """Replays runs beside a launch, in a thread, as they are recorded. What the tracker refuses is
    said once, at the end.

    later: the command that replays what was not sent. report: shows the folder of a report, where
    the tracker has room for one.
    """

    def __init__(
        self, view: View, later: str, report: Callable[[Path], None] | None = None
    ) -> None:
        self.view, self.later, self.report, self.fault = view, later, report, ""
        self.waiting: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def add(self, name: str) -> None:
        """This run was recorded."""
        self.waiting.put(name)

    def end(self) -> str:
        """Wait until all are sent; what went wrong, or ""."""
        self.waiting.put(None)
        self.thread.join()
        return self.fault

    def _work(self) -> None:
        while (name := self.waiting.get()) is not None:
            if not self.fault:
                try:
                    self.view.push([name])
                # a view must not end a launch, whatever is wrong with it
                except Exception as error:
                    self.fault = f"{error or type(error).__name__}; later: {self.later}"
