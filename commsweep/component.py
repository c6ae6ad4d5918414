"""The parts of a training besides the model: boundaries, learners, a confined subspace, K-FAC.

A component implements the moments of a step that concern it, and the training knows none of its
members by name. The step itself is written out in `training/step.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Pass:
    """The forward and backward of one learner, or of one microbatch, over some rows of a batch."""

    rows: slice
    size: int
    weight: float  # its share of the batch, times how many share it
    learner: int = 0
    settles: bool = True  # whether it is the learner's last one before gradients are exchanged
    # of the rows that the learner's gradient is the mean of; less where they are cut up
    share: float = 1.0
    whole: bool = True  # whether that gradient is there after it
    turn: int = 0  # place among all passes of the step, those in other processes included
    of: int = 1  # how many these are
    # of its first row, in memories that have one a batch slot: a learner keeps its own
    slot: int = 0
    batch: int = 0  # rows of the whole batch, those of other learners included


@dataclass(frozen=True)
class Moment:
    """The place of a step in a training."""

    step: int  # optimizer steps before it
    epoch: int
    rate: float  # learning rate
    passed: int  # passes of all learners before it
    crossed: int  # passes in this process, this step's included


class Component(nn.Module):
    """Base: takes part in nothing. State that checkpoints must carry is module state (buffers,
    extra state).
    """

    def configured(self, optimizer: torch.optim.Optimizer) -> None:
        """Training begins, or goes on, with this optimizer."""

    def before_pass(
        self, moment: Moment, pass_: Pass, samples: Tensor, device: torch.device
    ) -> None:
        """A forward begins; samples: numbers of its rows, int64 on the host."""

    def after_forward(
        self,
        moment: Moment,
        pass_: Pass,
        logits: Tensor,
        drawn: Callable[[torch.Generator], Tensor],
    ) -> None:
        """Act on its logits, before the backward; drawn: the loss of labels that
        the model itself draws.
        """

    def after_pass(self, moment: Moment, pass_: Pass) -> None:
        """Act once its backward is done."""

    def before_exchange(self, moment: Moment) -> None:
        """All passes of the step are done, and gradients are exchanged next."""

    def after_backward(self, moment: Moment) -> None:
        """Gradients are exchanged and used: the optimizer comes next."""

    def clips(self, most: float) -> bool:
        """Shorten gradients, of which this process has a part only, to the norm `most`; whether
        that was done.
        """
        return False

    def after_step(self, moment: Moment) -> None:
        """Act once the weights have moved.

        With `grad.outer` the model then holds the weights of the last learner.
        """

    def epoch_ended(self, epoch: int) -> None:
        """An epoch's training is over."""

    def before_scoring(self, epoch: int, number: int, compress: bool) -> None:
        """Batch `number` of an evaluation comes, with compression on or off."""

    def installed(self) -> dict[str, Any]:
        """The sections of the Run that it carries out, read back from its objects."""
        return {}

    def evaluation(self) -> dict[str, Any]:
        """Return what it adds to the record of an evaluation."""
        return {}

    def sent_bytes(self) -> dict[str, float]:
        """Return the bytes that it has sent so far, by what they are called in the record of a
        point (`training/points.py`). Asking changes nothing.
        """
        return {}

    def totals(self) -> dict[str, Any]:
        """Return what it adds to the row of the run."""
        return {}

    def non_finite(self) -> tuple[float, str] | None:
        """(in which pass of this process, where) it first saw a value that is not finite."""
        return None
