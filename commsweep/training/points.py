"""Points along a training: scores of a fixed part of the validation set, between its evaluations.

How many and how large they are follows from counts of samples alone, so that all seeds, machines
and resumed runs agree. A point changes neither weights nor memories nor random states; the full
evaluations of `eval_every` stay, and alone give a run its scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from commsweep.config import Run
from commsweep.config.training import TextSet
from commsweep.data.module import Batches, Blocks, ImageData

SHARE = 0.05  # samples that all points score together, at most, as a part of those trained on


class Points:
    """When the points of a training come, and what they score.

    count: as many at least, evenly over the optimizer steps, the last one at the end; a training of
    fewer steps has one a step. Each scores the same samples, evenly chosen from the validation set
    (from the test set where there is none): a batch, or more where all points together still score
    at most `SHARE` of the samples that the training sees.
    """

    def __init__(self, run: Run, data: ImageData | Blocks, count: int) -> None:
        total = len(data.train) * run.epochs
        count = min(count, total)
        self.steps = frozenset(math.ceil(total * (k + 1) / count) for k in range(count))
        self.epoch_steps, self.batch = len(data.train), data.train.batch_size
        n = len(data.train.y)
        self.epoch_samples = self.epoch_steps * self.batch if data.train.drop_last else n
        loaders = data.val_dataloader()
        self.split, held_out = "val" if len(loaders) > 1 else "test", loaders[0]
        share = int(SHARE * total * self.batch / count)
        size = min(len(held_out.y), max(self.batch, share))
        self.tokens = data.train.x.shape[1] if isinstance(run.data, TextSet) else 0
        index = torch.linspace(0, len(held_out.y) - 1, size).long().to(held_out.x.device)
        self.samples = Batches(held_out.x[index], held_out.y[index], held_out.batch_size)
        # training losses of passes since the last point, each summed over its rows; these rows
        self._losses: list[float] = []
        self._rows = 0
        self._waiting: list[Tensor] = []  # losses that the host has not read yet

    @property
    def plan(self) -> dict[str, Any]:
        """The points as a row names them: how many, and how many samples of which split."""
        return {
            "count": len(self.steps),
            "examples": len(self.samples.y),
            "split": self.split,
        }

    def due(self, step: int) -> bool:
        """Return whether a point follows this optimizer step, counted from 1."""
        return step in self.steps

    def note(self, loss: Tensor, rows: int) -> None:
        """Add the training loss of a pass, summed over its rows."""
        self._waiting.append(loss.detach())
        self._rows += rows

    def loss(self, gather: Callable[[Any], list[Any]] | None) -> float:
        """Return the mean training loss over the samples since the last call (waits for the
        device). gather: collects the states of all processes, where these share out the passes.
        """
        state = self.state()
        reports = [state] if gather is None else gather(state)
        self._losses, self._rows = [], 0
        # fsum rounds once, so the order of passes, and who made them, does not matter
        total = math.fsum(loss for report in reports for loss in report["losses"])
        return total / max(1, sum(report["rows"] for report in reports))

    def state(self) -> dict[str, Any]:
        """Return the losses and rows since the last point, for a checkpoint (waits for the
        device).
        """
        if self._waiting:
            self._losses += torch.stack(self._waiting).tolist()
            self._waiting = []
        return {"losses": self._losses, "rows": self._rows}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self._losses, self._rows, self._waiting = list(state["losses"]), state["rows"], []

    def record(
        self, step: int, scores: dict[str, float], loss: float, seconds: float
    ) -> dict[str, Any]:
        """The record of a point after so many optimizer steps.

        scores: of its samples. loss: mean training loss since the last point. seconds: of training
        so far.
        """
        epochs, steps = divmod(step, self.epoch_steps)
        samples = epochs * self.epoch_samples + min(steps * self.batch, self.epoch_samples)
        amount = {"tokens": samples * self.tokens} if self.tokens else {"examples": samples}
        values = {"train_loss": loss, **scores}
        return {
            "epoch": step / self.epoch_steps,
            "step": step,
            **amount,
            # of a training that diverges the others say so
            **{key: value for key, value in values.items() if math.isfinite(value)},
            "seconds": round(seconds, 4),
        }


@contextmanager
def scoring(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Evaluate within a training: modes of modules and random states are afterwards as before."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    gpus = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(gpus), torch.no_grad():
        yield
    for module, mode in modes:
        module.training = mode
