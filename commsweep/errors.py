"""Mistakes a user can mend: one line that says what, where and how; the command line shows no
traceback.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable


class UserError(Exception):
    """Bad input. The message is the single line a user sees."""

    def _render_traceback_(self) -> list[str]:
        """The line that a notebook shows (a hook of IPython)."""
        return [f"commsweep: {self}"]


class Diverged(Exception):
    """The loss or a message became non-finite: a recorded outcome of a run, not a fault of the
    program.
    """


class Stopped(Exception):
    """A run was asked to stop and has saved a checkpoint."""


LONGEST = 300  # characters of somebody else's message


def reason(error: BaseException) -> str:
    """An exception as one line: its type and the first line of its message, if it has one that can
    be read.
    """
    try:
        text = str(error)
    except BaseException:  # a message is made by the exception's own code
        text = ""
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    if isinstance(error, SystemExit):
        first = f"sys.exit({first})"
    line = f"{type(error).__name__}: {first}" if first else type(error).__name__
    return line if len(line) <= LONGEST else line[: LONGEST - 3] + "..."


def notice(line: str) -> None:
    """Tell the user something that ends nothing, once a process."""
    if line not in _noticed:
        _noticed.add(line)
        print(f"commsweep: {line}", file=sys.stderr, flush=True)


_noticed: set[str] = set()


def nearest(name: str, valid: Iterable[str], most: int = 1) -> str:
    """'; did you mean 'x'?' when valid names are close, `most` of them at most; else the empty
    string.
    """
    matches = difflib.get_close_matches(name, list(valid), n=most, cutoff=0.5)
    if not matches:
        return ""
    quoted = [f"'{match}'" for match in matches]
    return f"; did you mean {', '.join(quoted[:-1])}{' or ' * (len(quoted) > 1)}{quoted[-1]}?"
