"""Mistakes a user can mend: one line that says what, where and how; the command line shows no traceback."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable


class UserError(Exception):
    """Bad input. The message is the single line a user sees."""


class Diverged(Exception):
    """The loss or a message became non-finite: a recorded outcome of a run, not a fault of the program."""


class Stopped(Exception):
    """A run was asked to stop and has saved a checkpoint."""


def notice(line: str) -> None:
    """Tell the user something that ends nothing, once a process."""
    if line not in _told:
        _told.add(line)
        print(f"commsweep: {line}", file=sys.stderr, flush=True)


_told: set[str] = set()


def nearest(name: str, valid: Iterable[str]) -> str:
    """'; did you mean 'x'?' when a valid name is close, else the empty string."""
    match = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.5)
    return f"; did you mean '{match[0]}'?" if match else ""
