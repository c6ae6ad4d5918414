"""`commsweep bench steps`: what a step of a whole run costs beside a bare loop over the same model,
batches and optimizer.

Of a run the difference between many epochs and few counts, so that its start and its end do not.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
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
from commsweep.training.run import build, execute

FEW, MANY, ROUNDS = 2, 10, 3  # epochs of a run; measurements, both sides in turn
RUNS: tuple[tuple[str, str, dict[str, Any], float], ...] = (
    ("digits, dense", "digits", {}, 1.10),
    ("a nano GPT-2, dense", "sotu_nano", {"data.train_blocks": 160}, 1.05),
)


def bench() -> Iterator[Result]:
    """Ratios of the medians over rounds; the first round of each is not counted."""
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
    seconds = {}
    for epochs in (FEW, MANY):
        with tempfile.TemporaryDirectory() as folder:
            trained = override(run, {"epochs": epochs, "eval_every": epochs})
            began = time.perf_counter()
            row = execute(trained, Store(folder), Execution("cpu"))
            seconds[epochs] = time.perf_counter() - began
            steps = row["steps"]
    return (seconds[MANY] - seconds[FEW]) / (steps * (MANY - FEW) / MANY)


def bare_loop(run: Run) -> float:
    """Seconds of a step of the loop that one would write, with the same threads."""
    with tempfile.TemporaryDirectory() as folder:
        built = build(run, Execution("cpu"), Path(folder))
    task, boundaries = built.task, built.task.components["boundaries"]
    for hook in boundaries.hooks:
        hook.remove()
    model = task.model.train()
    optimizer = optim.optimizer(run, list(model.parameters()))
    steps = 0
    began = 0.0
    for epoch in range(1 + MANY - FEW):
        if epoch == 1:  # the first is not counted
            began = time.perf_counter()
        for x, y, _ in built.data.train:
            optimizer.zero_grad()
            task.loss(task.logits(x), y).backward()
            optimizer.step()
            steps += epoch > 0
    return (time.perf_counter() - began) / steps
