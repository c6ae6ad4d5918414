"""Processors that do not fall asleep while links are measured.

A processor without work halts, and what wakes it (a frame, the timer of a shaped link) may find it
late: on a virtual machine whose host has others to serve, one time in ten by milliseconds, in which
a token bucket runs over and its rate is lost. On such a machine one flow over a link of 60 Mbit/s
carried 15 while processors halted, 48 while they did not. So while links are shaped every processor
has a process that turns in place and makes way for any other.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from commsweep.child import die_with_parent

LEAST = "19"  # the nice value that weighs least


@contextmanager
def awake() -> Iterator[list[subprocess.Popen]]:
    """Keep a process busy on every processor that this one may use; they end with it.
    Linux only.
    """
    turning: list[subprocess.Popen] = []
    try:
        for core in sorted(os.sched_getaffinity(0)):
            turning.append(
                subprocess.Popen(
                    [sys.executable, "-m", "commsweep.processes.awake", str(core)],
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                    preexec_fn=lambda: die_with_parent(9),
                )
            )
        yield turning
    finally:
        for process in turning:
            process.kill()
            process.wait()


def turn(core: int) -> None:
    """Keep a processor busy with nothing, for as long as nobody else wants it."""
    os.sched_setaffinity(0, {core})
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with suppress(OSError):  # sessions share the processor evenly where the kernel groups by them
        Path("/proc/self/autogroup").write_text(LEAST, encoding="utf-8")
    while True:
        pass


if __name__ == "__main__":
    turn(int(sys.argv[1]))
