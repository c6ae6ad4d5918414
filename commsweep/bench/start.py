"""`commsweep bench start`: what a user waits for before anything happens, as shares of a process
that imports torch and ends.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator

from commsweep.bench import Result, alternate, compared

ROUNDS = 6
TORCH, LIST = "import torch", "list"


def bench() -> Iterator[Result]:
    """Whole processes, from their start to their end. The store has a few runs."""
    with tempfile.TemporaryDirectory() as store:
        at = ("--store", store)
        _command("run", "synthetic", *at)()
        seeds = itertools.count(1)
        sides: dict[str, Callable[[], object]] = {
            TORCH: lambda: subprocess.run([sys.executable, "-c", "import torch"], check=True),
            "--help": _command("--help"),
            LIST: _command("list", *at),
            "a refusal": _command("run", "synthetic", "optim.lr=-1", *at),
            "a recorded run": _command("run", "synthetic", *at),
            "run synthetic": lambda: _command("run", "synthetic", f"seed={next(seeds)}", *at)(),
        }
        seconds = alternate(sides, ROUNDS)
    bounds = {"--help": 0.4, LIST: 0.4, "a refusal": 0.4, "run synthetic": 2.0}
    for name, bound in bounds.items():
        yield compared(f"{name} over {TORCH}", seconds, name, TORCH, bound)
    yield compared(f"a recorded run over {LIST}", seconds, "a recorded run", LIST, 1.0)


def _command(*words: str) -> Callable[[], object]:
    line = [sys.executable, "-m", "commsweep", *words]
    return lambda: subprocess.run(line, check=False, capture_output=True)
