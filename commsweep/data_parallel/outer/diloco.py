"""DiLoCo (arXiv 2311.08105).

D = mean of the learners' pseudo-gradients; buf <- mu buf + D; ref <- ref - eta (D + mu buf). Then
every learner goes on from ref.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from commsweep.config.gradients import Outer


class OuterSGD:
    """The outer step of DiLoCo on common weights `reference`."""

    def __init__(self, spec: Outer, reference: list[nn.Parameter]) -> None:
        self.spec, self.reference = spec, reference
        nesterov = spec.nesterov and spec.momentum > 0
        self.sgd = torch.optim.SGD(reference, spec.rate, spec.momentum, nesterov=nesterov)

    def step(self, arrived: dict[int, Tensor], rate: float) -> None:
        """Move the weights of these numbers by what has arrived of them; rate: the learning
        rate.
        """
        for index, gradient in arrived.items():
            self.reference[index].grad = gradient
        self.sgd.step()
        self.sgd.zero_grad()

    @torch.no_grad()
    def amend(self, late: dict[int, Tensor]) -> None:
        """Change the last step into that of D + late; SGD with momentum is linear in D."""
        group = self.sgd.param_groups[0]
        for index, gradient in late.items():
            reference, factor = self.reference[index], 1.0
            momentum = self.sgd.state[reference].get("momentum_buffer")
            if momentum is not None:
                momentum.add_(gradient)
                factor += group["momentum"] if group["nesterov"] else 0.0
            reference.sub_(gradient, alpha=group["lr"] * factor)

    @property
    def installed(self) -> Outer:
        """The settings of the step, read back."""
        group = self.sgd.param_groups[0]
        return self.spec.model_copy(update={"rate": group["lr"], "momentum": group["momentum"]})


class TakeCommon:
    """How a learner's weights follow an outer step: they become the common ones."""

    keeps_sent = False  # whether it needs the weights that were sent
    apart = False  # whether the learners' weights differ afterwards

    def __init__(self, spec: Outer) -> None:
        self.spec = spec

    def apply(self, own: Tensor, common: Tensor, arrived: Tensor, sent: Tensor) -> None:
        """Change the learner's weights `own` of one layer in place. arrived: what the outer step
        was made of. sent: its weights when it sent them, or empty.
        """
        own.copy_(common)
