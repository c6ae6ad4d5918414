"""`commsweep bench sweep`: small runs of a sweep beside the same trainings in bare processes.

Both sides: as many processes as the sweep has workers, with one thread each, from their start to
the last score. A bare process loads the same libraries, builds the same models and batches and
takes the same steps, without Lightning's loop, a store or records.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator

import torch

from commsweep.bench import Result, alternate, compared
from commsweep.config import Run, override
from commsweep.launching.grid import seeds
from commsweep.lean_imports import loading
from commsweep.registry import preset
from commsweep.training import optim

with loading():  # both sides load the same libraries as fast
    from commsweep.bench.steps import bare, bare_epoch

RUNS, WORKERS, ROUNDS = 24, 2, 2
CHANGES = {"epochs": 6, "eval_every": 6, "schedule.t_max": 6}


def bench() -> Iterator[Result]:
    """The ratio of whole sweeps, started in turn."""
    seconds = alternate({"sweep": _sweep, "bare": _bare}, ROUNDS, warmup=0)
    title = f"{RUNS} digits runs: a sweep / bare processes"
    yield compared(title, seconds, "sweep", "bare", 1.05)


def runs() -> list[Run]:
    """Return the trainings: short ones, scored once."""
    return seeds([override(preset("digits"), CHANGES)], RUNS, 0)


def _sweep() -> None:
    settings = [f"{name}={value}" for name, value in CHANGES.items()]
    with tempfile.TemporaryDirectory() as store:
        words = ["sweep", "launch", "small", "--base", "digits", *settings, "--store", store]
        words += ["--seeds", str(RUNS), "--workers", str(WORKERS)]
        subprocess.run([sys.executable, "-m", "commsweep", *words], check=True, capture_output=True)


def _bare() -> None:
    lines = [
        [sys.executable, "-m", "commsweep.bench.sweep", str(number)] for number in range(WORKERS)
    ]
    processes = [subprocess.Popen(line) for line in lines]
    codes = [process.wait() for process in processes]
    assert not any(codes)


def _train(run: Run) -> float:
    """Train and score a run as a script of one's own would; return its mean loss."""
    built, optimizer = bare(run)
    scheduler, _ = optim.rates(run, optimizer, len(built.data.train) * run.epochs)
    for _ in range(run.epochs):
        bare_epoch(built, optimizer)
        scheduler.step()
    task = built.task
    task.model.eval()
    loaders = built.data.val_dataloader()
    losses = []
    with torch.no_grad():
        for loader in loaders:
            losses += [float(task.loss(task.logits(x), y)) for x, y, _ in loader]
    return sum(losses) / len(losses)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for trained in runs()[int(sys.argv[1]) :: WORKERS]:
        _train(trained)
