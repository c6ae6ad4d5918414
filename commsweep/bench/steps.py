"""`commsweep bench steps`: what a step of a whole run costs beside a bare loop over the same model,
batches and optimizer.

Each epoch of the run is followed by one of the bare loop; the first ones do not count.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from commsweep.bench import Result, compared
from commsweep.compressors.own import Own
from commsweep.config import Execution, Run, override
from commsweep.registry import preset
from commsweep.store import Store
from commsweep.training import optim
from commsweep.training.run import Parts, build, execute
from commsweep.training.step import Task

EPOCHS, SKIPPED = 21, 2  # of a run; of them the first, which do not count
RUNS: tuple[tuple[str, str, dict[str, Any], float], ...] = (
    ("digits, dense", "digits", {}, 1.08),
    ("a nano GPT-2, dense", "sotu_nano", {"data.train_blocks": 160}, 1.04),
)


def bench() -> Iterator[Result]:
    """Ratios of the epochs, both sides in turn."""
    for name, base, changes, bound in RUNS:
        seconds = _beside_a_loop(override(preset(base), changes))
        yield compared(f"{name}: a run's step / a bare loop's", seconds, "run", "loop", bound)
    yield _own_codec()


def _beside_a_loop(run: Run) -> dict[str, list[float]]:
    built, optimizer = bare(run)
    loop: list[float] = []

    def bare_turn(_: int) -> None:
        started = time.perf_counter()
        bare_epoch(built, optimizer)
        loop.append((time.perf_counter() - started) / len(built.data.train))

    taken = _steps(run, bare_turn)
    return {"run": taken[SKIPPED:], "loop": loop[SKIPPED : len(taken)]}


def _own_codec() -> Result:
    """A codec of one's own in both directions, beside the same class called without any check, as
    a shipped one would be.
    """
    links = {
        f"{side}.compressor": "commsweep.template.codec:RowSigns,k=4" for side in ("fwd", "bwd")
    }
    unchecked = patch.object(Own, "apply", _unchecked)

    def switch(number: int) -> None:
        if number % 2:
            unchecked.stop()
        else:
            unchecked.start()

    try:
        taken = _steps(override(preset("digits"), links), switch)[SKIPPED:]
    finally:
        patch.stopall()
    seconds = {"shipped": taken[::2], "own": taken[1::2]}
    title = "digits, a codec of one's own: a step / the same code shipped"
    return compared(title, seconds, "own", "shipped", 1.10)


def _unchecked(codec: Own, x: Tensor, seed: int = 0) -> Tensor:
    sent = codec.sender.encode(x.detach(), seed)
    codec._nbytes = sum(tensor.numel() * tensor.element_size() for tensor in sent.values())
    return codec.receiver.decode(sent, torch.zeros((), dtype=x.dtype).expand(x.shape))


def _steps(run: Run, between: Callable[[int], None]) -> list[float]:
    """Seconds of a step in each epoch of a run but the last; `between` is called before each epoch,
    with its number, and is not counted.
    """
    starts: list[float] = []
    ends: list[float] = []  # of the epochs before
    begin = Task.on_train_epoch_start

    def noted(task: Task) -> None:
        ends.append(time.perf_counter())
        between(len(starts))
        starts.append(time.perf_counter())
        begin(task)

    trained = override(run, {"epochs": EPOCHS, "eval_every": EPOCHS})
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(Task, "on_train_epoch_start", noted),
    ):
        row = execute(trained, Store(folder), Execution("cpu"))
    per_epoch = row["steps"] / EPOCHS
    return [(end - start) / per_epoch for start, end in zip(starts[:-1], ends[1:], strict=True)]


def bare(run: Run) -> tuple[Parts, torch.optim.Optimizer]:
    """Return a run's model in training, without boundaries, its batches and its optimizer."""
    with tempfile.TemporaryDirectory() as folder:
        built = build(run, Execution("cpu"), Path(folder))
    for hook in built.task.components["boundaries"].hooks:
        hook.remove()
    model = built.task.model.train()
    return built, optim.optimizer(run, list(model.parameters()))


def bare_epoch(built: Parts, optimizer: torch.optim.Optimizer) -> None:
    """Take the steps of an epoch."""
    task = built.task
    for x, y, _ in built.data.train:
        optimizer.zero_grad()
        task.loss(task.logits(x), y).backward()
        if task.clip:
            torch.nn.utils.clip_grad_norm_(task.parameters(), task.clip)
        optimizer.step()
