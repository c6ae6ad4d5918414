"""The command's start, for `commsweep` and `python -m commsweep` (which torchrun and agents
want).
"""

from __future__ import annotations

import os
import sys

from commsweep.startup import leaving


def start() -> int:
    """Let Python keep its bytecode, and run the command.

    Container images often forbid bytecode; without it every worker compiles torch anew, 20 s
    instead of 8.
    """
    for stream in (
        sys.stdout,
        sys.stderr,
    ):  # a terminal that knows ASCII only shows codes for other letters
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # pyright: ignore[reportAttributeAccessIssue]
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

    def command() -> int:
        from commsweep.cli.main import main  # only now: its imports are to be kept, too

        return main()

    return leaving(command)


if __name__ == "__main__":
    sys.exit(start())
