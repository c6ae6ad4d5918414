"""Training on gradients of old weights, as pipelines have them that never run empty.

Step t computes forward and backward of all its microbatches with the weights of step t - d and
applies the result to the weights of step t: w[t+1] = w[t] - rate * u(g(w[t-d])). d is the same
for every stage in PipeDream-2BW (arXiv 2006.09503), and one more for each later stage that a
gradient comes back from in asynchronous 1F1B (PipeDream, arXiv 1806.03377, with stashed weights).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from commsweep.component import Component, Moment, Pass
from commsweep.config.training import Delay


class Delayed(Component):
    """Past weights of a network's stages, which its passes use instead of the present ones."""

    def __init__(self, spec: Delay, model: nn.Module, cuts: dict[str, nn.Module]) -> None:
        """cuts: the modules that a boundary follows, by name, in the order of the stages."""
        super().__init__()
        self.spec = spec
        self.weights: list[nn.Parameter] = []
        self.delays: list[int] = []
        self._present: list[Tensor] = []  # of each weight, while a pass uses a past one
        for index, (parameter, delay) in enumerate(late(spec, model, cuts).items()):
            self.weights.append(parameter)
            self.delays.append(delay)
            past = torch.empty_strided(
                (_versions(spec, delay), *parameter.shape),
                (parameter.numel(), *parameter.stride()),
                dtype=parameter.dtype,
                device=parameter.device,
            )
            with torch.no_grad():
                past.copy_(parameter.expand_as(past))
            self.register_buffer(f"past{index}", past)

    def _past(self, index: int) -> Tensor:
        return getattr(self, f"past{index}")

    @torch.no_grad()
    def before_pass(
        self, moment: Moment, pass_: Pass, samples: Tensor, device: torch.device
    ) -> None:
        if self._present:  # an earlier pass of this step
            return
        for index, (parameter, delay) in enumerate(zip(self.weights, self.delays, strict=True)):
            past = self._past(index)
            used = past[(moment.step - delay) % len(past)]
            if self.spec.lookahead:
                # in the place of the oldest, which the present weights take afterwards
                older = past[moment.step % len(past)]
                ahead = self.spec.lookahead
                used = older.mul_(-ahead).add_(used, alpha=1 + ahead)
            self._present.append(parameter.data)
            parameter.data = used

    @torch.no_grad()
    def before_exchange(self, moment: Moment) -> None:
        for index, (parameter, present) in enumerate(zip(self.weights, self._present, strict=True)):
            past = self._past(index)
            parameter.data = present
            past[moment.step % len(past)].copy_(present)
        self._present = []

    def installed(self) -> dict[str, Any]:
        return {"delay": self.spec}


def stages_of(model: nn.Module, cuts: list[nn.Module]) -> dict[nn.Parameter, int]:
    """The stage of each parameter, by the order in which modules are registered; what two stages
    share is the first one's. A cut without weights ends its stage after the last weight before it.
    """
    index_of = {parameter: index for index, parameter in enumerate(model.parameters())}
    modules = list(model.modules())
    ends = []
    for cut in cuts:
        last = modules.index(cut) + len(list(cut.modules()))
        before = [p for module in modules[:last] for p in module.parameters(recurse=False)]
        ends.append(max((index_of[p] for p in before), default=-1))
    return {parameter: sum(index > end for end in ends) for parameter, index in index_of.items()}


def memory_bytes(spec: Delay, model: nn.Module, cuts: dict[str, nn.Module]) -> int:
    """Bytes of the past weights."""
    return sum(
        _versions(spec, delay) * parameter.numel() * parameter.element_size()
        for parameter, delay in late(spec, model, cuts).items()
    )


def late(spec: Delay, model: nn.Module, cuts: dict[str, nn.Module]) -> dict[nn.Parameter, int]:
    """The trained weights that have a delay, with it."""
    late = {}
    for parameter, stage in stages_of(model, list(cuts.values())).items():
        delay = spec.of_stage(stage, len(cuts) + 1)
        if parameter.requires_grad and delay:
            late[parameter] = delay
    return late


def _versions(spec: Delay, delay: int) -> int:
    """Past weights that are kept: looking ahead takes those of one step more."""
    return delay + (spec.lookahead > 0)
