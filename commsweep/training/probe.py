"""Measures how long a run would take here: some real steps, extrapolated."""

from __future__ import annotations

import time

import torch

from commsweep.config import Execution, Run
from commsweep.training.run import build

STEPS = 4


def seconds_per_epoch(run: Run, execution: Execution) -> float:
    """Seconds of one epoch with its share of evaluation, from a few measured steps after two of
    warming up.
    """
    built = build(run, execution)
    task, device = built.task.to(built.device), built.device
    # the optimizer's own cost hardly counts
    optimizer = torch.optim.SGD(task.parameters(), 1e-6, 0.9)
    batches = iter(built.data.train)
    boundaries, clock = task.components["boundaries"], []
    for number in range(2 + STEPS):
        x, y, samples = next(batches)
        boundaries.begin(number, samples, device=device)
        started = _clock(device)
        task.loss(task.logits(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        clock.append(_clock(device) - started)
    train = sum(clock[2:]) / STEPS * len(built.data.train)
    # An evaluation passes every held-out sample forward twice; a forward is about a third of a
    # step.
    held_out = len(built.data.val.y) + len(built.data.test.y)
    return train * (1 + 2 / 3 * held_out / len(built.data.train.y) / run.eval_every)


def _clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
