"""The command's start, for `commsweep` and `python -m commsweep` (which torchrun and agents
want).
"""

from __future__ import annotations

import os
import sys

from commsweep.lean_imports import leaving


def start() -> int:
    """Let Python keep its bytecode, and run the command.

    Container images often forbid bytecode; without it every worker compiles torch anew, 20 s
    instead of 8.
    """
    no_output = sys.stdout is None
    _open_streams()
    for stream in (
        sys.stdout,
        sys.stderr,
    ):  # a terminal that knows ASCII only shows codes for other letters
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # pyright: ignore[reportAttributeAccessIssue]
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # Workers must not import what lies in the working folder under the name of a module.
    os.environ["PYTHONSAFEPATH"] = "1"

    def command() -> int:
        from commsweep.cli.main import main  # only now: its imports are to be kept, too

        code = main()
        if no_output:
            print("commsweep: standard output is closed; nothing was printed", file=sys.stderr)
        return code or int(no_output)

    return leaving(command)


def _open_streams() -> None:
    """Open what was closed (`>&-`) on nothing, so that no file of ours takes its number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
        if getattr(sys, name) is None:
            mode = "r" if number == 0 else "w"
            setattr(sys, name, open(number, mode, encoding="utf-8"))  # noqa: SIM115


if __name__ == "__main__":
    sys.exit(start())
