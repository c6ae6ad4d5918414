"""`commsweep bench steps`: what a step of a whole run costs beside a bare loop over the same model,
batches and optimizer.

The median epoch counts, from its start to the start of the next one; the first two do not.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from commsweep.bench import Result
from commsweep.compressors.own import Own
from commsweep.config import Execution, Run, override
from commsweep.registry import preset
from commsweep.store import Store
from commsweep.training import optim
from commsweep.training.run import Parts, build, execute
from commsweep.training.step import Task

EPOCHS, ROUNDS = 10, 3  # of a run; measurements, both sides in turn
RUNS: tuple[tuple[str, str, dict[str, Any], float], ...] = (
    ("digits, dense", "digits", {}, 1.10),
    ("a nano GPT-2, dense", "sotu_nano", {"data.train_blocks": 160}, 1.05),
)


def bench() -> Iterator[Result]:
    """Ratios of the medians over rounds; the first round of each does not count."""
    for name, base, changes, bound in RUNS:
        run = override(preset(base), changes)
        ours, bare = [], []
        for _ in range(1 + ROUNDS):
            ours.append(training(run))
            bare.append(bare_loop(run))
        ours_median, bare_median = statistics.median(ours[1:]), statistics.median(bare[1:])
        medians = {"run ms": 1e3 * ours_median, "loop ms": 1e3 * bare_median}
        yield Result(
            f"{name}: a run's step / a bare loop's", ours_median / bare_median, bound, True, medians
        )
    yield _own_codec()


def _own_codec() -> Result:
    """A codec of one's own in both directions, beside the same class called without any check, as
    a shipped one would be.
    """
    links = {
        f"{side}.compressor": "commsweep.template.codec:RowSigns,k=4" for side in ("fwd", "bwd")
    }
    run = override(preset("digits"), links)
    checked, direct = [], []
    for _ in range(1 + ROUNDS):
        checked.append(training(run))
        with patch.object(Own, "apply", _unchecked):
            direct.append(training(run))
    medians = [statistics.median(seconds[1:]) for seconds in (checked, direct)]
    return Result(
        "digits, a codec of one's own: a step / the same code shipped",
        medians[0] / medians[1],
        1.10,
        medians={"own ms": 1e3 * medians[0], "shipped ms": 1e3 * medians[1]},
    )


def _unchecked(codec: Own, x: Tensor, seed: int = 0) -> Tensor:
    sent = codec.sender.encode(x.detach(), seed)
    codec._nbytes = sum(tensor.numel() * tensor.element_size() for tensor in sent.values())
    return codec.receiver.decode(sent, torch.zeros((), dtype=x.dtype).expand(x.shape))


def training(run: Run) -> float:
    """Seconds of a step of a run."""
    starts: list[float] = []
    begin = Task.on_train_epoch_start

    def noted(task: Task) -> None:
        starts.append(time.perf_counter())
        begin(task)

    trained = override(run, {"epochs": EPOCHS, "eval_every": EPOCHS})
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(Task, "on_train_epoch_start", noted),
    ):
        row = execute(trained, Store(folder), Execution("cpu"))
    return _median_epoch(starts) * EPOCHS / row["steps"]


def bare_loop(run: Run) -> float:
    """Seconds of a step of the loop that one would write, with the same threads."""
    built, optimizer = bare(run)
    starts = []
    for _ in range(EPOCHS):
        starts.append(time.perf_counter())
        bare_epoch(built, optimizer)
    return _median_epoch(starts) / len(built.data.train)


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
        optimizer.step()


def _median_epoch(starts: list[float]) -> float:
    return statistics.median(later - start for start, later in pairwise(starts[2:]))
