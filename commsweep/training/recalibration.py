"""Inference without compression after BatchNorm has met dense activations.

BatchNorm gathers its running mean and variance while activations are compressed. Dense inference
then normalizes with statistics of another distribution. This evaluation gathers them anew from
dense batches, scores, and puts the old statistics back: the training goes on unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from commsweep.component import Component
from commsweep.data.module import Batch
from commsweep.errors import UserError

MODE = "recalibrated"  # of inference, beside on and off


class Recalibration(Component):
    """Running statistics of BatchNorm over some dense training batches."""

    def __init__(self, model: nn.Module, batches: int) -> None:
        """Raises UserError when the model keeps no running statistics."""
        super().__init__()
        self.batches = batches
        self.norms = [
            module
            for module in model.modules()
            if isinstance(module, _BatchNorm) and module.track_running_stats
        ]
        if not self.norms:
            raise UserError(
                f"recalibrate={batches}: the model has no BatchNorm, so there are no statistics to "
                "gather; leave recalibrate out"
            )

    @contextmanager
    def gathered(
        self, logits: Callable[[Tensor], Tensor], batches: Iterable[Batch]
    ) -> Iterator[None]:
        """While entered, the running statistics are the mean over these batches' own.

        logits: a forward of the model as inference will run it; batches: from the training set.
        """
        saved = [_statistics(norm) for norm in self.norms]
        modes = [(norm.training, norm.momentum) for norm in self.norms]
        try:
            for norm in self.norms:
                norm.reset_running_stats()
                norm.momentum = None  # a mean over batches, each with the same weight
                norm.train()
            with torch.no_grad():
                for x, _, _ in islice(batches, self.batches):
                    logits(x)
            for norm, (training, _) in zip(self.norms, modes, strict=True):
                norm.train(training)
            yield
        finally:
            for norm, statistics, (training, momentum) in zip(
                self.norms, saved, modes, strict=True
            ):
                norm.train(training)
                norm.momentum = momentum
                for name, value in statistics.items():
                    getattr(norm, name).copy_(value)

    def installed(self) -> dict[str, Any]:
        return {"recalibrate": self.batches}


def _statistics(norm: _BatchNorm) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in norm.named_buffers(recurse=False)}
